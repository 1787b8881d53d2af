"""A swap of two replica processes, as a user sees it: streams go on, versions are whole, refusals change nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from target_wire.v1 import target_pb2 as pb

from target_server.versions import weights_digest
from tests.support.served_targets import some_ids, write_target
from tests.support.server_process import START_TIMEOUT_S, ServerProcess, running_server, wait_until
from tests.support.stream_client import StreamClient, capture, fetch_head, reason_of
from tests.support.swapping import loaded, swap, swap_command
from tests.support.target_variants import WEIGHTS, Oracle, scaled, write_variant

# Each start of a replica imports torch and transformers; see START_TIMEOUT_S.
pytestmark = pytest.mark.timeout(600)

TAP = 4
SEQUENCES = [some_ids(length, seed=length) for length in (5, 9, 17, 33)]


class Models:
    """A root with versions of one checkpoint.

    Attributes:
        root: the directory.
        paths: by name.
        digests: by name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        old = write_target(root / "old", "qwen3")
        self.paths = {
            "old": old,
            "copy": write_variant(old, root / "copy", lambda _tensors: None),
            "layer": write_variant(old, root / "layer", scaled("layers.2.")),
            "head": write_variant(old, root / "head", scaled("lm_head")),
        }
        self.digests = {name: weights_digest(path) for name, path in self.paths.items()}
        self.oracle = Oracle({self.digests[name]: path for name, path in self.paths.items()})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--devices", "cpu,cpu", "--limits.max_batch_token_count", "256")
    with running_server(models.paths["old"], tmp_path_factory.mktemp("server"), *flags) as running:
        wait_until(lambda: serving(running) == 2, START_TIMEOUT_S)
        yield running


def serving(server: ServerProcess) -> int:
    return sum(replica.state == pb.REPLICA_STATE_SERVING for replica in server.describe().replicas)


def assert_rows(answers: list[pb.CaptureHiddenStatesResponse], oracle: Oracle) -> None:
    for answer in answers:
        expected = oracle.rows(answer.header.version.digest, SEQUENCES[2], TAP)
        assert answer.body == expected.contiguous().numpy().tobytes()


def both(server: ServerProcess) -> list[pb.CaptureHiddenStatesResponse]:
    return [capture(server.replica_address(index), [TAP], [SEQUENCES[2]]) for index in (0, 1)]


def test_streams_go_on_through_swaps_and_no_batch_mixes_versions(server: ServerProcess, models: Models) -> None:
    # I3, cases 101, 102, 104, 107: an identical copy, one layer, the head alone, and back.
    first = server.describe().version.number
    with loaded(server, TAP, SEQUENCES) as loads:
        for name in ("copy", "layer", "head", "old"):
            (*_, done) = swap(server, models.paths[name])
            assert done.stage == pb.SWAP_STAGE_DONE
            assert done.version.digest == models.digests[name]
            assert server.describe().version == done.version
            for load in loads:
                load.wait_for_more()
    digests = {first + step: models.digests[name] for step, name in enumerate(("old", "copy", "layer", "head", "old"))}
    for load in loads:
        headers = [batch.header for batch in load.batches]
        assert load.lost_count == 0
        assert sorted(header.request_id for header in headers) == list(range(len(headers)))
        assert [header.version.number for header in headers] == sorted(header.version.number for header in headers)
        assert {header.version.number: header.version.digest for header in headers} == digests
        for batch in load.batches:
            expected = models.oracle.rows(batch.header.version.digest, load.ids(batch.header.request_id), TAP)
            assert torch.equal(batch.rows_TLD[:, 0], expected)
    described = server.describe()
    assert [v.digest for v in described.earlier_versions[:4]] == [digests[first + step] for step in (3, 2, 1, 0)]
    assert described.model.name == "old"
    for version in (described.version, *described.earlier_versions[:4]):
        for index in (0, 1):
            head, tensors = fetch_head(server.replica_address(index), number=version.number)
            assert head.version == version
            expected = models.oracle.head(version.digest)
            assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_stages_come_in_order_and_say_how_far_each_replica_is(server: ServerProcess, models: Models) -> None:
    messages = swap(server, models.paths["layer"], wait_for_trainer=True)
    assert [*dict.fromkeys(m.stage for m in messages)] == [1, 2, 3, 4, 5]
    assert {m.checkpoint for m in messages} == {str(models.paths["layer"])}
    read = [m for m in messages if m.stage == pb.SWAP_STAGE_READ][-1]
    sizes = sum(tensor.nbytes for tensor in load_file(models.paths["layer"] / WEIGHTS).values())
    assert [(r.index, r.read_bytes, r.total_bytes) for r in read.replicas] == [(0, sizes, sizes), (1, sizes, sizes)]
    assert all(replica.committed for replica in messages[-1].replicas)
    assert read.version == pb.TargetVersion(digest=models.digests["layer"])
    swap(server, models.paths["old"])


def test_dry_run_changes_nothing(server: ServerProcess, models: Models) -> None:
    before = server.describe().version
    (*_, done) = swap(server, "layer", dry_run=True)  # relative to the root
    assert done.stage == pb.SWAP_STAGE_DONE
    assert done.version == pb.TargetVersion(digest=models.digests["layer"])
    assert server.describe().version == before
    assert {answer.header.version.number for answer in both(server)} == {before.number}


def test_same_request_is_the_same_swap(server: ServerProcess, models: Models) -> None:
    ends: list[pb.SwapTargetResponse] = []

    def ask() -> None:
        ends.append(swap(server, models.paths["copy"], request_id="once")[-1])

    before = server.describe().version.number
    callers = [threading.Thread(target=ask) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    ask()
    assert [end.version.number for end in ends] == [before + 1] * 4
    assert server.describe().version.number == before + 1
    with pytest.raises(grpc.RpcError) as other:
        swap(server, models.paths["layer"], request_id="once")
    assert reason_of(other.value) == "BAD_REQUEST"
    for bad in ("", "x" * 129):
        with pytest.raises(grpc.RpcError) as refused:
            swap(server, models.paths["layer"], request_id=bad)
        assert reason_of(refused.value) == "BAD_REQUEST"


def test_second_swap_during_a_first_is_refused(server: ServerProcess, models: Models) -> None:
    refused: list[str] = []

    def ask_again(message: pb.SwapTargetResponse) -> None:
        if message.stage == pb.SWAP_STAGE_VALIDATE:
            with pytest.raises(grpc.RpcError) as error:
                swap(server, models.paths["layer"])
            refused.append(reason_of(error.value))

    # A replica that can't read on keeps the first one going.
    pids = server.replica_pids()
    os.kill(pids[0], signal.SIGSTOP)
    try:
        thread = threading.Timer(2.0, os.kill, (pids[0], signal.SIGCONT))
        thread.start()
        swap(server, models.paths["copy"], on_message=ask_again)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert refused == ["SWAP_IN_PROGRESS"]


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def _edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return edit


def _cut(path: Path) -> None:
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-5])


def _garble(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"\x50\x4b\x03\x04" * 4096)


def _pickle(path: Path) -> None:
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")
    (path / WEIGHTS).unlink()


def _both_formats(path: Path) -> None:
    torch.save(load_file(path / WEIGHTS), path / "pytorch_model.bin")


def _tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")


def _link_out(path: Path) -> None:
    outside = path.parent.parent / "outside.safetensors"
    shutil.move(path / WEIGHTS, outside)
    (path / WEIGHTS).symlink_to(outside)


def _index_out(path: Path) -> None:
    outside = path.parent.parent / "indexed.safetensors"
    shutil.move(path / WEIGHTS, outside)
    names = {name: "../../indexed.safetensors" for name in load_file(outside)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


_NAME = "model.layers.1.mlp.up_proj.weight"
REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (_edit_config(architectures=["LlamaForCausalLM"]), "config.json architectures: found ['Llama"),
    "model type": (_edit_config(model_type="llama"), "config.json model_type: found llama, expected qwen3"),
    "hidden size": (_edit_config(hidden_size=32), "config.json hidden_size: found 32, expected 64"),
    "layers": (_edit_config(num_hidden_layers=5), "config.json num_hidden_layers: found 5, expected 6"),
    "vocabulary": (_edit_config(vocab_size=321), "config.json vocab_size: found 321, expected 320"),
    "tying": (_edit_config(tie_word_embeddings=True), "config.json tie_word_embeddings: found True, expected False"),
    "norm epsilon": (_edit_config(rms_norm_eps=1e-3), "config.json rms_norm_eps: found 0.001, expected 1e-06"),
    "missing": (_edit_tensors(lambda tensors: tensors.pop(_NAME)), f"{_NAME}: found missing, expected present"),
    "extra": (_edit_tensors(lambda t: t.update(x=torch.ones(2))), "x: found present, expected absent"),
    "head rows": (
        _edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1].clone()})),
        "shape of lm_head.weight: found [319, 64], expected [320, 64]",
    ),
    "dtype": (
        _edit_tensors(lambda t: t.update({_NAME: t[_NAME].bfloat16()})),
        f"dtype of {_NAME}: found bfloat16, expected float32",
    ),
    "nan": (
        _edit_tensors(lambda t: t[_NAME].fill_(torch.nan)),
        f"{_NAME}: found a NaN or an infinity, expected finite values",
    ),
    "cut short": (_cut, "is cut short or not a safetensors file"),
    "corrupt": (_garble, "is cut short or not a safetensors file"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "holds no *.safetensors"),
    "pickle": (_pickle, "weights: found the pickle pytorch_model.bin, which can run code, expected safetensors only"),
    "pickle beside": (_both_formats, "weights: found the pickle pytorch_model.bin"),
    "tokenizer": (_tokenizer, "tokenizer: found "),
    "link outside": (_link_out, "model.safetensors: found a way to "),
    "index outside": (_index_out, "indexed.safetensors: found a way to "),
}


def test_what_can_not_replace_the_target_is_refused_and_the_stream_is_undisturbed(
    server: ServerProcess, models: Models, tmp_path: Path
) -> None:
    # I8, I9, cases 103 and 105
    before = server.describe()
    with loaded(server, TAP, SEQUENCES) as loads:
        for name, (damage, expected) in REFUSALS.items():
            path = models.root / f"bad {name}"
            shutil.copytree(models.paths["old"], path)
            damage(path)
            _refused(server, path, expected, name)
            _refused(server, path, expected, name, dry_run=True)
        for path, expected in (
            (tmp_path, f"path: found {tmp_path.resolve()}, expected a directory below swap.checkpoint_root"),
            ("../..", "path: found "),
            (models.root, "path: found "),
            (models.root / "none", "expected a directory that exists"),
            ("", "path: found '', expected a directory"),
        ):
            _refused(server, path, expected, str(path))
        for load in loads:
            load.wait_for_more()
    for load in loads:
        assert load.lost_count == 0
        assert {batch.header.version.number for batch in load.batches} == {before.version.number}
        for batch in load.batches:
            expected_rows = models.oracle.rows(batch.header.version.digest, load.ids(batch.header.request_id), TAP)
            assert torch.equal(batch.rows_TLD[:, 0], expected_rows)
    assert server.describe().version == before.version


def _refused(server: ServerProcess, path: object, expected: str, name: str, **fields: object) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        swap(server, path, **fields)
    assert isinstance(refused.value, grpc.Call)
    detail = refused.value.details() or ""
    assert reason_of(refused.value) == "SWAP_REFUSED", name
    assert expected in detail, name
    assert "\n" not in detail


def test_directory_being_served_may_not_be_overwritten_and_swapped_to(server: ServerProcess, models: Models) -> None:
    own = models.root / "own"
    shutil.copytree(models.paths["old"], own)
    swap(server, own)
    tensors = load_file(own / WEIGHTS)
    save_file({**tensors, _NAME: tensors[_NAME] * 2}, own / "new.safetensors", metadata={"format": "pt"})
    (own / "new.safetensors").replace(own / WEIGHTS)  # another file: the served one stays mapped
    _refused(server, own, "path: found the directory being served, with other weights", "own")
    swap(server, models.paths["old"])
    swap(server, own)
    swap(server, models.paths["old"])


def test_command_shows_stages_and_ends_with_version_and_digest(server: ServerProcess, models: Models) -> None:
    before = server.describe().version.number
    ended = swap_command(server, "--checkpoint", str(models.paths["layer"]), "--wait-for-trainer")
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in lines[:2]] == ["validate", "read"]
    assert lines[-1] == f"version {before + 1} {models.digests['layer']} {models.paths['layer']}"
    dry = swap_command(server, "--checkpoint", "old", "--dry-run")
    assert dry.stdout.splitlines()[-1] == f"can be served: {models.digests['old']} {models.paths['old']}"
    assert server.describe().version.number == before + 1
    refused = swap_command(server, "--checkpoint", "/")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("target-server: --checkpoint: /: path: found /, expected a directory below ")
    swap(server, models.paths["old"])


def test_session_that_has_had_no_batch_of_the_new_version_is_waited_for(server: ServerProcess, models: Models) -> None:
    with StreamClient(server.replica_address(1)) as client:
        client.open([TAP])
        client.grant(1 << 20)
        client.request(1, [SEQUENCES[0]])
        client.receive_batch()
        waited: list[int] = []

        def take_one(message: pb.SwapTargetResponse) -> None:
            if message.stage == pb.SWAP_STAGE_FOLLOW:
                waited.append(message.lagging_session_count)
                if waited.count(1) == 1 and message.lagging_session_count == 1:
                    client.request(2, [SEQUENCES[0]])
                    client.receive_batch()

        (*_, done) = swap(server, models.paths["copy"], wait_for_trainer=True, on_message=take_one)
        assert done.stage == pb.SWAP_STAGE_DONE
        assert 1 in waited
        assert waited[-1] == 0


def test_nothing_is_lost_while_weights_are_read(server: ServerProcess) -> None:
    """The pause of a swap is the copy and the batches that run, not the reading."""
    pauses = [replica.stats.swap_pause_seconds for replica in server.describe().replicas]
    assert all(0 < pause < 1.0 for pause in pauses), pauses


def test_version_survives_restarts_of_replicas_and_front(server: ServerProcess, models: Models, tmp_path: Path) -> None:
    # cases 105 and 106; the last test of this server
    (*_, done) = swap(server, models.paths["layer"], request_id="kept")
    killed = server.replica_pids()[0]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: serving(server) == 1)
    wait_until(lambda: serving(server) == 2, START_TIMEOUT_S)
    answers = both(server)
    assert {answer.header.version.number for answer in answers} == {done.version.number}
    assert_rows(answers, models.oracle)
    os.kill(server.process.pid, signal.SIGKILL)
    with running_server(models.paths["old"], tmp_path, "--devices", "cpu,cpu") as again:
        wait_until(lambda: serving(again) == 2, START_TIMEOUT_S)
        assert again.describe().version == done.version
        assert "goes on with version" in again.log()
        answers = both(again)
        assert {answer.header.version.number for answer in answers} == {done.version.number}
        assert_rows(answers, models.oracle)
        earlier = again.describe().earlier_versions[0]
        assert fetch_head(again.replica_address(0), number=earlier.number)[0].version == earlier
        # The swap before the restart is still the same swap.
        assert swap(again, models.paths["layer"], request_id="kept")[-1].version == done.version
        assert again.describe().version == done.version
        # I8: it can't be remembered, so it does not happen.
        state = models.root / ".old.target-state.json"
        kept = state.read_bytes()

        reader = again.replica_pids()[0]

        def break_state(message: pb.SwapTargetResponse) -> None:
            if message.stage == pb.SWAP_STAGE_READ and state.is_file():
                state.unlink()
                state.mkdir()
                os.kill(reader, signal.SIGCONT)

        os.kill(reader, signal.SIGSTOP)  # it has not read everything before the state file is broken
        with pytest.raises(grpc.RpcError) as failed:
            swap(again, models.paths["head"], on_message=break_state)
        assert reason_of(failed.value) == "SWAP_FAILED"
        assert again.describe().version == done.version
        answers = both(again)
        assert {answer.header.version.number for answer in answers} == {done.version.number}
        assert_rows(answers, models.oracle)
        state.rmdir()
        state.write_bytes(kept)
        assert swap(again, models.paths["head"])[-1].version.number == done.version.number + 1


def test_new_checkpoints_of_a_watched_directory_are_served(models: Models, tmp_path: Path) -> None:
    watched = tmp_path / "run"
    watched.mkdir()
    first = shutil.copytree(models.paths["old"], watched / "step-0")
    os.utime(first / WEIGHTS, (1, 1))
    flags = ("--swap.watch_dir", str(watched), "--swap.watch_poll_s", "0.2", "--swap.watch_settle_s", "0.5")
    with running_server(first, tmp_path, *flags) as server:
        assert server.describe().version.number == 1
        write_variant(models.paths["old"], watched / "step-1", scaled("layers.2."))
        wait_until(lambda: server.describe().version.number == 2, 60)
        assert server.describe().version.digest == models.digests["layer"]
        bad = write_variant(models.paths["old"], watched / "step-2", lambda tensors: tensors.pop("lm_head.weight"))
        wait_until(lambda: "lm_head.weight: found missing" in server.log(), 60)
        time.sleep(1.0)
        assert server.log().count(f"{bad} is not served") == 1
        write_variant(models.paths["old"], watched / "step-3", scaled("lm_head"))
        wait_until(lambda: server.describe().version.number == 3, 60)
        assert server.describe().version.digest == models.digests["head"]
