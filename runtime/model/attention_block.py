"""Projections, norms and rotation around attention."""

from __future__ import annotations

import torch

from runtime.model.attention import Attention
from runtime.model.norms import RmsNorm
from runtime.model.rotary import rotate
from runtime.model.spec import AttentionSpec, ModelSpec
from runtime.model.weights import Weights


class AttentionBlock:
    """Attention of one layer; queries, keys and values come from one product.

    Args:
        number: Of the layer.
        model: Its sizes.
        spec: Of the layer's attention.
        weights: Names beginning with the layer's.
    """

    def __init__(
        self, number: int, model: ModelSpec, spec: AttentionSpec, weights: Weights
    ) -> None:
        self._number, self._spec = number, spec
        weights = weights.under("self_attn.")
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = {"q_proj": queries}
        if spec.reuses_kv is None:
            parts["k_proj"] = keys
            if not spec.keys_are_values:
                parts["v_proj"] = keys
        else:  # checkpoints of some tools hold what nothing reads
            for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight"):
                weights.ignore(name)
        self._project = weights.linear(
            list(parts), list(parts.values()), model.hidden, has_bias=spec.qkv_bias
        )
        self._output = weights.linear(
            ["o_proj"], [model.hidden], queries, has_bias=spec.output_bias
        )
        self._heads = spec.heads
        self._turned = spec.heads + (spec.kv_heads if spec.reuses_kv is None else 0)
        self._head_norm: RmsNorm | None = None
        self._row_norms: tuple[tuple[slice, RmsNorm], ...] = ()
        if spec.norm == "head":
            self._head_norm = _head_norm(spec, model.norm_epsilon, weights)
        elif spec.norm == "row":
            self._row_norms = (
                (
                    slice(queries),
                    RmsNorm(weights.vector("q_norm.weight", queries), model.norm_epsilon),
                ),
                (
                    slice(queries, queries + keys),
                    RmsNorm(weights.vector("k_norm.weight", keys), model.norm_epsilon),
                ),
            )

    def __call__(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        """[T, H] float32 -> [T, H].

        Args:
            hidden: Normed input of the layer.
            rotary: The step's cosines and sines.
            attention: Keeps keys and values.
        """
        spec = self._spec
        rows = self._project(hidden)
        for columns, norm in self._row_norms:
            rows[:, columns] = norm(rows[:, columns])
        if spec.clip is not None:
            rows = rows.clamp_(-spec.clip, spec.clip)
        heads = rows.view(len(rows), -1, spec.head_dim)
        if spec.keys_are_values and spec.reuses_kv is None:
            heads = torch.cat((heads, heads[:, self._heads :]), 1)
        if self._head_norm is not None:
            if spec.norms_values:
                heads = self._head_norm(heads)
                turning = heads[:, : self._turned]
            else:
                turning = self._head_norm(heads[:, : self._turned])
        else:
            turning = heads[:, : self._turned]
        turned = rotate(turning, *rotary)
        keys = values = None
        if spec.reuses_kv is None:
            keys, values = turned[:, self._heads :], heads[:, self._turned :]
        out = attention(self._number, turned[:, : self._heads], keys, values, scale=spec.scale)
        return self._output(out)


def _head_norm(spec: AttentionSpec, epsilon: float, weights: Weights) -> RmsNorm:
    """One norm of all heads that are normed, each with the weights of its kind."""
    factors = [weights.vector("q_norm.weight", spec.head_dim).expand(spec.heads, -1)]
    if spec.reuses_kv is None:
        factors.append(weights.vector("k_norm.weight", spec.head_dim).expand(spec.kv_heads, -1))
        if spec.norms_values:
            factors.append(factors[0].new_ones(spec.kv_heads, spec.head_dim))
    return RmsNorm(torch.cat(factors), epsilon, spec.head_dim)
