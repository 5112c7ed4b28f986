"""Plain experts out of a checkpoint, whichever way it lays them out."""

from __future__ import annotations

import torch

from kernels.cpu.backend import backend
from kernels.cpu.linear import PackedLinear
from kernels.cpu.plain_experts import PlainExperts
from runtime.checkpoint_source import CheckpointSource, SourceBlock
from runtime.checkpoint_tensors import DTYPE_BYTES, read_bytes
from runtime.model.experts import Experts
from runtime.model.experts_plain import ExpertMatrices, KernelExperts, TorchExperts
from runtime.model.linear import kernel_array
from runtime.model.spec import ModelSpec
from runtime.model.weights import TORCH_DTYPES


def load_plain_experts(
    source: CheckpointSource,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> Experts:
    """Read all experts, layer by layer.

    Args:
        source: The opened checkpoint, whose blocks have been held to the configuration.
        spec: Of the model.
        dtype: float32 or bfloat16.
        device: Where they are put.
        threads: Of CPU kernels.

    Raises:
        TensorFileError: If a file cannot be read.
    """
    by_layer: dict[int, list[SourceBlock]] = {}
    for block in source.blocks:
        by_layer.setdefault(block.layer, []).append(block)
    if device.type == "cpu" and backend().library is not None:
        packed = {
            layer: PlainExperts(
                [_pack(block, dtype) for block in blocks[::2]],
                [_pack(block, dtype) for block in blocks[1::2]],
            )
            for layer, blocks in by_layer.items()
        }
        return KernelExperts(packed, spec.activation, threads=threads)
    layers = {
        layer: ExpertMatrices(
            gate_up=torch.stack([_read(block, dtype) for block in blocks[::2]]).to(device),
            down=torch.stack([_read(block, dtype) for block in blocks[1::2]]).to(device),
        )
        for layer, blocks in by_layer.items()
    }
    return TorchExperts(layers, spec.activation)


def _pack(block: SourceBlock, dtype: torch.dtype) -> PackedLinear:
    return PackedLinear.pack(kernel_array(_read(block, dtype)))


def _read(block: SourceBlock, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] of a block."""
    whole = torch.empty(block.rows, block.columns, dtype=dtype)
    first = 0
    for part in block.parts:
        size = part.rows * block.columns
        raw = read_bytes(part.file, part.start, size * DTYPE_BYTES[part.dtype])
        stored = torch.frombuffer(raw, dtype=TORCH_DTYPES[part.dtype])
        whole[first : first + part.rows] = stored.view(part.rows, block.columns)
        first += part.rows
    return whole
