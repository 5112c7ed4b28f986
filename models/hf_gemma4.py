"""Gemma-4 configurations: layers of two attention kinds, experts beside a dense part.

Source:
    ``configuration_gemma4.py`` and ``modeling_gemma4.py`` of Hugging Face transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from models.hf_families import num_layers, read_activation, read_attention
from models.hf_fields import FULL, SLIDING, ConfigFields
from models.llm_shape import (
    AttentionShape,
    DenseMlpShape,
    LayerShape,
    LlmShape,
    MoeShape,
    PerLayerInputShape,
)

_SLIDING_PERIOD = 6  # five sliding layers, then a full one
_LAYER_FIELDS = ("head_dim", "num_key_value_heads")


def read_gemma4(fields: ConfigFields, name: str) -> LlmShape:
    """Gemma-4 with its towers: the text part alone."""
    text = fields.table("text_config")
    if text is None:
        raise fields.error("text_config", "missing; must be a table of model_type 'gemma4_text'")
    text.choice("model_type", ("gemma4_text",), "gemma4_text")
    is_tied = fields.flag("tie_word_embeddings", True)
    if text.has("tie_word_embeddings") and fields.has("tie_word_embeddings"):
        inner = text.flag("tie_word_embeddings", True)
        if inner != is_tied:
            raise fields.error(
                "tie_word_embeddings",
                f"must equal that of text_config, found {is_tied} and {inner}",
            )
    towers = [tower for tower in ("vision", "audio") if fields.has(f"{tower}_config")]
    shape = read_gemma4_text(text, name)
    notes = tuple(f"the {tower} tower is not counted" for tower in towers)
    return dataclasses.replace(
        shape, model_type=fields.text("model_type"), notes=shape.notes + notes
    )


def read_gemma4_text(fields: ConfigFields, name: str) -> LlmShape:
    """The text part of Gemma-4, with or without experts."""
    count = num_layers(fields)
    kinds, notes = _layer_kinds(fields, count)
    attentions = _attentions(fields, kinds)
    moe = _experts(fields)
    width = fields.size("intermediate_size")
    is_double = fields.flag("use_double_wide_mlp", False)
    layers = [
        LayerShape(
            attention=attention,
            mlp=DenseMlpShape(
                intermediate_size=2 * width if is_double and attention.reuses_kv else width
            ),
            moe=moe,
            num_norms=4 if moe is None else 7,
        )
        for attention in attentions
    ]
    inputs = None
    if per_layer := fields.size("hidden_size_per_layer_input", default=256, low=0):
        inputs = PerLayerInputShape(
            width=per_layer, vocab_size=fields.size("vocab_size_per_layer_input", default=262_144)
        )
    return LlmShape(
        name=name,
        model_type=fields.text("model_type"),
        hidden_size=fields.size("hidden_size"),
        vocab_size=fields.size("vocab_size", default=262_144),
        is_tied=fields.flag("tie_word_embeddings", True),
        activation=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        max_context_tokens=fields.size("max_position_embeddings", default=131_072),
        layers=tuple(layers),
        per_layer_inputs=inputs,
        notes=tuple(notes),
    )


def _layer_kinds(fields: ConfigFields, count: int) -> tuple[list[str], list[str]]:
    """The attention of each layer, and what to note about it; the last one is always full."""
    kinds = fields.layer_types(count) or [
        SLIDING if (i + 1) % _SLIDING_PERIOD else FULL for i in range(count)
    ]
    if kinds[-1] == FULL:
        return kinds, []
    return [*kinds[:-1], FULL], ["the last layer uses full attention whatever the file says"]


def _attentions(fields: ConfigFields, kinds: Sequence[str]) -> list[AttentionShape]:
    has_bias = fields.flag("attention_bias", False)
    base = read_attention(
        fields, default_kv_heads=4, default_head_dim=256, qkv_bias=has_bias, out_bias=has_bias
    )
    keys_are_values = fields.flag("attention_k_eq_v", False)
    window = fields.size("sliding_window", default=512)
    if fields.text("use_bidirectional_attention") == "all":
        window = window // 2 + 1
    overrides = _overrides(fields, kinds, keys_are_values)
    num_shared = fields.size("num_kv_shared_layers", default=0, low=0, high=len(kinds) - 1)
    first_shared = len(kinds) - num_shared
    if missing := set(kinds) - set(kinds[:first_shared]):
        raise fields.error(
            "num_kv_shared_layers",
            f"leaves no layer of type {missing.pop()!r} whose keys could be reused, "
            f"found {num_shared}",
        )
    layers = []
    for i, kind in enumerate(kinds):
        num_kv_heads = overrides[i].get("num_key_value_heads", base.num_kv_heads)
        if base.num_heads % num_kv_heads:
            raise fields.error(
                "num_global_key_value_heads",
                f"must divide num_attention_heads = {base.num_heads}, found {num_kv_heads}",
            )
        head_dim = overrides[i].get("head_dim", base.head_dim)
        layers.append(
            dataclasses.replace(
                base,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                window_tokens=window if kind == SLIDING else None,
                has_value_projection=not (keys_are_values and kind == FULL),
                reuses_kv=i >= first_shared,
                query_norm_width=head_dim,
                key_norm_width=head_dim,
            )
        )
    return layers


def _overrides(
    fields: ConfigFields, kinds: Sequence[str], keys_are_values: bool
) -> list[dict[str, int]]:
    """What single layers have of their own, in either form a file may give it."""
    found: list[dict[str, int]] = [{} for _ in kinds]
    table = fields.table("per_layer_config")
    if table is None:
        own = {"head_dim": fields.size("global_head_dim", default=512)}
        if keys_are_values and fields.has("num_global_key_value_heads"):
            own["num_key_value_heads"] = fields.size("num_global_key_value_heads")
        return [own if kind == FULL else {} for kind in kinds]
    for key in table.keys():  # noqa: SIM118 - no mapping
        layer = table.table(key)
        if not key.isdecimal() or int(key) >= len(kinds) or layer is None:
            raise table.error(
                key, f"must be the table of a layer within 0..{len(kinds) - 1}, found {key!r}"
            )
        for name in layer.keys():  # noqa: SIM118 - no mapping
            if name not in _LAYER_FIELDS:
                raise layer.error(name, f"unknown; known here: {', '.join(_LAYER_FIELDS)}")
            found[int(key)][name] = layer.size(name)
    return found


def _experts(fields: ConfigFields) -> MoeShape | None:
    if not fields.flag("enable_moe_block", False):
        return None
    num_experts = fields.size("num_experts")
    top_k = fields.size("top_k_experts")
    if top_k > num_experts:
        raise fields.error(
            "top_k_experts", f"must be <= num_experts = {num_experts}, found {top_k}"
        )
    return MoeShape(
        num_experts=num_experts,
        experts_per_token=top_k,
        intermediate_size=fields.size("moe_intermediate_size"),
        has_router_scale=True,
        has_expert_scale=True,
    )
