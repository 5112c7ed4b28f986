"""What the decoder must know of a mixture-of-experts checkpoint's ``config.json``.

Four families whose layers differ in details only: qwen2_moe, qwen3_moe, mixtral, olmoe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MODEL_TYPES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe")


class DecoderConfigError(ValueError):
    """A checkpoint that this decoder cannot run, with the field that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shapes and constants of one decoder; sizes in elements, rotary base without unit.

    Attributes:
        query_key_norm: ``head`` normalises each head by itself (Qwen3), ``row`` the whole
            projection (OLMoE).
        renormalise: Whether the k gate weights of a token are divided by their sum.
        shared_expert: Whether every layer adds a dense expert scaled by a sigmoid gate.
        window: Tokens a query looks back, None for all of them.
    """

    model_type: str
    layers: int
    hidden: int
    vocabulary: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    expert_hidden: int
    norm_epsilon: float
    rotary_base: float
    query_key_norm: Literal["none", "head", "row"]
    renormalise: bool
    shared_expert: bool
    window: int | None
    tied_embeddings: bool
    end_tokens: tuple[int, ...]


def read_decoder_config(source: str | Path | Mapping[str, Any]) -> DecoderConfig:
    """The decoder's view of a ``config.json``, its folder, or its content.

    Raises:
        DecoderConfigError: If a field is missing or asks for something that is not built: another
            model type, scaled rotary positions, layers without experts, clipped projections,
            another activation than SiLU, layers that differ in their attention window.
    """
    name = "config.json"
    if isinstance(source, Mapping):
        fields: Mapping[str, Any] = source
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        name = str(path)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DecoderConfigError(f"{name}: cannot be read: {error}") from error
    return _parse(name, fields)


def _parse(name: str, fields: Mapping[str, Any]) -> DecoderConfig:
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise DecoderConfigError(
            f"{name}: model_type: must be one of {', '.join(MODEL_TYPES)}, found {kind!r}"
        )

    def size(*keys: str) -> int:
        for key in keys:
            value = fields.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise DecoderConfigError(
            f"{name}: {' or '.join(keys)}: must be a positive integer, "
            f"found {fields.get(keys[0])!r}"
        )

    def allow(key: str, allowed: tuple[Any, ...]) -> None:
        if fields.get(key, allowed[0]) not in allowed:
            raise DecoderConfigError(
                f"{name}: {key}: {kind} is built with {allowed[0]!r} only, found {fields[key]!r}"
            )

    allow("hidden_act", ("silu",))
    allow("decoder_sparse_step", (1, None))
    allow("mlp_only_layers", ([], None))
    allow("clip_qkv", (None,))
    if fields.get("rope_scaling"):
        raise DecoderConfigError(f"{name}: rope_scaling: scaled rotary positions are not built")
    rotary = fields.get("rope_parameters") or {}
    if rotary.get("rope_type", "default") != "default":
        raise DecoderConfigError(
            f"{name}: rope_parameters.rope_type: must be 'default', found {rotary['rope_type']!r}"
        )
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    head_dim = fields.get("head_dim") or hidden // heads
    if head_dim % 2:
        raise DecoderConfigError(
            f"{name}: head_dim (hidden_size / num_attention_heads): rotary positions need an even "
            f"number, found {head_dim}"
        )
    default_base = 1e6 if kind == "mixtral" else 1e4
    end = fields.get("eos_token_id")
    return DecoderConfig(
        model_type=str(kind),
        layers=size("num_hidden_layers"),
        hidden=hidden,
        vocabulary=size("vocab_size"),
        heads=heads,
        key_value_heads=size("num_key_value_heads", "num_attention_heads"),
        head_dim=head_dim,
        experts=size("num_experts", "num_local_experts"),
        experts_per_token=size("num_experts_per_tok"),
        expert_hidden=size("moe_intermediate_size", "intermediate_size"),
        norm_epsilon=float(fields.get("rms_norm_eps", 1e-6 if "qwen" in str(kind) else 1e-5)),
        rotary_base=float(rotary.get("rope_theta", fields.get("rope_theta", default_base))),
        query_key_norm={"qwen3_moe": "head", "olmoe": "row"}.get(str(kind), "none"),  # type: ignore[arg-type]
        renormalise=kind == "mixtral" or bool(fields.get("norm_topk_prob", False)),
        shared_expert=kind == "qwen2_moe",
        window=_window(name, fields),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        end_tokens=tuple(end) if isinstance(end, list) else () if end is None else (int(end),),
    )


def _window(name: str, fields: Mapping[str, Any]) -> int | None:
    kinds = set(fields.get("layer_types") or [])
    if len(kinds) > 1:
        raise DecoderConfigError(
            f"{name}: layer_types: all layers must have the same attention, found {sorted(kinds)}"
        )
    if kinds == {"full_attention"} or fields.get("use_sliding_window") is False:
        return None
    window = fields.get("sliding_window")
    return int(window) if window else None
