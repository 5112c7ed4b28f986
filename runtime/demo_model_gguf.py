"""A dense model of llama architecture in a GGUF file: its sizes, its vocabulary, its matrices.

llama.cpp stores the rows of q and k in pairs, as its rotary embedding turns neighbours; here they
are put back into halves, as Hugging Face checkpoints have them.

Source:
    The GGUF specification and ``convert_hf_to_gguf.py`` (``LlamaModel.permute``) of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GGUF_MAGIC = b"GGUF"
NORMAL_TOKEN = 1


class GgufError(ValueError):
    """A GGUF file that cannot become the demo model; the message names file and field."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Sizes of the dense model.

    Attributes:
        vocabulary: Rows of the embedding.
        hidden: Width of the residual stream.
        inner: Width inside the MLP.
        layers: Their number.
        heads, kv_heads: Query heads, and heads of keys and values.
        head_dim: Width of a head.
        context_tokens: Most positions.
        rope_theta: Base of the rotary embedding.
        norm_epsilon: Of the RMS norms.
        is_tied: Whether the output matrix is the embedding.
        bos_token_id, eos_token_id, pad_token_id: Special tokens.
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    rope_theta: float
    norm_epsilon: float
    is_tied: bool
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A byte-level BPE vocabulary.

    Attributes:
        tokens: In order of their ids, bytes spelled as in GPT-2.
        special: Ids of tokens that no text becomes.
        merges: Pairs in order of rank.
        pre_tokenizer: llama.cpp's name of how text is cut before the merges.
        chat_template: Jinja source; empty if the file has none.
        unk_token_id: Kept for the tokenizer's configuration; None where there is none.
    """

    tokens: tuple[str, ...]
    special: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    pre_tokenizer: str
    chat_template: str
    unk_token_id: int | None


class DenseGguf:
    """An opened file; matrices are dequantized one at a time."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            GgufError: If the file is none, of another architecture, or lacks a field or tensor.
        """
        import gguf

        self.path = path
        try:
            with path.open("rb") as stream:
                magic = stream.read(len(GGUF_MAGIC))
        except OSError as error:
            raise GgufError(f"{path}: cannot be read: {error.strerror}") from error
        if magic != GGUF_MAGIC:
            raise GgufError(f"{path}: no GGUF file: starts with {magic!r}, must be {GGUF_MAGIC!r}")
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise GgufError(f"{path}: damaged or cut short: {error}") from error
        self._fields: Mapping[str, Any] = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._dequantize = gguf.quants.dequantize
        self.config = self._read_config()
        self._require_tensors()

    def vocabulary(self) -> Vocabulary:
        """Tokens, merges and chat template.

        Raises:
            GgufError: If the vocabulary is no byte-level BPE.
        """
        kind = self._field("tokenizer.ggml.model")
        if kind != "gpt2":
            raise GgufError(f"{self.path}: tokenizer.ggml.model is {kind!r}, must be 'gpt2'")
        types = self._field("tokenizer.ggml.token_type")
        merges = []
        for merge in self._field("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        unknown = self._field("tokenizer.ggml.unknown_token_id", optional=True)
        return Vocabulary(
            tokens=tuple(self._field("tokenizer.ggml.tokens")),
            special=tuple(i for i, kind in enumerate(types) if kind != NORMAL_TOKEN),
            merges=tuple(merges),
            pre_tokenizer=self._field("tokenizer.ggml.pre"),
            chat_template=self._field("tokenizer.chat_template", optional=True) or "",
            unk_token_id=None if unknown is None else int(unknown),
        )

    def matrix(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32, [out, in] or [width]; ``name`` as in GGUF without ``.weight``."""
        tensor = self._tensors[f"{name}.weight"]
        weights = self._dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = name.rpartition(".")[2]
        if part in ("attn_q", "attn_k"):
            heads = self.config.heads if part == "attn_q" else self.config.kv_heads
            return _halves(weights, heads)
        return np.asarray(weights)

    def _read_config(self) -> DenseConfig:
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise GgufError(
                f"{self.path}: general.architecture is {architecture!r}, must be 'llama'"
            )
        heads = int(self._field("llama.attention.head_count"))
        hidden = int(self._field("llama.embedding_length"))
        eos = int(self._field("tokenizer.ggml.eos_token_id"))
        pad = self._field("tokenizer.ggml.padding_token_id", optional=True)
        return DenseConfig(
            vocabulary=len(self._fields["tokenizer.ggml.tokens"].data),
            hidden=hidden,
            inner=int(self._field("llama.feed_forward_length")),
            layers=int(self._field("llama.block_count")),
            heads=heads,
            kv_heads=int(self._field("llama.attention.head_count_kv")),
            head_dim=hidden // heads,
            context_tokens=int(self._field("llama.context_length")),
            rope_theta=float(self._field("llama.rope.freq_base")),
            norm_epsilon=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            is_tied="output.weight" not in self._tensors,
            bos_token_id=int(self._field("tokenizer.ggml.bos_token_id")),
            eos_token_id=eos,
            pad_token_id=eos if pad is None else int(pad),
        )

    def _field(self, name: str, *, optional: bool = False) -> Any:
        field = self._fields.get(name)
        if field is None:
            if optional:
                return None
            raise GgufError(f"{self.path}: field {name} is missing")
        return field.contents()

    def _require_tensors(self) -> None:
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        wanted = {"token_embd": (c.vocabulary, c.hidden), "output_norm": (c.hidden,)}
        if not c.is_tied:
            wanted["output"] = (c.vocabulary, c.hidden)
        for layer in range(c.layers):
            parts = {
                "attn_norm": (c.hidden,),
                "ffn_norm": (c.hidden,),
                "attn_q": (queries, c.hidden),
                "attn_k": (keys, c.hidden),
                "attn_v": (keys, c.hidden),
                "attn_output": (c.hidden, queries),
                "ffn_gate": (c.inner, c.hidden),
                "ffn_up": (c.inner, c.hidden),
                "ffn_down": (c.hidden, c.inner),
            }
            wanted |= {f"blk.{layer}.{part}": shape for part, shape in parts.items()}
        for name, shape in wanted.items():
            tensor = self._tensors.get(f"{name}.weight")
            if tensor is None:
                raise GgufError(f"{self.path}: tensor {name}.weight is missing")
            found = tuple(int(size) for size in reversed(tensor.shape))
            if found != shape:
                raise GgufError(
                    f"{self.path}: tensor {name}.weight has shape {list(found)},"
                    f" must be {list(shape)}"
                )


def _halves(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of every head from pairs (0, d/2, 1, d/2 + 1, ...) back to halves."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)
