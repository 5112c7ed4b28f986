"""The shape of a decoder-only language model: what each layer holds, in sizes and nothing else.

A model is a list of layers, because in real models layers differ: sliding and full attention,
dense and mixture-of-experts feed-forward parts, layers that reuse the keys of an earlier one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Module = Literal["gate_up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention of one layer.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of a query, key and value head.
        window_tokens: Tokens that stay visible; None where all do.
        has_value_projection: False where the key projection also gives the values. Keys and values
            still differ after norms and rotation, so both are cached.
        reuses_kv: True where keys and values are those of an earlier layer: none are projected,
            none are cached.
        has_qkv_bias: Query, key and value projections have biases.
        has_output_bias: The output projection has one.
        query_norm_width: Values of the query norm's vector; 0 without one.
        key_norm_width: Values of the key norm's vector; 0 without one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    has_value_projection: bool = True
    reuses_kv: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    query_norm_width: int = 0
    key_norm_width: int = 0

    def __post_init__(self) -> None:
        _require_positive(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window_tokens=self.window_tokens,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads = {self.num_heads}, found {self.num_kv_heads}"
            )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the cache keeps per token: a key and a value per key/value head."""
        return 0 if self.reuses_kv else 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Multi-head latent attention of one layer; the cache keeps the latent and one rotary key.

    Attributes:
        num_heads: Heads.
        query_rank: Width of the query latent; None where queries are projected directly.
        kv_rank: Width of the cached latent.
        nope_head_dim: Width of a head's part without position.
        rope_head_dim: Width of a head's rotary part; the rotary key is shared by all heads.
        value_head_dim: Width of a value head.
        has_bias: The projections into the latents and out of the layer have biases.

    Source:
        DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    num_heads: int
    query_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        _require_positive(
            num_heads=self.num_heads,
            query_rank=self.query_rank,
            kv_rank=self.kv_rank,
            nope_head_dim=self.nope_head_dim,
            rope_head_dim=self.rope_head_dim,
            value_head_dim=self.value_head_dim,
        )

    @property
    def window_tokens(self) -> None:
        """All tokens stay visible."""
        return None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the cache keeps per token: the latent and the rotary key."""
        return self.kv_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlpShape:
    """A gated feed-forward part that every token passes: gate and up, then down.

    Attributes:
        intermediate_size: Columns of the down matrix.
        has_bias: All three matrices have biases.
    """

    intermediate_size: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        _require_positive(intermediate_size=self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Routed experts, and what stands beside them.

    Attributes:
        num_experts: Experts of the layer.
        experts_per_token: Experts that a token is sent to, <= ``num_experts``.
        intermediate_size: Columns of an expert's down matrix.
        shared_intermediate_size: Columns of the shared expert's down matrix; 0 without one.
        has_shared_gate: The shared expert is scaled by a learned gate.
        has_router_scale: The router's input is scaled by a learned vector.
        has_expert_scale: Every expert's output has a learned scale.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    has_router_scale: bool = False
    has_expert_scale: bool = False

    def __post_init__(self) -> None:
        _require_positive(
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            intermediate_size=self.intermediate_size,
        )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token must be <= num_experts = {self.num_experts}, "
                f"found {self.experts_per_token}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        attention: Its attention.
        mlp: Its dense feed-forward part; None where experts take its place.
        moe: Its experts; None in a dense layer. With ``mlp`` too, both run and are added.
        num_norms: Norm vectors of the hidden size, those of the attention's heads not included.
    """

    attention: AttentionShape | LatentAttentionShape
    mlp: DenseMlpShape | None
    moe: MoeShape | None
    num_norms: int = 2

    def __post_init__(self) -> None:
        if self.mlp is None and self.moe is None:
            raise ValueError("a layer needs a dense feed-forward part or experts, found neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputShape:
    """A second, per-layer embedding that is gated into every layer.

    Attributes:
        width: Values per token and layer.
        vocab_size: Rows of the table.
    """

    width: int
    vocab_size: int

    def __post_init__(self) -> None:
        _require_positive(width=self.width, vocab_size=self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """Equal expert matrices of a model.

    Attributes:
        module: ``gate_up``: 2 I rows, gate rows first, by H columns; ``down``: H rows by I columns.
        rows: Outputs.
        columns: Inputs.
        count: How many the model has.
    """

    module: Module
    rows: int
    columns: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmShape:
    """A decoder-only language model.

    Attributes:
        name: What reports call it.
        model_type: Family, as Hugging Face configurations call it.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding.
        is_tied: The output matrix is the embedding.
        activation: Between gate and up.
        max_context_tokens: Longest sequence it was made for.
        layers: First to last.
        per_layer_inputs: A second embedding, where the family has one.
        notes: What a reader of its sizes should know.
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    is_tied: bool
    activation: Activation
    max_context_tokens: int
    layers: tuple[LayerShape, ...]
    per_layer_inputs: PerLayerInputShape | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_positive(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_context_tokens=self.max_context_tokens,
            num_layers=len(self.layers),
        )

    @property
    def moe_layers(self) -> tuple[MoeShape, ...]:
        """The expert parts, first layer to last."""
        return tuple(layer.moe for layer in self.layers if layer.moe is not None)

    @property
    def expert_matrices(self) -> tuple[ExpertMatrices, ...]:
        """The weight blocks by equal shape, gate_up before down, in order of first appearance."""
        counts: Counter[tuple[Module, int, int]] = Counter()
        for moe in self.moe_layers:
            counts["gate_up", 2 * moe.intermediate_size, self.hidden_size] += moe.num_experts
            counts["down", self.hidden_size, moe.intermediate_size] += moe.num_experts
        return tuple(
            ExpertMatrices(module=module, rows=rows, columns=columns, count=count)
            for (module, rows, columns), count in counts.items()
        )


def _require_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, found {value}")
