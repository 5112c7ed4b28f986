"""A dense Llama-type model out of a GGUF file, without further packages.

transformers reads GGUF only with ``accelerate`` installed; the tensors of this one architecture are
few enough to be put in place here. llama.cpp stores the rows of q and k pairwise for its rotary
embedding; they are put back into halves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _name(tensor: str) -> str:
    stem = tensor.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    return f"{_NAMES[stem]}.weight"


def read_llama(path: Path) -> Any:
    """The model in float32.

    Raises:
        ValueError: If the file is of another architecture or lacks a tensor.
        KeyError: If it holds a tensor of an unknown name.
    """
    reader = gguf.GGUFReader(path)
    field = {name: reader.fields[name].contents for name in reader.fields}
    architecture = field["general.architecture"]()
    if architecture != "llama":
        raise ValueError(f"{path.name}: architecture {architecture}, must be llama")
    heads = int(field["llama.attention.head_count"]())
    kv_heads = int(field["llama.attention.head_count_kv"]())
    config = transformers.LlamaConfig(
        vocab_size=int(field["llama.vocab_size"]()),
        hidden_size=int(field["llama.embedding_length"]()),
        intermediate_size=int(field["llama.feed_forward_length"]()),
        num_hidden_layers=int(field["llama.block_count"]()),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(field["llama.context_length"]()),
        rms_norm_eps=float(field["llama.attention.layer_norm_rms_epsilon"]()),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(field["llama.rope.freq_base"]()),
        },
        tie_word_embeddings=not any(t.name == "output.weight" for t in reader.tensors),
        bos_token_id=int(field["tokenizer.ggml.bos_token_id"]()),
        eos_token_id=int(field["tokenizer.ggml.eos_token_id"]()),
        pad_token_id=int(field["tokenizer.ggml.padding_token_id"]()),
    )
    model = transformers.LlamaForCausalLM(config)
    missing = set(model.state_dict())
    target = model.state_dict()
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weights = _halves(weights, heads if ".attn_q." in tensor.name else kv_heads)
        name = _name(tensor.name)
        target[name].copy_(torch.from_numpy(np.array(weights, dtype=np.float32)))
        missing.discard(name)
    if config.tie_word_embeddings:
        missing.discard("lm_head.weight")
    if missing:
        raise ValueError(f"{path.name}: no tensor for {', '.join(sorted(missing)[:3])}")
    return model.eval()
