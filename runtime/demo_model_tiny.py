"""A tiny random checkpoint, a test model: made without network, torch or transformers.

Two layers and a byte-level vocabulary in the layout of a Hugging Face checkpoint. It says nothing
sensible; it is there so that a server, a client or a test has something real to run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from models.streams import stream
from runtime.checkpoint_tensors import TensorFileWriter
from runtime.demo_model_weights import bfloat16
from traces.whole_file import write_whole

TinyFamily = Literal["qwen2_moe", "mixtral", "olmoe", "llama", "qwen3"]
FAMILIES: tuple[TinyFamily, ...] = ("qwen2_moe", "mixtral", "olmoe", "llama", "qwen3")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS = 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SAMPLE = (
    "the quick brown fox jumps over the lazy dog while some other words are there to be merged:"
    " a model of the world has layers, experts, tokens and a long memory of what was said before "
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_CLASSES = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
Shapes = dict[str, tuple[int, ...]]


class TinyModelError(ValueError):
    """A test model that cannot be made as asked; the message names the argument."""


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of the test model; ``head_dim`` 32 is the smallest that every engine runs.

    Attributes:
        vocabulary: Rows of the embedding, >= 259: bytes and special tokens.
        hidden: Width of the residual stream.
        inner: Width inside an expert; the shared expert and the dense MLP have twice that.
        layers: Their number.
        heads, kv_heads: Query heads, and heads of keys and values.
        head_dim: Width of a head, even.
        experts: Per layer.
        top_k: Experts per token.
        context_tokens: Most positions.
    """

    vocabulary: int = 320
    hidden: int = 64
    inner: int = 64
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    experts: int = 4
    top_k: int = 2
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise TinyModelError(f"{name} must be >= 1, found {value}")
        least = len(SPECIAL) + 256
        if self.vocabulary < least:
            raise TinyModelError(f"vocabulary must be >= {least}, found {self.vocabulary}")
        if self.heads % self.kv_heads:
            raise TinyModelError(f"heads must be a multiple of kv_heads, found {self.heads}")
        if self.top_k > self.experts:
            raise TinyModelError(f"top_k must be <= {self.experts} experts, found {self.top_k}")


def make_tiny_checkpoint(
    folder: Path,
    family: TinyFamily = "qwen2_moe",
    *,
    sizes: TinySizes | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
) -> Path:
    """Write the checkpoint; files that stand in the folder under the same names are replaced.

    Args:
        folder: Made if it is not there.
        family: One of ``FAMILIES``.
        sizes: None for about 0.2 million parameters.
        dtype: Of the tensors.
        seed: The same seed gives the same bytes.

    Returns:
        The folder.

    Raises:
        TinyModelError: If the family is unknown.
        OSError: If the disk refuses.
    """
    if family not in FAMILIES:
        raise TinyModelError(f"family must be one of {', '.join(FAMILIES)}, found {family!r}")
    sizes = sizes or TinySizes()
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(family, sizes, dtype)
    _write_tokenizer(folder, sizes)
    _write_weights(folder, _shapes(family, sizes), dtype, seed)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    write_whole(folder / "generation_config.json", json.dumps(ids, indent=2).encode())
    write_whole(folder / "README.md", _README.format(family=family, seed=seed).encode())
    write_whole(folder / "config.json", json.dumps(config, indent=2).encode())
    return folder


_README = """# Tiny test model ({family})

Random weights (seed {seed}), made by `runtime demo-model --tiny`. It answers nonsense: it is for
trying the server and for tests, not for text.
"""


def _config(family: TinyFamily, sizes: TinySizes, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "qwen2_moe":
        config |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.top_k,
            "moe_intermediate_size": sizes.inner,
            "shared_expert_intermediate_size": 2 * sizes.inner,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "qkv_bias": True,
        }
    elif family == "mixtral":
        config |= {"num_local_experts": sizes.experts, "num_experts_per_tok": sizes.top_k}
        config |= {"intermediate_size": sizes.inner, "sliding_window": None}
    elif family == "olmoe":
        config |= {"num_experts": sizes.experts, "num_experts_per_tok": sizes.top_k}
        config |= {"intermediate_size": sizes.inner, "norm_topk_prob": False, "clip_qkv": None}
    elif family == "qwen3":
        config |= {"use_sliding_window": False, "attention_bias": False}
    if family in ("qwen2_moe", "olmoe"):  # these take the head's width from the hidden width
        if sizes.heads * sizes.head_dim != sizes.hidden:
            raise TinyModelError(
                f"{family} needs heads * head_dim = hidden, found"
                f" {sizes.heads} * {sizes.head_dim} and {sizes.hidden}"
            )
        del config["head_dim"]
    return config


def _shapes(family: TinyFamily, s: TinySizes) -> Shapes:
    """Every tensor of the checkpoint, per-expert names, in order of the file."""
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (s.vocabulary, s.hidden)}
    for number in range(s.layers):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.{name}.weight": (s.hidden,) for name in _NORMS}
        projections = {"q": (queries, s.hidden), "k": (keys, s.hidden), "v": (keys, s.hidden)}
        for name, shape in projections.items():
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = shape
            if family == "qwen2_moe":
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = shape[:1]
        shapes[f"{layer}.self_attn.o_proj.weight"] = (s.hidden, queries)
        if family == "olmoe":  # norms over all heads together
            shapes[f"{layer}.self_attn.q_norm.weight"] = (queries,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (keys,)
        if family == "qwen3":
            shapes[f"{layer}.self_attn.q_norm.weight"] = (s.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (s.head_dim,)
        shapes |= _mlp_shapes(family, layer, s)
    shapes["model.norm.weight"] = (s.hidden,)
    shapes["lm_head.weight"] = (s.vocabulary, s.hidden)
    return shapes


def _mlp_shapes(family: TinyFamily, layer: str, s: TinySizes) -> Shapes:
    def gated(prefix: str, inner: int, names: tuple[str, str, str]) -> Shapes:
        gate, up, down = (f"{prefix}.{name}.weight" for name in names)
        return {gate: (inner, s.hidden), up: (inner, s.hidden), down: (s.hidden, inner)}

    usual = ("gate_proj", "up_proj", "down_proj")
    if family in ("llama", "qwen3"):
        return gated(f"{layer}.mlp", 2 * s.inner, usual)
    block, names = f"{layer}.mlp", usual
    if family == "mixtral":
        block, names = f"{layer}.block_sparse_moe", ("w1", "w3", "w2")
    shapes: Shapes = {f"{block}.gate.weight": (s.experts, s.hidden)}
    for expert in range(s.experts):
        shapes |= gated(f"{block}.experts.{expert}", s.inner, names)
    if family == "qwen2_moe":
        shapes |= gated(f"{block}.shared_expert", 2 * s.inner, usual)
        shapes[f"{block}.shared_expert_gate.weight"] = (1, s.hidden)
    return shapes


def _write_weights(folder: Path, shapes: Shapes, dtype: str, seed: int) -> None:
    """Norms at one; matrices normal, so scaled that numbers keep their size from layer to layer."""
    kind = "F32" if dtype == "float32" else "BF16"
    layout = {name: (kind, shape) for name, shape in shapes.items()}
    with TensorFileWriter(folder / "model.safetensors", layout, {"format": "pt"}) as writer:
        for name, shape in shapes.items():
            if "norm" in name:
                weights = np.ones(shape, np.float32)
            else:
                drawn = stream(seed, name).standard_normal(shape, dtype=np.float32)
                weights = drawn / np.float32(math.sqrt(shape[-1]))
            encode: Callable[[Any], Any] = bfloat16 if kind == "BF16" else _float32
            writer.write(encode(weights).tobytes())
        writer.close()


def _float32(weights: Any) -> Any:
    return weights.astype("<f4")


def _write_tokenizer(folder: Path, sizes: TinySizes) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([_SAMPLE * 4], trainer)
    write_whole(folder / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes.context_tokens,
        "clean_up_tokenization_spaces": False,
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "chat_template": CHAT_TEMPLATE,
    }
    write_whole(folder / "chat_template.jinja", CHAT_TEMPLATE.encode())
    write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())
