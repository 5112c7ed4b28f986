"""How many parameters a language model has, by what they do; exact."""

from __future__ import annotations

from dataclasses import dataclass

from models.llm_shape import (
    AttentionShape,
    LatentAttentionShape,
    LayerShape,
    LlmShape,
    MoeShape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model or of one of its layers.

    Attributes:
        embeddings: Input and output matrices, per-layer tables and what gates them in.
        attention: Projections and their biases.
        dense_mlps: Feed-forward parts that every token passes, with biases.
        shared_experts: Experts that every token passes, with their gates.
        routers: Router matrices.
        norms: Vectors of norms, and learned scales of routers and experts.
        experts: Routed experts.
        active_experts: Those of them that one token is sent to.
    """

    embeddings: int = 0
    attention: int = 0
    dense_mlps: int = 0
    shared_experts: int = 0
    routers: int = 0
    norms: int = 0
    experts: int = 0
    active_experts: int = 0

    @property
    def other(self) -> int:
        """All but the routed experts."""
        return (
            self.embeddings
            + self.attention
            + self.dense_mlps
            + self.shared_experts
            + self.routers
            + self.norms
        )

    @property
    def total(self) -> int:
        """All parameters; a tied output matrix counts once."""
        return self.other + self.experts

    @property
    def active(self) -> int:
        """What one token meets: everything but the experts it is not sent to."""
        return self.other + self.active_experts


def count_parameters(shape: LlmShape) -> ParameterCounts:
    """Parameters of a model.

    Values that are stored but not learned (a router's correction bias, a layer's constant scale)
    are no parameters and not counted.
    """
    h = shape.hidden_size
    layers = [count_layer_parameters(layer, h) for layer in shape.layers]
    embeddings = (1 if shape.is_tied else 2) * shape.vocab_size * h
    norms = h
    if shape.per_layer_inputs is not None:
        width = shape.per_layer_inputs.width
        packed = len(layers) * width
        embeddings += shape.per_layer_inputs.vocab_size * packed + h * packed
        embeddings += len(layers) * 2 * h * width
        norms += width + len(layers) * h
    return ParameterCounts(
        embeddings=embeddings,
        attention=sum(layer.attention for layer in layers),
        dense_mlps=sum(layer.dense_mlps for layer in layers),
        shared_experts=sum(layer.shared_experts for layer in layers),
        routers=sum(layer.routers for layer in layers),
        norms=norms + sum(layer.norms for layer in layers),
        experts=sum(layer.experts for layer in layers),
        active_experts=sum(layer.active_experts for layer in layers),
    )


def count_layer_parameters(layer: LayerShape, hidden_size: int) -> ParameterCounts:
    """Parameters of one decoder layer; its ``embeddings`` are 0."""
    moe, mlp = layer.moe, layer.mlp
    attention, head_norms = (
        _latent_attention(layer.attention, hidden_size)
        if isinstance(layer.attention, LatentAttentionShape)
        else _grouped_attention(layer.attention, hidden_size)
    )
    dense = 0
    if mlp is not None:
        dense = 3 * hidden_size * mlp.intermediate_size
        dense += (2 * mlp.intermediate_size + hidden_size) if mlp.has_bias else 0
    norms = layer.num_norms * hidden_size + head_norms
    if moe is None:
        return ParameterCounts(attention=attention, dense_mlps=dense, norms=norms)
    expert = expert_parameters(moe, hidden_size)
    return ParameterCounts(
        attention=attention,
        dense_mlps=dense,
        shared_experts=3 * hidden_size * moe.shared_intermediate_size
        + (hidden_size if moe.has_shared_gate else 0),
        routers=moe.num_experts * hidden_size,
        norms=norms
        + (hidden_size if moe.has_router_scale else 0)
        + (moe.num_experts if moe.has_expert_scale else 0),
        experts=moe.num_experts * expert,
        active_experts=moe.experts_per_token * expert,
    )


def expert_parameters(moe: MoeShape, hidden_size: int) -> int:
    """Parameters of one routed expert: gate, up and down."""
    return 3 * hidden_size * moe.intermediate_size


def _grouped_attention(attention: AttentionShape, hidden_size: int) -> tuple[int, int]:
    """Parameters of the projections, and of the head norms."""
    query = attention.num_heads * attention.head_dim
    key_value = 0
    if not attention.reuses_kv:
        projections = 2 if attention.has_value_projection else 1
        key_value = projections * attention.num_kv_heads * attention.head_dim
    matrices = hidden_size * (query + key_value) + query * hidden_size
    biases = (query + key_value if attention.has_qkv_bias else 0) + (
        hidden_size if attention.has_output_bias else 0
    )
    norms = attention.query_norm_width + (0 if attention.reuses_kv else attention.key_norm_width)
    return matrices + biases, norms


def _latent_attention(attention: LatentAttentionShape, hidden_size: int) -> tuple[int, int]:
    """Parameters of the projections, and of the norms of the latents."""
    query = attention.num_heads * (attention.nope_head_dim + attention.rope_head_dim)
    rank = attention.query_rank
    latent = attention.kv_rank + attention.rope_head_dim
    expanded = attention.num_heads * (attention.nope_head_dim + attention.value_head_dim)
    matrices = (
        (hidden_size * query if rank is None else hidden_size * rank + rank * query)
        + hidden_size * latent
        + attention.kv_rank * expanded
        + attention.num_heads * attention.value_head_dim * hidden_size
    )
    biases = ((rank or 0) + latent + hidden_size) if attention.has_bias else 0
    return matrices + biases, (rank or 0) + attention.kv_rank
