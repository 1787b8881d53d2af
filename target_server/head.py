"""The target's embedding, head and final norm, as a trainer needs them: what they are, and their bytes piece by piece.

Reading a piece copies just that piece to the host, so a head of gigabytes never has a second copy in host memory. A
head is one version's from its first to its last byte: the current one is read from the model until a swap begins to
write there, and then, like every earlier one, from its checkpoint's files, as long as they are unchanged. Facts that
are no tensors (scales, epsilon) are the config's, which a swap can't change.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from target_wire.codec import dtype_from_torch, dtype_to_torch, tensor_to_buffer
from target_wire.errors import Code, Reason, WireError
from target_wire.messages import spec_to_message
from target_wire.spec import TensorSpec
from target_wire.v1 import target_pb2

from target_server.checkpoint import StoredTensor, stored_tensors
from target_server.errors import UserError
from target_server.loading import LoadedTarget
from target_server.versions import VersionRecord, files_mark
from target_server.weights import WeightMap

__all__ = ["HeadOfVersion", "HeadStore"]

_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class HeadStore:
    """The heads of the version served and of those before it. Calls come from any thread."""

    def __init__(
        self, target: LoadedTarget, weights: WeightMap, current: VersionRecord, earlier: list[VersionRecord]
    ) -> None:
        self._target = target
        live = _head_tensors(target)
        self._specs = {
            name: TensorSpec(name, dtype_from_torch(tensor.dtype), tuple(tensor.shape)) for name, tensor in live.items()
        }
        self._stored_names = {name: weights.stored_name_of(tensor) for name, tensor in live.items()}
        self._lock = threading.Lock()
        self._live: dict[str, torch.Tensor] | None = live
        self._current = current
        self._earlier = earlier

    def open(self, wanted: target_pb2.TargetVersion) -> HeadOfVersion:
        """Returns the head of a version; number 0 and an empty digest mean the current one. Blocks on the disk.

        Raises:
            WireError: VERSION_MISMATCH.
        """
        with self._lock:
            current, records = self._current, [self._current, *self._earlier]
        for record in records:
            if wanted.number in (0, record.number) and wanted.digest in ("", record.digest):
                head = HeadOfVersion(self, record)
                if record != current:
                    head.check_files()
                return head
        raise _mismatch(
            f"version {wanted.number or 'any'}/{wanted.digest or 'any'}: served is {current.number}/{current.digest}"
        )

    def close_live(self) -> None:
        """Ends reading from the model, whose weights will be written: heads go on from files."""
        with self._lock:
            self._live = None

    def open_live(self, current: VersionRecord, earlier: list[VersionRecord]) -> None:
        """Reads the current head from the model again, which holds the weights of this version."""
        live = _head_tensors(self._target)
        with self._lock:
            self._live, self._current, self._earlier = live, current, earlier

    def describe(self, record: VersionRecord) -> target_pb2.HeadDescription:
        """Returns what a version's head consists of and how its parts are used."""
        config = self._target.model.config.get_text_config()
        norm = getattr(self._target.decoder, "norm", None)
        return target_pb2.HeadDescription(
            version=record.version.to_message(),
            tensors=[spec_to_message(spec) for spec in self._specs.values()],
            tie_word_embeddings=self._target.description.tie_word_embeddings,
            embedding_scale=_embedding_scale(self._target.model),
            logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
            logit_scale=_logit_scale(config),
            final_norm_epsilon=float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)) or 0.0),
        )

    def read_live(self, record: VersionRecord, tensor_index: int, elements: slice) -> memoryview | None:
        """Returns a piece out of the model; None when the model does not hold this version now."""
        with self._lock:
            if self._live is None or record != self._current:
                return None
            tensor = list(self._live.values())[tensor_index]
            # A copy: the model may be written to as soon as the lock is free.
            return tensor_to_buffer(tensor.reshape(-1)[elements].to("cpu", copy=True))

    def spec(self, tensor_index: int) -> TensorSpec:
        """Returns what a tensor of the head looks like on the wire."""
        return list(self._specs.values())[tensor_index]

    def stored(self, record: VersionRecord) -> list[StoredTensor]:
        """Returns where a version's head tensors lie.

        Raises:
            WireError: VERSION_MISMATCH: its files are gone or changed, or can't be read without the model.
        """
        try:
            if not record.mark or files_mark(record.checkpoint) != record.mark:
                raise _mismatch(f"version {record.number}: the files in {record.checkpoint} have changed since")
            tensors = {tensor.name: tensor for tensor in stored_tensors(record.checkpoint)}
        except (UserError, OSError) as error:
            raise _mismatch(f"version {record.number}: the files in {record.checkpoint} are gone") from error
        names = list(self._stored_names.values())
        found = [tensors[name] for name in names if name is not None and name in tensors]
        if len(found) < len(names) or any(tensor.dtype not in _STORED_DTYPES for tensor in found):
            raise _mismatch(f"version {record.number}: its head can't be read without loading it; it is gone")
        return found


class HeadOfVersion:
    """One version's head. Used by one caller at a time."""

    def __init__(self, store: HeadStore, record: VersionRecord) -> None:
        self._store = store
        self._record = record
        self._stored: list[StoredTensor] | None = None

    def check_files(self) -> None:
        """Goes on from the files.

        Raises:
            WireError: VERSION_MISMATCH: they are not what they were.
        """
        self._stored = self._store.stored(self._record)

    def describe(self) -> target_pb2.HeadDescription:
        """Returns what the head consists of and how its parts are used."""
        return self._store.describe(self._record)

    def read(self, tensor_index: int, offset_bytes: int, size_bytes: int) -> memoryview:
        """Returns a piece of a tensor's bytes, shorter at its end; empty past it. Blocks on a device copy or the disk.

        Raises:
            WireError: VERSION_MISMATCH: it is neither in the model any more nor in its files.
        """
        spec = self._store.spec(tensor_index)
        itemsize = spec.dtype.itemsize
        end = min(offset_bytes + size_bytes, spec.nbytes)
        elements = slice(offset_bytes // itemsize, end // itemsize)
        if self._stored is None:
            piece = self._store.read_live(self._record, tensor_index, elements)
            if piece is not None:
                return piece
            self.check_files()
        assert self._stored is not None
        return self._read_file(self._stored[tensor_index], spec, elements)

    def _read_file(self, stored: StoredTensor, spec: TensorSpec, elements: slice) -> memoryview:
        dtype = _STORED_DTYPES[stored.dtype]
        count = max(0, elements.stop - elements.start)
        try:
            with stored.file.open("rb", buffering=0) as stream:
                stream.seek(stored.start + elements.start * dtype.itemsize)
                content = bytearray(stream.read(count * dtype.itemsize))
            unchanged = files_mark(self._record.checkpoint) == self._record.mark
        except (UserError, OSError) as error:
            raise _mismatch(f"version {self._record.number}: {stored.file} is gone") from error
        if not unchanged or len(content) < count * dtype.itemsize:
            raise _mismatch(f"version {self._record.number}: {stored.file} has changed since")
        if not count:
            return memoryview(b"")
        return tensor_to_buffer(torch.frombuffer(content, dtype=dtype).to(dtype_to_torch(spec.dtype)))


def _mismatch(detail: str) -> WireError:
    return WireError(Code.FAILED_PRECONDITION, Reason.VERSION_MISMATCH, detail)


def _head_tensors(target: LoadedTarget) -> dict[str, torch.Tensor]:
    """Returns the tensors by their names on the wire; tied weights once."""
    model: Any = target.model
    tensors = {"embed_tokens": model.get_input_embeddings().weight}
    head = model.get_output_embeddings()
    if head is not None and not target.description.tie_word_embeddings:
        tensors["lm_head"] = head.weight
    norm = getattr(target.decoder, "norm", None)
    for name, module, attribute in (("final_norm", norm, "weight"), ("lm_head_bias", head, "bias")):
        tensor = getattr(module, attribute, None)
        if tensor is not None:
            tensors[name] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _embedding_scale(model: Any) -> float:
    """Returns the factor between a row of the table and the first block's input.

    Gemma scales inside its embedding module, by a factor rounded to the weights' type; Granite in its decoder.
    """
    embedding = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, torch.Tensor):
        return float(scale.to(embedding.weight.dtype))
    if scale is not None:
        return float(scale)
    return float(getattr(model.config.get_text_config(), "embedding_multiplier", None) or 1.0)


def _logit_scale(config: Any) -> float:
    """Returns the factor on the logits: Cohere multiplies by logit_scale, Granite divides by logits_scaling."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / float(config.logits_scaling)
    return float(getattr(config, "logit_scale", None) or 1.0)
