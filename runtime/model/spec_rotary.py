"""Rotary positions as configurations write them, old form and new.

The new form is one table ``rope_parameters``, in Gemma-4 one per kind of attention. The old form
has ``rope_theta`` and, where positions are stretched, a table ``rope_scaling``.
"""

from __future__ import annotations

import math
from typing import get_args

from runtime.model.rotary import Rotary, RotaryKind
from runtime.model.spec_fields import SpecFields

_KINDS: tuple[RotaryKind, ...] = get_args(RotaryKind)
_FULL = "full_attention"


def read_rotary(
    fields: SpecFields,
    *,
    head_dim: int,
    max_tokens: int,
    default_base: float,
    layer_kind: str | None,
) -> Rotary:
    """Rotary positions of a layer.

    Args:
        fields: The configuration.
        head_dim: Of the layer.
        max_tokens: Context of the configuration, the original one where none is given.
        default_base: Where none is given.
        layer_kind: Name of the table in Gemma-4; None for families with one table.

    Raises:
        ModelConfigError: If a field is missing or out of range, or the kind is not built:
            ``dynamic`` and ``longrope`` let a token's rotation depend on tokens after it.
    """
    if layer_kind is not None:
        return _read_gemma(fields, layer_kind, head_dim, max_tokens)
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    base = fields.number("rope_theta", default_base)
    if table is None:
        return Rotary(base=base, head_dim=head_dim)
    return _read(fields, table, table.number("rope_theta", base), head_dim, max_tokens)


def _read_gemma(fields: SpecFields, layer_kind: str, head_dim: int, max_tokens: int) -> Rotary:
    tables = fields.table("rope_parameters")
    if tables is None:
        if layer_kind == _FULL:
            return Rotary(kind="proportional", base=1e6, head_dim=head_dim, share=0.25)
        return Rotary(base=1e4, head_dim=head_dim)
    table = tables.table(layer_kind)
    if table is None:
        tables.refuse(layer_kind, "must be a table with rope_type and rope_theta")
    return _read(fields, table, table.number("rope_theta"), head_dim, max_tokens)


def _read(
    fields: SpecFields, table: SpecFields, base: float, head_dim: int, max_tokens: int
) -> Rotary:
    kind = table.choice("rope_type" if table.has("rope_type") else "type", _KINDS, "default")
    share = table.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1 or (share < 1 and kind != "proportional"):
        rule = "must be 1 but for rope_type 'proportional', where it may be less"
        table.refuse("partial_rotary_factor", rule, share)
    original = _original_tokens(fields, table, max_tokens)
    if kind == "proportional":
        factor = table.number("factor", 1.0)
        return Rotary(kind=kind, base=base, head_dim=head_dim, share=share, factor=factor)
    if kind == "linear":
        return Rotary(kind=kind, base=base, head_dim=head_dim, factor=table.number("factor"))
    if kind == "llama3":
        low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
        if high <= low:
            table.refuse("high_freq_factor", f"must be > low_freq_factor = {low:g}")
        return Rotary(
            kind=kind,
            base=base,
            head_dim=head_dim,
            factor=table.number("factor"),
            original_tokens=original,
            low_frequency_factor=low,
            high_frequency_factor=high,
        )
    if kind == "yarn":
        factor = table.number("factor", max_tokens / original)
        return Rotary(
            kind=kind,
            base=base,
            head_dim=head_dim,
            factor=factor,
            original_tokens=original,
            beta_fast=table.number("beta_fast", 32.0),
            beta_slow=table.number("beta_slow", 1.0),
            truncate=table.flag("truncate", True),
            amplitude=_yarn_amplitude(table, factor),
        )
    return Rotary(base=base, head_dim=head_dim)


def _original_tokens(fields: SpecFields, table: SpecFields, max_tokens: int) -> int:
    name = "original_max_position_embeddings"
    return int(fields.number(name, table.number(name, float(max_tokens))))


def _yarn_amplitude(table: SpecFields, factor: float) -> float:
    given = table.optional_number("attention_factor")
    if given is not None:
        return given
    some, all_ = table.optional_number("mscale"), table.optional_number("mscale_all_dim")
    if some and all_:
        return _yarn_scale(factor, some) / _yarn_scale(factor, all_)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def context_tokens(fields: SpecFields, max_tokens: int) -> int:
    """Longest sequence: that of the configuration, or what YaRN stretches the original one to.

    Args:
        fields: The configuration.
        max_tokens: ``max_position_embeddings``.
    """
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    if table is None or "yarn" not in (table.get("rope_type"), table.get("type")):
        return max_tokens
    original = _original_tokens(fields, table, max_tokens)
    return max(max_tokens, int(original * table.number("factor", max_tokens / original)))
