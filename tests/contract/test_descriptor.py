"""The contract's own rules: everything is commented, names carry units, and nothing that was published changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc
from target_wire.spec import DType
from target_wire.v1 import target_pb2

PROTO = Path(__file__).parents[2] / "proto"
SOURCE = "target_wire/v1/target.proto"
# One line for each field, enum value and call that was ever published; lines are added, never changed.
PUBLISHED = Path(__file__).parent / "golden" / "published.txt"
UNSIGNED = {
    FieldDescriptorProto.TYPE_UINT32,
    FieldDescriptorProto.TYPE_UINT64,
    FieldDescriptorProto.TYPE_FIXED64,
}
# Sizes of a model, in elements, under the names that configurations use.
ELEMENT_COUNTS = {"hidden_size", "vocab_size"}


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    """The contract compiled with its comments."""
    out = tmp_path_factory.mktemp("descriptor") / "set.binpb"
    includes = files("grpc_tools") / "_proto"
    options = [f"--proto_path={PROTO}", f"--proto_path={includes}", f"--descriptor_set_out={out}"]
    assert protoc.main(["protoc", *options, "--include_source_info", SOURCE]) == 0
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    return file


def fields(file: FileDescriptorProto) -> Iterator[tuple[DescriptorProto, FieldDescriptorProto]]:
    for message in file.message_type:
        for field in message.field:
            yield message, field


def enums(file: FileDescriptorProto) -> list[EnumDescriptorProto]:
    return [*file.enum_type, *(enum for message in file.message_type for enum in message.enum_type)]


def commentable(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Path in the source info (descriptor.proto, SourceCodeInfo) of everything that must carry a comment."""
    paths: dict[tuple[int, ...], str] = {}
    for i, message in enumerate(file.message_type):
        paths[4, i] = message.name
        for j, field in enumerate(message.field):
            paths[4, i, 2, j] = f"{message.name}.{field.name}"
        for j, oneof in enumerate(message.oneof_decl):
            paths[4, i, 8, j] = f"{message.name}.{oneof.name}"
    for i, enum in enumerate(file.enum_type):
        paths[5, i] = enum.name
        for j, value in enumerate(enum.value):
            paths[5, i, 2, j] = f"{enum.name}.{value.name}"
    for i, service in enumerate(file.service):
        paths[6, i] = service.name
        for j, method in enumerate(service.method):
            paths[6, i, 2, j] = f"{service.name}.{method.name}"
    return paths


def published_lines(file: FileDescriptorProto) -> list[str]:
    lines = [
        f"{message.name}.{field.name} = {field.number} "
        f"{FieldDescriptorProto.Label.Name(field.label)} {FieldDescriptorProto.Type.Name(field.type)} {field.type_name}"
        for message, field in fields(file)
    ]
    lines += [f"{enum.name}.{value.name} = {value.number}" for enum in enums(file) for value in enum.value]
    lines += [
        f"{service.name}.{method.name} {method.client_streaming:d}{method.server_streaming:d} "
        f"{method.input_type} {method.output_type}"
        for service in file.service
        for method in service.method
    ]
    return sorted(line.rstrip() for line in lines)


def test_everything_is_commented(contract: FileDescriptorProto) -> None:
    comments = {tuple(place.path): place.leading_comments for place in contract.source_code_info.location}
    names = commentable(contract)
    assert len(names) > 100
    bare = [name for path, name in names.items() if len(comments.get(path, "").split()) < 2]
    assert bare == []


def test_comments_are_sentences(contract: FileDescriptorProto) -> None:
    names = commentable(contract)
    for place in contract.source_code_info.location:
        if tuple(place.path) in names:
            assert place.leading_comments.rstrip().endswith("."), names[tuple(place.path)]


def test_calls_say_whether_they_are_idempotent(contract: FileDescriptorProto) -> None:
    for place in contract.source_code_info.location:
        if len(place.path) == 4 and place.path[0] == 6:
            assert re.search(r"\b[Ii]dempotent\b", place.leading_comments), commentable(contract)[tuple(place.path)]


def test_reasons_in_comments_exist() -> None:
    from target_wire.errors import Code, Reason  # noqa: PLC0415

    text = (PROTO / SOURCE).read_text()
    comments = "\n".join(line for line in text.splitlines() if line.lstrip().startswith("//"))
    words = set(re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", comments))
    assert words - set(Reason.__members__) - set(Code.__members__) == set()


def test_integers_are_signed_and_counts_and_sizes_carry_units(contract: FileDescriptorProto) -> None:
    for message, field in fields(contract):
        name = f"{message.name}.{field.name}"
        assert field.type not in UNSIGNED, name
        assert not field.name.startswith(("num_", "n_")), f"{name}: say _count"
        unitless = re.search(r"(size|length|offset|timeout|duration)$", field.name)
        assert not unitless or field.name in ELEMENT_COUNTS, f"{name}: say the unit"


def test_enums_begin_with_unspecified(contract: FileDescriptorProto) -> None:
    for enum in enums(contract):
        assert enum.value[0].number == 0
        assert enum.value[0].name.endswith("_UNSPECIFIED")


def test_bodies_are_last_and_apart(contract: FileDescriptorProto) -> None:
    for message, field in fields(contract):
        if field.type == FieldDescriptorProto.TYPE_BYTES:
            assert (field.name, field.number) == ("body", 16), message.name
            assert message.field[-1].name == "body", message.name


def test_element_types_are_those_of_the_spec() -> None:
    values = {name: number for name, number in target_pb2.Dtype.items() if number}
    assert values == {f"DTYPE_{dtype.name}": dtype.number for dtype in DType}


def test_generated_code_is_of_this_contract(contract: FileDescriptorProto) -> None:
    bare = FileDescriptorProto()
    bare.CopyFrom(contract)
    bare.ClearField("source_code_info")
    generated = FileDescriptorProto()
    target_pb2.DESCRIPTOR.CopyToProto(generated)
    generated.ClearField("source_code_info")
    for file in (bare, generated):  # protoc fills in the names that Python computes
        for _, field in fields(file):
            field.ClearField("json_name")
    assert bare == generated


def test_what_was_published_is_unchanged_and_what_is_new_is_published(contract: FileDescriptorProto) -> None:
    published = PUBLISHED.read_text().splitlines()
    now = published_lines(contract)
    changed = sorted(set(published) - set(now))
    assert changed == [], "published lines may not change: add a field, reserve the old one"
    new = sorted(set(now) - set(published))
    assert new == [], f"add to {PUBLISHED.name}:\n" + "\n".join(new)
