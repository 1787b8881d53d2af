"""Heads by version: fetched beside the training, kept while batches of theirs are outstanding, cached on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from target_wire.v1 import target_pb2 as pb

from drafter_trainer import heads as heads_module
from drafter_trainer.client import head as client_head
from drafter_trainer.client.head import KEPT_FILES, fetch_head
from drafter_trainer.errors import TargetChangedError, TargetUnavailableError
from drafter_trainer.head import TargetHead
from drafter_trainer.heads import HeadShelf
from drafter_trainer.types import Version

A, B, C = (Version(number, letter * 32) for number, letter in enumerate("abc", 1))


class Server:
    """Stands in for `fetch_head`: gives each version's head, or fails as told."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.fails: dict[str, list[Exception]] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()

    def fetch(self, addresses: object, version: Version, *, cache_dir: Path) -> TargetHead:
        assert self.may_answer.wait(10)
        self.fetched.append(version.digest)
        if errors := self.fails.get(version.digest):
            raise errors.pop(0)
        return TargetHead({"embed_tokens": torch.full((3, 2), float(version.number))}, tied=True, version=version)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(heads_module, "fetch_head", server.fetch)
    monkeypatch.setattr(heads_module, "_RETRY_EVERY_S", 0.01)
    return server


@pytest.fixture
def shelf(server: Server, tmp_path: Path) -> Iterator[HeadShelf]:
    with HeadShelf(
        ["x:1"], cache_dir=tmp_path, device=torch.device("cpu"), dtype=torch.float32, window=2, absence_timeout_s=5.0
    ) as shelf:
        yield shelf


def test_a_head_is_fetched_while_the_one_before_is_in_use(shelf: HeadShelf, server: Server) -> None:
    shelf.head(A)
    server.may_answer.clear()
    shelf.expect(B)
    assert not shelf.wait(B, timeout_s=0.01)
    assert float(shelf.head(A).embed_tokens_VD[0, 0]) == 1.0  # training goes on
    server.may_answer.set()
    assert shelf.wait(B, timeout_s=10.0)
    assert float(shelf.head(B).embed_tokens_VD[0, 0]) == 2.0
    assert server.fetched == [A.digest, B.digest]


def test_a_head_is_kept_while_batches_of_it_may_be_outstanding_and_then_let_go(
    shelf: HeadShelf, server: Server
) -> None:
    shelf.head(A)
    for _ in range(2):
        shelf.head(B)
    assert shelf.digests == {A.digest, B.digest}
    shelf.expect(A)  # a late batch was received
    for _ in range(2):
        shelf.head(B)
    assert shelf.digests == {A.digest, B.digest}
    shelf.head(B)
    assert shelf.digests == {B.digest}


def test_the_same_weights_under_another_number_fetch_nothing(shelf: HeadShelf, server: Server) -> None:  # case 101
    shelf.head(A)
    shelf.head(Version(7, A.digest))
    assert server.fetched == [A.digest]


def test_a_head_that_nobody_has_is_told_once_and_asked_for_again_when_it_is_expected_again(
    shelf: HeadShelf, server: Server
) -> None:
    server.fails[A.digest] = [TargetChangedError("gone")]
    shelf.expect(A)
    with pytest.raises(TargetChangedError, match="gone"):
        shelf.head(A)
    assert float(shelf.head(A).embed_tokens_VD[0, 0]) == 1.0


def test_a_server_that_is_away_for_a_while_is_waited_for(shelf: HeadShelf, server: Server) -> None:
    server.fails[A.digest] = [TargetUnavailableError("away"), TargetUnavailableError("away")]
    shelf.head(A)
    assert len(server.fetched) == 3


def test_leaving_does_not_wait_for_a_server_that_is_away(server: Server, tmp_path: Path) -> None:  # I7
    server.fails[A.digest] = [TargetUnavailableError("away")] * 1000
    with HeadShelf(["x:1"], cache_dir=tmp_path, device=torch.device("cpu"), dtype=torch.float32) as shelf:
        shelf.expect(A)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests that were downloaded."""
    asked: list[str] = []

    def download(addresses: object, version: Version) -> tuple[dict[str, torch.Tensor], pb.HeadDescription]:
        asked.append(version.digest)
        return {"embed_tokens": torch.full((3, 2), float(version.number))}, pb.HeadDescription(
            tie_word_embeddings=True, embedding_scale=2.0, logit_scale=1.0
        )

    monkeypatch.setattr(client_head, "download_head", download)
    return asked


def test_the_disk_keeps_the_heads_used_last(downloads: list[str], tmp_path: Path) -> None:
    versions = [Version(number, f"{number:032x}") for number in range(1, KEPT_FILES + 3)]
    for age, version in enumerate(versions):
        fetch_head(["x:1"], version, cache_dir=tmp_path)
        os.utime(tmp_path / f"head-{version.digest}.safetensors", (age, age))
        fetch_head(["x:1"], versions[0], cache_dir=tmp_path)  # used again each time: never the oldest
    kept = {path.name for path in tmp_path.iterdir()}
    newest = [versions[0], *versions[-KEPT_FILES + 1 :]]
    assert kept == {f"head-{version.digest}.safetensors" for version in newest}
    assert downloads == [version.digest for version in versions]


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 100])
def test_a_damaged_file_costs_a_download_and_nothing_else(content: bytes, downloads: list[str], tmp_path: Path) -> None:
    (tmp_path / f"head-{A.digest}.safetensors").write_bytes(content)
    for _ in range(2):
        head = fetch_head(["x:1"], A, cache_dir=tmp_path)
        assert float(head.embed_tokens_VD[0, 0]) == 1.0
        assert head.embedding_scale == 2.0
    assert downloads == [A.digest]


def test_a_full_disk_costs_the_cache_and_nothing_else(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # I8
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client_head, "save_file", full)
    assert float(fetch_head(["x:1"], A, cache_dir=tmp_path).embed_tokens_VD[0, 0]) == 1.0
    assert list(tmp_path.iterdir()) == []
