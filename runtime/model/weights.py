"""Tensors of a checkpoint as the parts of a decoder ask for them, each held to its shape.

A tensor that nothing asked for would be ignored silently and make another model of it, so loading
ends with a look at what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from runtime.checkpoint_expert_names import is_expert_tensor
from runtime.checkpoint_required import plain_name
from runtime.checkpoint_shards import Shards, SourceError
from runtime.checkpoint_tensors import read_bytes
from runtime.model.linear import LinearLayer, make_linear
from runtime.quantized_checkpoint import QuantizedCheckpoint

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NOT_USED = re.compile(  # other towers, and frequencies that follow from the configuration
    r"^(vision_|audio_|embed_vision|embed_audio|multi_modal_projector)|rotary_emb\.inv_freq$"
)


class TensorSource(Protocol):
    """Tensors that are no routed expert's, by name as ``plain_name`` gives it."""

    @property
    def label(self) -> str:
        """What messages call it."""

    def names(self) -> Iterator[str]:
        """All names."""

    def entry(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """dtype as safetensors spells it and shape; None if it is not there."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its own dtype."""


class ShardTensors:
    """Tensors in the shards of a folder; read when asked for."""

    def __init__(self, folder: Path, shards: Shards) -> None:
        self._folder, self._shards = folder, shards
        self._names = {
            plain_name(name): name for name in shards.file_by_tensor if not is_expert_tensor(name)
        }

    @property
    def label(self) -> str:
        """See ``TensorSource``."""
        return str(self._folder)

    def names(self) -> Iterator[str]:
        """See ``TensorSource``."""
        return iter(self._names)

    def entry(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See ``TensorSource``."""
        if name not in self._names:
            return None
        full = self._names[name]
        entry = self._shards.headers[self._shards.file_by_tensor[full]][full]
        return entry.dtype, entry.shape

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        full = self._names[name]
        file = self._shards.file_by_tensor[full]
        entry = self._shards.headers[file][full]
        raw = read_bytes(self._folder / file, entry.start, entry.num_bytes)
        return torch.frombuffer(raw, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)


class QuantizedTensors:
    """The tensors of a quantized checkpoint that are no expert's."""

    def __init__(self, checkpoint: QuantizedCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._names = {plain_name(name): name for name in checkpoint.other_tensors}

    @property
    def label(self) -> str:
        """See ``TensorSource``."""
        return str(self._checkpoint.folder)

    def names(self) -> Iterator[str]:
        """See ``TensorSource``."""
        return iter(self._names)

    def entry(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See ``TensorSource``."""
        if name not in self._names:
            return None
        entry = self._checkpoint.other_tensors[self._names[name]][1]
        return entry.dtype, entry.shape

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        dtype, shape, raw = self._checkpoint.other_tensor(self._names[name])
        return torch.frombuffer(bytearray(raw), dtype=TORCH_DTYPES[dtype]).view(shape)


class StateTensors:
    """Tensors that are in memory already, by their Hugging Face names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], label: str = "tensors") -> None:
        self.label = label
        self._tensors = {
            plain_name(name): tensor
            for name, tensor in tensors.items()
            if not is_expert_tensor(name)
        }
        self._spelled = {dtype: name for name, dtype in TORCH_DTYPES.items()}

    def names(self) -> Iterator[str]:
        """See ``TensorSource``."""
        return iter(self._tensors)

    def entry(self, name: str) -> tuple[str, tuple[int, ...]] | None:
        """See ``TensorSource``."""
        if name not in self._tensors:
            return None
        tensor = self._tensors[name]
        return self._spelled.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)

    def read(self, name: str) -> torch.Tensor:
        """See ``TensorSource``."""
        return self._tensors[name].detach()


class Weights:
    """What a decoder is built from.

    Args:
        source: Of the tensors.
        dtype: Of matrices, float32 or bfloat16; vectors are always float32.
        device: Where they are put.
        threads: Of CPU kernels.
        prefix: Of all names, such as ``layers.3.``.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        threads: int = 1,
        prefix: str = "",
    ) -> None:
        self._source, self.dtype, self.device, self.threads = source, dtype, device, threads
        self._prefix = prefix
        self._used: set[str] = set()

    def under(self, prefix: str) -> Weights:
        """The same weights, names beginning with one more prefix."""
        below = Weights(
            self._source,
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            prefix=self._prefix + prefix,
        )
        below._used = self._used
        return below

    def vector(self, name: str, *shape: int) -> torch.Tensor:
        """A float32 tensor of this shape.

        Raises:
            SourceError: If it is missing, of another shape or of a dtype that is not understood.
        """
        return self._read(name, shape).to(self.device, torch.float32)

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> torch.Tensor:
        """Matrices of ``rows`` by ``columns``, one below the other.

        Raises:
            SourceError: As for ``vector``.
        """
        parts = [
            self._read(name, (count, columns)).to(self.dtype)
            for name, count in zip(names, rows, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.to(self.device)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, has_bias: bool = False
    ) -> LinearLayer:
        """One layer of several projections of the same input, without ``.weight`` and ``.bias``.

        Raises:
            SourceError: As for ``vector``.
        """
        weight = self.matrix([f"{name}.weight" for name in names], rows, columns)
        bias = None
        if has_bias:
            bias = torch.cat(
                [
                    self.vector(f"{name}.bias", count)
                    for name, count in zip(names, rows, strict=True)
                ]
            )
        return make_linear(weight, bias, threads=self.threads)

    def ignore(self, name: str) -> None:
        """Nothing will ask for this tensor, should it be there."""
        self._used.add(self._prefix + name)

    def finish(self) -> None:
        """Refuse tensors that nothing asked for.

        Raises:
            SourceError: Naming the first one.
        """
        for name in sorted(self._source.names()):
            if name not in self._used and not _NOT_USED.search(name):
                raise SourceError(
                    f"{self._source.label}: tensor {name}: config.json gives it no place"
                )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = self._prefix + name
        entry = self._source.entry(name)
        label = f"{self._source.label}: tensor {name}"
        if entry is None:
            raise SourceError(f"{label}: is missing; config.json promises {list(shape)}")
        dtype, found = entry
        if found != shape:
            raise SourceError(f"{label}: shape {list(found)}, config.json gives {list(shape)}")
        if dtype not in TORCH_DTYPES:
            raise SourceError(f"{label}: dtype {dtype}, must be one of {', '.join(TORCH_DTYPES)}")
        self._used.add(name)
        return self._source.read(name)
