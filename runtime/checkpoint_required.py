"""The tensors besides routed experts that a configuration promises: all there, in their shapes.

Frameworks start a tensor that a checkpoint lacks from random numbers, with a warning at most; here
it is an error before any work. Names are compared without the prefixes of wrapping modules.

Source:
    The modeling files of Hugging Face transformers 5.24 (tests hold the list to its models).
"""

from __future__ import annotations

import re
from pathlib import Path

from models.llm_shape import AttentionShape, LayerShape, LlmShape
from runtime.checkpoint_shards import Shards, SourceError

TensorShapes = dict[str, tuple[int, ...]]

_PREFIX = re.compile(r"^(?:model\.|language_model\.)+")


def require_tensors(folder: Path, shape: LlmShape, shards: Shards) -> None:
    """Check that every tensor besides experts is there.

    Args:
        folder: The checkpoint.
        shape: What its configuration promises.
        shards: What its files hold.

    Raises:
        SourceError: Names the first tensor that is missing or of another shape.
    """
    found = {plain_name(name): name for name in shards.file_by_tensor}
    for wanted, size in required_tensors(shape).items():
        name = found.get(wanted)
        if name is None:
            raise SourceError(
                f"{folder}: tensor {wanted} is in no shard; config.json promises {list(size)}"
            )
        file = shards.file_by_tensor[name]
        entry = shards.headers[file][name]
        if entry.shape != size:
            raise SourceError(
                f"{folder / file}: tensor {name}: shape {list(entry.shape)}, config.json gives"
                f" {list(size)}"
            )


def plain_name(name: str) -> str:
    """A tensor's name without wrapping modules, the same for every way of saving it."""
    return _PREFIX.sub("", name).replace(".block_sparse_moe.", ".mlp.")


def required_tensors(shape: LlmShape) -> TensorShapes:
    """Shapes by plain name of all tensors that are no routed expert's.

    Args:
        shape: A model of a family that can be quantized.
    """
    hidden = shape.hidden_size
    tensors: TensorShapes = {
        "embed_tokens.weight": (shape.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not shape.is_tied:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    extra = shape.per_layer_inputs
    if extra is not None:
        width = extra.width * len(shape.layers)
        tensors["embed_tokens_per_layer.weight"] = (extra.vocab_size, width)
        tensors["per_layer_model_projection.weight"] = (width, hidden)
        tensors["per_layer_projection_norm.weight"] = (extra.width,)
    for number, layer in enumerate(shape.layers):
        for name, size in _layer(shape, layer).items():
            tensors[f"layers.{number}.{name}"] = size
    return tensors


def _layer(shape: LlmShape, layer: LayerShape) -> TensorShapes:
    hidden = shape.hidden_size
    assert isinstance(layer.attention, AttentionShape)  # no family here has another
    tensors = _attention(hidden, layer.attention)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if shape.model_type.startswith("gemma4"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        tensors["layer_scalar"] = (1,)
        if layer.moe is not None:
            norms += [f"post_feedforward_layernorm_{i}" for i in (1, 2)]
            norms += ["pre_feedforward_layernorm_2"]
        if shape.per_layer_inputs is not None:
            width = shape.per_layer_inputs.width
            tensors["per_layer_input_gate.weight"] = (width, hidden)
            tensors["per_layer_projection.weight"] = (hidden, width)
            norms += ["post_per_layer_input_norm"]
    tensors |= {f"{name}.weight": (hidden,) for name in norms}
    if layer.mlp is not None:
        tensors |= _gated("mlp", hidden, layer.mlp.intermediate_size)
    if layer.moe is not None:
        tensors |= _router(shape, layer)
    return tensors


def _attention(hidden: int, attention: AttentionShape) -> TensorShapes:
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    rows = {"q": queries}
    if not attention.reuses_kv:
        rows["k"] = keys
        if attention.has_value_projection:
            rows["v"] = keys
    tensors: TensorShapes = {"self_attn.o_proj.weight": (hidden, queries)}
    for part, count in rows.items():
        tensors[f"self_attn.{part}_proj.weight"] = (count, hidden)
        if attention.has_qkv_bias:
            tensors[f"self_attn.{part}_proj.bias"] = (count,)
    if attention.has_output_bias:
        tensors["self_attn.o_proj.bias"] = (hidden,)
    if attention.query_norm_width:
        tensors["self_attn.q_norm.weight"] = (attention.query_norm_width,)
    if attention.key_norm_width and not attention.reuses_kv:
        tensors["self_attn.k_norm.weight"] = (attention.key_norm_width,)
    return tensors


def _gated(name: str, hidden: int, inner: int) -> TensorShapes:
    return {
        f"{name}.gate_proj.weight": (inner, hidden),
        f"{name}.up_proj.weight": (inner, hidden),
        f"{name}.down_proj.weight": (hidden, inner),
    }


def _router(shape: LlmShape, layer: LayerShape) -> TensorShapes:
    moe, hidden = layer.moe, shape.hidden_size
    assert moe is not None
    is_gemma = shape.model_type.startswith("gemma4")
    router = "router.proj.weight" if is_gemma else "mlp.gate.weight"
    tensors: TensorShapes = {router: (moe.num_experts, hidden)}
    if moe.has_router_scale:
        tensors["router.scale"] = (hidden,)
    if moe.has_expert_scale:
        tensors["router.per_expert_scale"] = (moe.num_experts,)
    if moe.shared_intermediate_size:
        tensors |= _gated("mlp.shared_expert", hidden, moe.shared_intermediate_size)
        if moe.has_shared_gate:
            tensors["mlp.shared_expert_gate.weight"] = (1, hidden)
    return tensors
