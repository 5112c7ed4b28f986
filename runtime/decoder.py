"""One step of a mixture-of-experts decoder: tokens of several sequences in, logits out.

Attention, norms and routers run in torch; the experts are given, so that the same step runs with
full-precision experts and with quantized pages. Keys and values live in pages of the arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from runtime.decoder_config import DecoderConfig, DecoderConfigError
from runtime.paged_keys_values import PagedKeysValues


class Experts(Protocol):
    """The routed experts of all layers."""

    def __call__(
        self, layer: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            layer: Which layer's experts.
            hidden: [T, H] float32.
            experts: [T, k] int64, chosen experts.
            weights: [T, k] float32, gate weights.

        Returns:
            [T, H] float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one sequence in a step."""

    sequence: int
    tokens: Sequence[int]


class Decoder:
    """All weights but the routed experts, as float32, and the step that uses them.

    Args:
        config: Shapes and constants.
        tensors: Name in the checkpoint -> tensor; read once, names as Hugging Face writes them.

    Raises:
        DecoderConfigError: If a tensor is missing or has another shape than the config says.
    """

    def __init__(self, config: DecoderConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._tensors = tensors
        c = config
        self.embedding = self._weight("model.embed_tokens.weight", (c.vocabulary, c.hidden))
        self.final_norm = self._weight("model.norm.weight", (c.hidden,))
        self.head = (
            self.embedding
            if c.tied_embeddings
            else self._weight("lm_head.weight", (c.vocabulary, c.hidden))
        )
        self.layers = [self._layer(i) for i in range(c.layers)]
        half = torch.arange(0, c.head_dim, 2, dtype=torch.float32)
        self._frequencies = 1.0 / (c.rotary_base ** (half / c.head_dim))
        del self._tensors

    @torch.inference_mode()
    def step(self, spans: Sequence[Span], cache: PagedKeysValues, experts: Experts) -> torch.Tensor:
        """Run the new tokens of every sequence through all layers.

        Pages must have been reserved; the tokens count as held afterwards.

        Returns:
            [n, vocabulary] float32, logits after the last token of each span.
        """
        c = self.config
        tokens = torch.tensor([token for span in spans for token in span.tokens])
        starts = [cache.sequences[span.sequence].tokens for span in spans]
        positions = torch.cat(
            [torch.arange(s, s + len(span.tokens)) for s, span in zip(starts, spans, strict=True)]
        )
        angles = positions[:, None].float() * self._frequencies
        rotary = torch.cat([angles, angles], dim=-1)[:, None]
        cosine, sine = rotary.cos(), rotary.sin()
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            h = _rms_norm(x, layer["input_norm"], c.norm_epsilon)
            x = x + self._attend(number, layer, h, cosine, sine, spans, starts, cache)
            h = _rms_norm(x, layer["post_norm"], c.norm_epsilon)
            x = x + self._feed_forward(number, layer, h, experts)
        for span in spans:
            cache.advance(span.sequence, len(span.tokens))
        last = torch.tensor([len(span.tokens) for span in spans]).cumsum(0) - 1
        return functional.linear(_rms_norm(x[last], self.final_norm, c.norm_epsilon), self.head)

    def _attend(
        self,
        number: int,
        layer: Mapping[str, torch.Tensor],
        h: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        spans: Sequence[Span],
        starts: Sequence[int],
        cache: PagedKeysValues,
    ) -> torch.Tensor:
        c = self.config
        q = functional.linear(h, layer["q"], layer.get("q_bias"))
        k = functional.linear(h, layer["k"], layer.get("k_bias"))
        v = functional.linear(h, layer["v"], layer.get("v_bias")).view(
            -1, c.key_value_heads, c.head_dim
        )
        if c.query_key_norm == "row":
            q = _rms_norm(q, layer["q_norm"], c.norm_epsilon)
            k = _rms_norm(k, layer["k_norm"], c.norm_epsilon)
        q, k = q.view(-1, c.heads, c.head_dim), k.view(-1, c.key_value_heads, c.head_dim)
        if c.query_key_norm == "head":
            q = _rms_norm(q, layer["q_norm"], c.norm_epsilon)
            k = _rms_norm(k, layer["k_norm"], c.norm_epsilon)
        q, k = _rotate(q, cosine, sine), _rotate(k, cosine, sine)
        attended = torch.empty(len(h), c.heads * c.head_dim)
        row = 0
        for span, start in zip(spans, starts, strict=True):
            rows = slice(row, row + len(span.tokens))
            cache.write(number, span.sequence, k[rows], v[rows])
            attended[rows] = self._attend_one(
                number, q[rows], span.sequence, start, start + len(span.tokens), cache
            )
            row = rows.stop
        return functional.linear(attended, layer["o"])

    def _attend_one(
        self,
        number: int,
        q: torch.Tensor,
        sequence: int,
        start: int,
        stop: int,
        cache: PagedKeysValues,
    ) -> torch.Tensor:
        window = self.config.window
        first = 0 if window is None else max(0, start + 1 - window)
        keys, values = cache.read(number, sequence, stop, first)
        mask = None
        if len(q) > 1:
            query_at = torch.arange(start, stop)[:, None]
            key_at = torch.arange(first, stop)[None]
            mask = key_at <= query_at
            if window is not None:
                mask &= key_at > query_at - window
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=self.config.heads != self.config.key_value_heads,
        )
        return out[0].transpose(0, 1).flatten(1)

    def _feed_forward(
        self, number: int, layer: Mapping[str, torch.Tensor], h: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        c = self.config
        shares = torch.softmax(functional.linear(h, layer["router"]), dim=-1)
        weights, chosen = torch.topk(shares, c.experts_per_token, dim=-1)
        if c.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = experts(number, h, chosen, weights)
        if c.shared_expert:
            dense = functional.silu(functional.linear(h, layer["shared_gate"])) * functional.linear(
                h, layer["shared_up"]
            )
            scale = torch.sigmoid(functional.linear(h, layer["shared_scale"]))
            out = out + scale * functional.linear(dense, layer["shared_down"])
        return out

    def _layer(self, number: int) -> dict[str, torch.Tensor]:
        c = self.config
        p = f"model.layers.{number}."
        a, q_rows, kv_rows = p + "self_attn.", c.heads * c.head_dim, c.key_value_heads * c.head_dim
        layer = {
            "input_norm": self._weight(p + "input_layernorm.weight", (c.hidden,)),
            "post_norm": self._weight(p + "post_attention_layernorm.weight", (c.hidden,)),
            "q": self._weight(a + "q_proj.weight", (q_rows, c.hidden)),
            "k": self._weight(a + "k_proj.weight", (kv_rows, c.hidden)),
            "v": self._weight(a + "v_proj.weight", (kv_rows, c.hidden)),
            "o": self._weight(a + "o_proj.weight", (c.hidden, q_rows)),
        }
        for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            if f"{a}{part}_proj.bias" in self._tensors:
                layer[f"{part}_bias"] = self._weight(f"{a}{part}_proj.bias", (rows,))
        if c.query_key_norm != "none":
            whole = c.query_key_norm == "row"
            layer["q_norm"] = self._weight(a + "q_norm.weight", (q_rows if whole else c.head_dim,))
            layer["k_norm"] = self._weight(a + "k_norm.weight", (kv_rows if whole else c.head_dim,))
        block = (
            "block_sparse_moe." if p + "block_sparse_moe.gate.weight" in self._tensors else "mlp."
        )
        layer["router"] = self._weight(p + block + "gate.weight", (c.experts, c.hidden))
        if c.shared_expert:
            s = p + "mlp.shared_expert"
            layer["shared_gate"] = self._weight(s + ".gate_proj.weight", None)
            layer["shared_up"] = self._weight(s + ".up_proj.weight", None)
            layer["shared_down"] = self._weight(s + ".down_proj.weight", None)
            layer["shared_scale"] = self._weight(s + "_gate.weight", (1, c.hidden))
        return layer

    def _weight(self, name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
        if name not in self._tensors:
            raise DecoderConfigError(f"{name}: is not in the checkpoint")
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != shape:
            raise DecoderConfigError(
                f"{name}: must have shape {shape} by the config, found {tuple(tensor.shape)}"
            )
        return tensor.float().contiguous()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine
