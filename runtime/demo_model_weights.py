"""A dense model's matrices as a mixture of experts in Mixtral's layout, in bfloat16.

Every expert is a copy of the dense MLP, moved by noise where that is asked for. Mixtral's gate
weights sum to one, so copies give the dense model's logits whatever the routers say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from runtime.checkpoint_tensors import TensorFileWriter
from runtime.demo_model_gguf import DenseConfig, DenseGguf
from traces.whole_file import write_whole

ROUTER_DEVIATION = 0.02
"""Standard deviation of the routers' weights: ``initializer_range`` of Mixtral."""

_PARTS = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
_ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_Tensor = tuple[str, tuple[int, ...], Callable[[], NDArray[np.uint16]]]


def write_mixture(
    folder: Path,
    dense: DenseGguf,
    *,
    experts: int,
    top_k: int,
    noise: float,
    seed: int,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write ``model.safetensors`` and ``config.json``.

    Args:
        folder: Where to.
        dense: The model to copy.
        experts: Per layer, >= 1.
        top_k: Experts per token, 1..experts.
        noise: Standard deviation of what every copy is moved by, in units of its matrix's own.
        seed: Of routers and noise.
        on_bytes: Told bytes written so far and in all.

    Raises:
        OSError: If the disk refuses.
    """
    tensors = list(_tensors(dense, experts, noise, seed))
    layout = {name: ("BF16", shape) for name, shape, _ in tensors}
    total = sum(2 * int(np.prod(shape)) for _, shape, _ in tensors)
    done = 0
    with TensorFileWriter(folder / "model.safetensors", layout, {"format": "pt"}) as writer:
        for _, _, weights in tensors:
            content = weights().tobytes()
            writer.write(content)
            done += len(content)
            on_bytes(done, total)
        writer.close()
    config = mixtral_config(dense.config, experts, top_k)
    write_whole(folder / "config.json", json.dumps(config, indent=2).encode())


def mixtral_config(dense: DenseConfig, experts: int, top_k: int) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "vocab_size": dense.vocabulary,
        "hidden_size": dense.hidden,
        "intermediate_size": dense.inner,
        "num_hidden_layers": dense.layers,
        "num_attention_heads": dense.heads,
        "num_key_value_heads": dense.kv_heads,
        "head_dim": dense.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": dense.context_tokens,
        "rms_norm_eps": dense.norm_epsilon,
        "rope_theta": dense.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": dense.rope_theta},
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "initializer_range": ROUTER_DEVIATION,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": dense.is_tied,
        "use_cache": True,
        "bos_token_id": dense.bos_token_id,
        "eos_token_id": dense.eos_token_id,
        "pad_token_id": dense.pad_token_id,
    }


def bfloat16(weights: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; weights are finite."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    return (rounded >> np.uint32(16)).astype("<u2")


def _tensors(dense: DenseGguf, experts: int, noise: float, seed: int) -> Iterator[_Tensor]:
    """Name, shape and a maker of the content of every tensor, in order of the file."""
    c = dense.config

    def plain(name: str) -> Callable[[], NDArray[np.uint16]]:
        return lambda: bfloat16(dense.matrix(name))

    yield "model.embed_tokens.weight", (c.vocabulary, c.hidden), plain("token_embd")
    for layer in range(c.layers):
        place, block = f"model.layers.{layer}", f"blk.{layer}"
        for name, part in _NORMS.items():
            yield f"{place}.{name}.weight", (c.hidden,), plain(f"{block}.{part}")
        for name, part in _ATTENTION.items():
            heads = c.kv_heads if name in ("k_proj", "v_proj") else c.heads
            wide = heads * c.head_dim
            shape = (c.hidden, wide) if name == "o_proj" else (wide, c.hidden)
            yield f"{place}.self_attn.{name}.weight", shape, plain(f"{block}.{part}")
        moe = f"{place}.block_sparse_moe"
        yield f"{moe}.gate.weight", (experts, c.hidden), _router(c.hidden, experts, layer, seed)
        for name, part in _PARTS.items():
            shape = (c.hidden, c.inner) if name == "w2" else (c.inner, c.hidden)
            copies = _Copies(dense, f"{block}.{part}", noise, seed)
            for expert in range(experts):
                yield f"{moe}.experts.{expert}.{name}.weight", shape, copies.maker(expert)
    yield "model.norm.weight", (c.hidden,), plain("output_norm")
    if not c.is_tied:
        yield "lm_head.weight", (c.vocabulary, c.hidden), plain("output")


def _router(hidden: int, experts: int, layer: int, seed: int) -> Callable[[], NDArray[np.uint16]]:
    def weights() -> NDArray[np.uint16]:
        chance = stream(seed, f"demo-model router {layer}")
        drawn = chance.standard_normal((experts, hidden), dtype=np.float32)
        return bfloat16(drawn * np.float32(ROUTER_DEVIATION))

    return weights


class _Copies:
    """One dense matrix for all experts of a layer, dequantized once and dropped after the last."""

    def __init__(self, dense: DenseGguf, name: str, noise: float, seed: int) -> None:
        self._dense, self._name, self._noise, self._seed = dense, name, noise, seed
        self._matrix: NDArray[np.float32] | None = None
        self._bits: NDArray[np.uint16] | None = None
        self._makers = 0
        self._made = 0

    def maker(self, expert: int) -> Callable[[], NDArray[np.uint16]]:
        self._makers += 1
        return lambda: self._make(expert)

    def _make(self, expert: int) -> NDArray[np.uint16]:
        self._made += 1
        if self._noise == 0.0:
            if self._bits is None:
                self._bits = bfloat16(self._dense.matrix(self._name))
            bits = self._bits
        else:
            if self._matrix is None:
                self._matrix = self._dense.matrix(self._name)
            chance = stream(self._seed, f"demo-model noise {self._name} {expert}")
            moved = chance.standard_normal(self._matrix.shape, dtype=np.float32)
            moved *= np.float32(self._noise * float(self._matrix.std()))
            bits = bfloat16(self._matrix + moved)
        if self._made == self._makers:
            self._matrix = self._bits = None
        return bits
