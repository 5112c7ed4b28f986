"""A checkpoint folder, plain or quantized, as a decoder and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from runtime.checkpoint_shards import open_shards
from runtime.checkpoint_source import CheckpointSource
from runtime.model.decoder import Decoder
from runtime.model.experts import Experts
from runtime.model.load_experts import load_plain_experts
from runtime.model.quantized_experts import require_blocks
from runtime.model.spec import ModelSpec
from runtime.model.spec_config import read_model_spec
from runtime.model.weights import QuantizedTensors, ShardTensors, TensorSource, Weights
from runtime.quantized_checkpoint import QuantizedCheckpoint
from runtime.quantized_manifest import MANIFEST

DTypeChoice = Literal["auto", "float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to compute.

    Attributes:
        folder: Of the checkpoint.
        spec: What it computes.
        decoder: All but the routed experts.
        kind: ``none`` without routed experts, ``plain`` with ``experts``, ``quantized`` with
            ``checkpoint``, whose blocks have yet to be put into an arena.
        dtype: Of the decoder's matrices.
        experts: Plain experts.
        checkpoint: Of quantized experts.
    """

    folder: Path
    spec: ModelSpec
    decoder: Decoder
    kind: Literal["none", "plain", "quantized"]
    dtype: torch.dtype
    experts: Experts | None = None
    checkpoint: QuantizedCheckpoint | None = None


def load_model(
    folder: Path | str,
    *,
    dtype: DTypeChoice = "auto",
    device: torch.device | str = "cpu",
    threads: int | None = None,
    verify: bool = False,
) -> LoadedModel:
    """Load a checkpoint.

    Args:
        folder: With ``config.json`` and safetensors, or written by ``runtime quantize``.
        dtype: Of matrices; ``auto`` keeps bfloat16 and makes float32 of all else.
        device: Where the decoder and plain experts are put.
        threads: Of CPU kernels; None for torch's number of threads.
        verify: Also compare the checksums of a quantized checkpoint.

    Raises:
        ModelConfigError: If the configuration asks for what is not built.
        SourceError: If a tensor is missing, of another shape or dtype, or has no place.
        TensorFileError: If a file is damaged.
        QuantizedCheckpointError: If a quantized checkpoint is damaged or of another model.
        ValueError: If ``dtype`` is none of the three.
    """
    folder, device = Path(folder), torch.device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"dtype: must be auto, float32 or bfloat16, found {dtype!r}")
    threads = torch.get_num_threads() if threads is None else threads
    spec = read_model_spec(folder)
    checkpoint: QuantizedCheckpoint | None = None
    source: TensorSource
    if (folder / MANIFEST).exists():
        checkpoint = QuantizedCheckpoint.open(folder, verify=verify)
        require_blocks(checkpoint, spec)
        source = QuantizedTensors(checkpoint)
    else:
        plain = CheckpointSource.open(folder) if spec.moe_layers else None
        source = ShardTensors(folder, plain.shards if plain else open_shards(folder))
    chosen = _stored_dtype(source) if dtype == "auto" else _DTYPES[dtype]
    weights = Weights(source, dtype=chosen, device=device, threads=threads)
    decoder = Decoder(spec, weights)
    if checkpoint is not None:
        return LoadedModel(folder, spec, decoder, "quantized", chosen, checkpoint=checkpoint)
    if plain is None:
        return LoadedModel(folder, spec, decoder, "none", chosen)
    experts = load_plain_experts(plain, spec, dtype=chosen, device=device, threads=threads)
    return LoadedModel(folder, spec, decoder, "plain", chosen, experts=experts)


def _stored_dtype(source: TensorSource) -> torch.dtype:
    """bfloat16 if the embedding is stored so, else float32."""
    entry = source.entry("embed_tokens.weight")
    return torch.bfloat16 if entry is not None and entry[0] == "BF16" else torch.float32
