"""What the fields of a configuration mean, family by family; defaults are those of transformers.

Source:
    The configuration and modeling classes of Hugging Face transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from models.hf_fields import MAX_LAYERS, SLIDING, ConfigFields
from models.llm_shape import (
    Activation,
    AttentionShape,
    DenseMlpShape,
    LatentAttentionShape,
    LayerShape,
    LlmShape,
    MoeShape,
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
DEFAULT_WINDOW_TOKENS = 4096


def read_llama(fields: ConfigFields, name: str) -> LlmShape:
    """Llama: grouped-query attention, one dense feed-forward part a layer."""
    has_bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, default_kv_heads=None, qkv_bias=has_bias, out_bias=has_bias)
    mlp = DenseMlpShape(
        intermediate_size=fields.size("intermediate_size"), has_bias=fields.flag("mlp_bias", False)
    )
    windows = _windows(fields, [None] * num_layers(fields))
    return _shape(fields, name, _layers(attention, windows, mlp=mlp), max_context=2048)


def read_mistral(fields: ConfigFields, name: str) -> LlmShape:
    """Mistral: Llama without biases, every layer with a sliding window where one is given."""
    window = fields.nullable_size("sliding_window", DEFAULT_WINDOW_TOKENS)
    attention = read_attention(fields, default_kv_heads=8)
    mlp = DenseMlpShape(intermediate_size=fields.size("intermediate_size"))
    windows = _windows(fields, [window] * num_layers(fields))
    return _shape(fields, name, _layers(attention, windows, mlp=mlp), max_context=131_072)


def read_mixtral(fields: ConfigFields, name: str) -> LlmShape:
    """Mixtral: Mistral with experts of the full intermediate size in every layer."""
    window = fields.nullable_size("sliding_window", None)
    attention = read_attention(fields, default_kv_heads=8)
    moe = _moe(fields, fields.size("intermediate_size"), experts_per_token=2)
    windows = _windows(fields, [window] * num_layers(fields))
    return _shape(fields, name, _layers(attention, windows, moe=moe), max_context=131_072)


def read_olmoe(fields: ConfigFields, name: str) -> LlmShape:
    """OLMoE: experts in every layer; queries and keys are normed over all heads at once."""
    has_bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, default_kv_heads=None, qkv_bias=has_bias, out_bias=has_bias)
    attention = dataclasses.replace(
        attention,
        query_norm_width=attention.num_heads * attention.head_dim,
        key_norm_width=attention.num_kv_heads * attention.head_dim,
    )
    moe = _moe(fields, fields.size("intermediate_size"), experts_per_token=8)
    windows = _windows(fields, [None] * num_layers(fields))
    return _shape(fields, name, _layers(attention, windows, moe=moe), max_context=4096)


def read_qwen2(fields: ConfigFields, name: str) -> LlmShape:
    """Qwen2: Llama with biases on queries, keys and values; late layers may have a window."""
    return _read_qwen_dense(
        fields, name, read_attention(fields, default_kv_heads=32, qkv_bias=True, out_bias=False)
    )


def read_qwen3(fields: ConfigFields, name: str) -> LlmShape:
    """Qwen3: queries and keys are normed per head; late layers may have a window."""
    has_bias = fields.flag("attention_bias", False)
    attention = read_attention(
        fields, default_kv_heads=32, default_head_dim=128, qkv_bias=has_bias, out_bias=has_bias
    )
    attention = dataclasses.replace(
        attention, query_norm_width=attention.head_dim, key_norm_width=attention.head_dim
    )
    return _read_qwen_dense(fields, name, attention)


def _read_qwen_dense(fields: ConfigFields, name: str, attention: AttentionShape) -> LlmShape:
    count = num_layers(fields)
    windows: list[int | None] = [None] * count
    if fields.flag("use_sliding_window", False):
        width = fields.nullable_size("sliding_window", DEFAULT_WINDOW_TOKENS)
        num_full = fields.size("max_window_layers", default=28, low=0)
        windows = [width if i >= num_full else None for i in range(count)]
    mlp = DenseMlpShape(intermediate_size=fields.size("intermediate_size"))
    layers = _layers(attention, _windows(fields, windows), mlp=mlp)
    return _shape(fields, name, layers, max_context=32_768)


def read_qwen2_moe(fields: ConfigFields, name: str) -> LlmShape:
    """Qwen1.5/2-MoE: experts beside a gated shared expert; biases on queries, keys and values."""
    count = num_layers(fields)
    windows: list[int | None] = [None] * count
    if fields.flag("use_sliding_window", False):
        width = fields.nullable_size("sliding_window", DEFAULT_WINDOW_TOKENS)
        num_windowed = fields.size("max_window_layers", default=28, low=0)
        windows = [width if i < num_windowed and not i % 2 else None for i in range(count)]
    attention = read_attention(
        fields, default_kv_heads=16, qkv_bias=fields.flag("qkv_bias", True), out_bias=False
    )
    moe = _moe(
        fields,
        fields.size("moe_intermediate_size"),
        experts_per_token=4,
        shared_intermediate_size=fields.size("shared_expert_intermediate_size", default=5632),
        has_shared_gate=True,
    )
    layers = _sparse_layers(fields, attention, _windows(fields, windows), moe)
    return _shape(fields, name, layers, max_context=32_768)


def read_qwen3_moe(fields: ConfigFields, name: str) -> LlmShape:
    """Qwen3-MoE: experts without a shared one; queries and keys are normed per head."""
    width: int | None = None
    if fields.flag("use_sliding_window", False):
        width = fields.nullable_size("sliding_window", DEFAULT_WINDOW_TOKENS)
    has_bias = fields.flag("attention_bias", False)
    attention = read_attention(fields, default_kv_heads=4, qkv_bias=has_bias, out_bias=has_bias)
    attention = dataclasses.replace(
        attention, query_norm_width=attention.head_dim, key_norm_width=attention.head_dim
    )
    moe = _moe(fields, fields.size("moe_intermediate_size"), experts_per_token=8)
    windows = _windows(fields, [width] * num_layers(fields))
    layers = _sparse_layers(fields, attention, windows, moe)
    return _shape(fields, name, layers, max_context=32_768)


def read_deepseek_v3(fields: ConfigFields, name: str) -> LlmShape:
    """DeepSeek-V3: latent attention; dense layers first, then experts beside shared ones."""
    count = num_layers(fields)
    num_dense = fields.size("first_k_dense_replace", default=3, low=0)
    if fields.size("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "must be 1: every layer past the dense ones is sparse")
    attention = LatentAttentionShape(
        num_heads=fields.size("num_attention_heads"),
        query_rank=fields.nullable_size("q_lora_rank", 1536),
        kv_rank=fields.size("kv_lora_rank", default=512),
        nope_head_dim=fields.size("qk_nope_head_dim", default=128),
        rope_head_dim=fields.size("qk_rope_head_dim", default=64),
        value_head_dim=fields.size("v_head_dim", default=128),
        has_bias=fields.flag("attention_bias", False),
    )
    mlp = DenseMlpShape(intermediate_size=fields.size("intermediate_size"))
    width = fields.size("moe_intermediate_size")
    num_shared = fields.size("n_shared_experts", default=1, low=0)
    moe = _moe(fields, width, experts_per_token=8, shared_intermediate_size=num_shared * width)
    dense = LayerShape(attention=attention, mlp=mlp, moe=None)
    sparse = LayerShape(attention=attention, mlp=None, moe=moe)
    layers = [dense if i < num_dense else sparse for i in range(count)]
    notes = []
    if extra := fields.size("num_nextn_predict_layers", "num_mtp_layers", default=1, low=0):
        several = f"{extra} layers of multi-token prediction are"
        one = "the layer of multi-token prediction is"
        notes.append(f"{one if extra == 1 else several} not counted")
    return _shape(fields, name, layers, max_context=4096, notes=notes)


def num_layers(fields: ConfigFields) -> int:
    """Decoder layers."""
    return fields.size("num_hidden_layers", high=MAX_LAYERS)


def read_attention(
    fields: ConfigFields,
    *,
    default_kv_heads: int | None,
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
) -> AttentionShape:
    """Grouped-query attention; without ``head_dim`` the heads share the hidden size.

    Raises:
        HfConfigError: If sizes are missing or do not divide.
    """
    num_heads = fields.size("num_attention_heads")
    default = num_heads if default_kv_heads is None else default_kv_heads
    num_kv_heads = fields.nullable_size("num_key_value_heads", default) or num_heads
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads",
            f"must divide num_attention_heads = {num_heads}, found {num_kv_heads}",
        )
    head_dim = fields.optional_size("head_dim") or default_head_dim
    if head_dim is None:
        hidden_size = fields.size("hidden_size")
        if hidden_size % num_heads:
            raise fields.error(
                "num_attention_heads",
                f"must divide hidden_size = {hidden_size} where head_dim is not given, "
                f"found {num_heads}",
            )
        head_dim = hidden_size // num_heads
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        has_qkv_bias=qkv_bias,
        has_output_bias=out_bias,
    )


def read_activation(fields: ConfigFields, name: str, default: str) -> Activation:
    """What stands between gate and up."""
    return _ACTIVATIONS[fields.choice(name, tuple(_ACTIVATIONS), default)]


def _windows(fields: ConfigFields, windows: Sequence[int | None]) -> list[int | None]:
    """The window of each layer: what ``layer_types`` says, else what the family does."""
    kinds = fields.layer_types(len(windows))
    if kinds is None:
        return list(windows)
    width = fields.optional_size("sliding_window", low=0) or None
    if SLIDING in kinds and width is None:
        raise fields.error("sliding_window", f"must be >= 1 where layer_types names {SLIDING!r}")
    return [width if kind == SLIDING else None for kind in kinds]


def _moe(
    fields: ConfigFields,
    intermediate_size: int,
    *,
    experts_per_token: int,
    shared_intermediate_size: int = 0,
    has_shared_gate: bool = False,
) -> MoeShape:
    """Routed experts; ``experts_per_token`` is the default where the field is not given."""
    num_experts = fields.size(*_NUM_EXPERTS)
    top_k = fields.size("num_experts_per_tok", default=experts_per_token)
    if top_k > num_experts:
        raise fields.error(
            "num_experts_per_tok", f"must be <= the {num_experts} experts of a layer, found {top_k}"
        )
    return MoeShape(
        num_experts=num_experts,
        experts_per_token=top_k,
        intermediate_size=intermediate_size,
        shared_intermediate_size=shared_intermediate_size,
        has_shared_gate=has_shared_gate,
    )


def _layers(
    attention: AttentionShape,
    windows: Sequence[int | None],
    *,
    mlp: DenseMlpShape | None = None,
    moe: MoeShape | None = None,
) -> list[LayerShape]:
    return [
        LayerShape(attention=dataclasses.replace(attention, window_tokens=window), mlp=mlp, moe=moe)
        for window in windows
    ]


def _sparse_layers(
    fields: ConfigFields, attention: AttentionShape, windows: Sequence[int | None], moe: MoeShape
) -> list[LayerShape]:
    """Experts in every ``decoder_sparse_step``-th layer but those of ``mlp_only_layers``."""
    step = fields.size("decoder_sparse_step", default=1)
    dense_layers = fields.indices("mlp_only_layers", len(windows))
    is_sparse = [i not in dense_layers and not (i + 1) % step for i in range(len(windows))]
    mlp: DenseMlpShape | None = None
    if not all(is_sparse):
        mlp = DenseMlpShape(intermediate_size=fields.size("intermediate_size"))
    return [
        LayerShape(
            attention=dataclasses.replace(attention, window_tokens=window),
            mlp=None if sparse else mlp,
            moe=moe if sparse else None,
        )
        for window, sparse in zip(windows, is_sparse, strict=True)
    ]


def _shape(
    fields: ConfigFields,
    name: str,
    layers: Sequence[LayerShape],
    *,
    max_context: int,
    notes: Sequence[str] = (),
) -> LlmShape:
    return LlmShape(
        name=name,
        model_type=fields.text("model_type"),
        hidden_size=fields.size("hidden_size"),
        vocab_size=fields.size("vocab_size"),
        is_tied=fields.flag("tie_word_embeddings", False),
        activation=read_activation(fields, "hidden_act", "silu"),
        max_context_tokens=fields.size("max_position_embeddings", default=max_context),
        layers=tuple(layers),
        notes=tuple(notes),
    )


FamilyReader = Callable[[ConfigFields, str], LlmShape]
