"""All that the decoder must know of a model: sizes, rules and constants, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.llm_shape import Activation
from runtime.model.kv_layout import LayerKv
from runtime.model.rotary import Rotary

NormKind = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer; sizes in elements.

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Numbers of a head.
        window_tokens: A query sees itself and the tokens before it, this many in all; None: all.
        norm: ``head`` norms each query and key head by itself, ``row`` a token's whole projection.
        norms_values: Whether value heads are normed too, without weights.
        qkv_bias: Whether query, key and value projections have biases.
        output_bias: Whether the output projection has one.
        keys_are_values: Whether values are the unnormed, unturned keys.
        reuses_kv: The earlier layer whose keys and values are used; None where it has its own.
        clip: Largest magnitude of queries, keys and values; None: any.
        scale: Factor of every product of query and key.
        rotary: Its positions.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None
    norm: NormKind
    norms_values: bool
    qkv_bias: bool
    output_bias: bool
    keys_are_values: bool
    reuses_kv: int | None
    clip: float | None
    scale: float
    rotary: Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense gated feed-forward part: columns of its down matrix, and whether it has biases."""

    width: int
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """Routed experts of one layer.

    Attributes:
        experts: How many.
        experts_per_token: How many a token is sent to.
        width: Columns of an expert's down matrix.
        renormalises: Whether a token's gate weights are divided by their sum.
        norms_router_input: Whether the router norms and scales its own input and every expert has
            a scale (Gemma-4).
        shared_width: Columns of the shared expert's down matrix, which a sigmoid gate scales; 0
            without one.
    """

    experts: int
    experts_per_token: int
    width: int
    renormalises: bool
    norms_router_input: bool = False
    shared_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then a dense part or experts, or both side by side (Gemma-4)."""

    attention: AttentionSpec
    mlp: MlpSpec | None
    moe: MoeSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        model_type: Family, as Hugging Face configurations call it.
        hidden: Width of the residual stream.
        vocabulary: Rows of the embedding; tokens are 0..vocabulary - 1.
        layers: First to last.
        activation: Between gate and up.
        norm_epsilon: Added to the mean square.
        is_tied: Whether the output matrix is the embedding.
        embedding_scale: Factor of the embedding.
        sandwich_norms: Whether outputs of attention and feed-forward are normed too, and every
            layer ends with a scalar (Gemma-4).
        final_softcap: Logits are c * tanh(logits / c); None: as they are.
        layer_input_width: Width of the second, per-layer embedding; 0 without one.
        layer_input_vocabulary: Its rows.
        context_tokens: Longest sequence.
        end_tokens: Tokens that end a generation, ascending.
    """

    model_type: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerSpec, ...]
    activation: Activation
    norm_epsilon: float
    is_tied: bool
    embedding_scale: float
    sandwich_norms: bool
    final_softcap: float | None
    layer_input_width: int
    layer_input_vocabulary: int
    context_tokens: int
    end_tokens: tuple[int, ...]

    @property
    def kv_layers(self) -> tuple[LayerKv | int, ...]:
        """What every layer keeps, as ``runtime.model.kv_layout.KvLayout`` takes it."""
        return tuple(
            LayerKv(kv_heads=a.kv_heads, head_dim=a.head_dim, window_tokens=a.window_tokens)
            if a.reuses_kv is None
            else a.reuses_kv
            for a in (layer.attention for layer in self.layers)
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.moe is not None)
