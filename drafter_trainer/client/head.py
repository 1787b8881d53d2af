"""Fetches the frozen ends of the target (embedding, head, final norm) and keeps them in the run directory.

One file per digest of the weights, so a resumed run need not fetch again and a target that changed is never confused
with the one before; the files used last are kept. A file that can't be read, or written, costs a fetch and nothing
else. Blocks; used by the thread that fetches heads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import crc32c
import grpc
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from target_wire.channel import channel_options
from target_wire.codec import tensor_from_buffer
from target_wire.errors import Reason
from target_wire.messages import spec_from_message
from target_wire.v1 import target_pb2 as pb
from target_wire.v1 import target_pb2_grpc as pb_grpc
from torch import Tensor

from drafter_trainer.client.discovery import describe_blocking, serving_addresses
from drafter_trainer.client.failures import reason_of
from drafter_trainer.errors import TargetChangedError, TargetUnavailableError
from drafter_trainer.head import TargetHead
from drafter_trainer.types import Version

# A head of 5 GB (250k rows of 5,120 in bf16, twice) at 50 MB/s, the slowest network that is of any use.
FETCH_TIMEOUT_S = 120.0
DESCRIBE_TIMEOUT_S = 5.0
# Files kept: an RL loop's hundredth version must not fill the disk.
KEPT_FILES = 4

logger = logging.getLogger(__name__)


def fetch_head(addresses: Sequence[str], version: Version, *, cache_dir: Path) -> TargetHead:
    """The head of one version: from the cache, else from the first replica that has it.

    Args:
        addresses: Fronts of the servers.
        version: Which weights.
        cache_dir: Where heads are kept; made when missing.

    Raises:
        TargetChangedError: No replica serves this version any more.
        TargetUnavailableError: No replica could be asked.
    """
    path = cache_dir / f"head-{version.digest}.safetensors"
    try:
        head = load_head(path, version)
        os.utime(path)
        return head
    except FileNotFoundError:
        pass
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s can't be used (%s); fetching the head again", path, error)
    tensors, description = download_head(addresses, version)
    try:
        save_head(path, tensors, description)
        prune_heads(cache_dir)
    except (OSError, SafetensorError) as error:
        logger.warning("the head of target version %d isn't kept on the disk: %s", version.number, error)
    return build_head(tensors, head_facts(description), version)


def download_head(addresses: Sequence[str], version: Version) -> tuple[dict[str, Tensor], pb.HeadDescription]:
    """Asks the replicas of every front in turn.

    Raises:
        TargetChangedError: Somebody answered, and nobody has this version.
        TargetUnavailableError: Nobody answered.
    """
    failures: list[str] = []
    mismatched = False
    for replica in _replicas(addresses, failures):
        try:
            with grpc.insecure_channel(replica, options=channel_options()) as channel:
                return _receive_head(pb_grpc.TargetReplicaServiceStub(channel), version)
        except grpc.RpcError as error:
            failure = reason_of(error)
            mismatched = mismatched or failure.reason == Reason.VERSION_MISMATCH
            failures.append(f"{replica}: {failure}")
        except HeadDamagedError as error:
            failures.append(f"{replica}: {error}")
    if mismatched:
        raise TargetChangedError(f"no replica has the head of target version {version.number} ({'; '.join(failures)})")
    raise TargetUnavailableError(f"the target's head could not be fetched ({'; '.join(failures) or 'no replica'})")


class HeadDamagedError(Exception):
    """A head arrived short, out of order or with a wrong checksum."""


def _replicas(addresses: Sequence[str], failures: list[str]) -> Iterator[str]:
    for address in addresses:
        try:
            description = describe_blocking(address, timeout_s=DESCRIBE_TIMEOUT_S)
        except grpc.RpcError as error:
            failures.append(f"{address}: {reason_of(error)}")
            continue
        yield from serving_addresses(address, description)


def _receive_head(
    stub: pb_grpc.TargetReplicaServiceStub, version: Version
) -> tuple[dict[str, Tensor], pb.HeadDescription]:
    # By digest alone: a server that was started again may count its versions from 1.
    wanted = pb.TargetVersion(digest=version.digest)
    responses = stub.FetchHead(pb.FetchHeadRequest(version=wanted), timeout=FETCH_TIMEOUT_S)
    description = next(responses).head
    if description.version.digest != version.digest:
        raise HeadDamagedError(f"the head of version {description.version.digest} came for {version.digest}")
    specs = [spec_from_message(message) for message in description.tensors]
    bodies = [bytearray(spec.nbytes) for spec in specs]
    filled = [0] * len(specs)
    for response in responses:
        frame = response.frame
        _check_frame(frame, filled, bodies)
        start = filled[frame.tensor_index]
        bodies[frame.tensor_index][start : start + len(frame.body)] = frame.body
        filled[frame.tensor_index] += len(frame.body)
    short = [spec.name for spec, done in zip(specs, filled, strict=True) if done != spec.nbytes]
    if short or not specs:
        raise HeadDamagedError(f"head ended early in {', '.join(short) or 'everything'}")
    tensors = {
        spec.name: tensor_from_buffer(body, spec.dtype, spec.shape) for spec, body in zip(specs, bodies, strict=True)
    }
    return tensors, description


def _check_frame(frame: pb.HeadFrame, filled: list[int], bodies: list[bytearray]) -> None:
    index = frame.tensor_index
    if not 0 <= index < len(bodies) or frame.offset_bytes != filled[index]:
        raise HeadDamagedError(f"head frame of tensor {index} at byte {frame.offset_bytes} is out of order")
    if filled[index] + len(frame.body) > len(bodies[index]):
        raise HeadDamagedError(f"head frames of tensor {index} exceed its {len(bodies[index])} bytes")
    if crc32c.crc32c(frame.body) != frame.crc32c:
        raise HeadDamagedError(f"checksum of the head frame of tensor {index} at byte {frame.offset_bytes} is wrong")


def head_facts(description: pb.HeadDescription) -> dict[str, float | bool]:
    """What the head's tensors don't say."""
    return {
        "tied": description.tie_word_embeddings,
        "embedding_scale": description.embedding_scale,
        "logit_softcap": description.logit_softcap,
        "logit_scale": description.logit_scale,
        "final_norm_epsilon": description.final_norm_epsilon,
    }


def build_head(tensors: dict[str, Tensor], facts: dict[str, float | bool], version: Version) -> TargetHead:
    """The head as the drafter's loss uses it."""
    return TargetHead(
        tensors,
        tied=bool(facts["tied"]),
        embedding_scale=float(facts["embedding_scale"]),
        logit_softcap=float(facts["logit_softcap"]),
        logit_scale=float(facts["logit_scale"]),
        final_norm_epsilon=float(facts["final_norm_epsilon"]),
        version=version,
    )


def save_head(path: Path, tensors: dict[str, Tensor], description: pb.HeadDescription) -> None:
    """Writes the file under another name and renames it: ranks may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, temporary, metadata={"facts": json.dumps(head_facts(description))})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def prune_heads(cache_dir: Path) -> None:
    """Removes all but the files used last. Another rank may do so at the same time, or miss a file and fetch it."""
    used: list[tuple[float, Path]] = []
    for path in cache_dir.glob("head-*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            used.append((path.stat().st_mtime, path))
    for _, path in sorted(used, reverse=True)[KEPT_FILES:]:
        path.unlink(missing_ok=True)


def load_head(path: Path, version: Version) -> TargetHead:
    """Reads what ``save_head`` wrote."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return build_head(tensors, facts, version)
