"""A decoder-only language model: new tokens of several sequences in, logits out.

Everything between is done row by row, in float32; keys, values and attention are the caller's, and
so are routed experts.
"""

from __future__ import annotations

import torch

from runtime.model.attention import Attention
from runtime.model.decoder_layer import DecoderLayer
from runtime.model.embedding import Embedding, PackedEmbedding, TableEmbedding
from runtime.model.experts import Experts
from runtime.model.linear import Linear, make_linear
from runtime.model.norms import RmsNorm
from runtime.model.rotary import Rotary, RotaryTables
from runtime.model.spec import ModelSpec
from runtime.model.step import StepBatch
from runtime.model.weights import Weights


class Decoder:
    """All of a model but its routed experts.

    Attributes:
        spec: What it computes.
        device: Where it computes.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        """Read all weights.

        Args:
            spec: Of the model.
            weights: Its tensors, each asked for once.

        Raises:
            SourceError: If a tensor is missing, of another shape or dtype, or has no place.
        """
        self.spec, self.device = spec, weights.device
        table = weights.matrix(["embed_tokens.weight"], [spec.vocabulary], spec.hidden)
        self._embedding: Embedding = TableEmbedding(table)
        self._layers = [
            DecoderLayer(i, spec, weights.under(f"layers.{i}.")) for i in range(len(spec.layers))
        ]
        self._norm = RmsNorm(weights.vector("norm.weight", spec.hidden), spec.norm_epsilon)
        if spec.is_tied:
            weights.ignore("lm_head.weight")
            self._head = make_linear(table, threads=weights.threads)
            if isinstance(self._head, Linear):
                self._embedding = PackedEmbedding(self._head.packed)
        else:
            self._head = weights.linear(["lm_head"], [spec.vocabulary], spec.hidden)
        kinds: list[Rotary] = []
        for layer in spec.layers:
            if layer.attention.rotary not in kinds:
                kinds.append(layer.attention.rotary)
        self._rotary = [RotaryTables(rotary, weights.device) for rotary in kinds]
        self._rotary_of_layer = [kinds.index(layer.attention.rotary) for layer in spec.layers]
        self._layer_inputs = _LayerInputs(spec, weights) if spec.layer_input_width else None
        weights.finish()

    @torch.no_grad()
    def forward(
        self, batch: StepBatch, attention: Attention, experts: Experts | None = None
    ) -> torch.Tensor:
        """Compute new tokens; their keys and values are kept by ``attention``.

        Args:
            batch: The tokens, each within 0..vocabulary - 1; pages must have been reserved.
            attention: Begins a step here, then serves every layer.
            experts: Routed experts; None in a model without.

        Returns:
            [m, vocabulary] float32, logits after the rows of ``batch.logit_rows``; the caller may
            write them.
        """
        attention.begin(batch)
        tokens = torch.from_numpy(batch.tokens).to(self.device)
        positions = torch.from_numpy(batch.positions).to(self.device, torch.float32)
        rows = None
        if len(batch.logit_rows) < len(batch.tokens):
            rows = torch.from_numpy(batch.logit_rows).to(self.device)
        return self.compute(tokens, positions, attention, experts, rows)

    @torch.no_grad()
    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        experts: Experts | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A step that ``attention`` has begun, from tensors on the device and in its order alone.

        Args:
            tokens: [T] int64.
            positions: [T] float32.
            attention: As for ``forward``.
            experts: As for ``forward``.
            rows: [m] int64, fewer than T, whose logits are wanted; None: all.

        Returns:
            [m, vocabulary] float32.
        """
        x = self._embedding(tokens)
        if self.spec.embedding_scale != 1.0:
            x = x.mul_(self.spec.embedding_scale)
        inputs = None if self._layer_inputs is None else self._layer_inputs(tokens, x)
        rotary = [tables.at(positions) for tables in self._rotary]
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            x = layer(
                x,
                rotary[self._rotary_of_layer[number]],
                attention,
                experts,
                None if inputs is None else inputs[number],
                rows if number == last else None,
            )
        return self._logits(x)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self._head(self._norm(x))
        cap = self.spec.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _LayerInputs:
    """Gemma-4's second embedding: what every layer gets of a token besides the stream."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self._layers, self._width = len(spec.layers), spec.layer_input_width
        columns = self._layers * self._width
        self._embedding = TableEmbedding(
            weights.matrix(
                ["embed_tokens_per_layer.weight"], [spec.layer_input_vocabulary], columns
            )
        )
        self._project = weights.linear(["per_layer_model_projection"], [columns], spec.hidden)
        self._norm = RmsNorm(
            weights.vector("per_layer_projection_norm.weight", self._width), spec.norm_epsilon
        )
        self._hidden_scale = spec.hidden**-0.5

    def __call__(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[layers, T, width] float32, from tokens [T] int64 and their scaled embeddings [T, H]."""
        shape = (len(tokens), self._layers, self._width)
        own = self._embedding(tokens).mul_(self._width**0.5).view(shape)
        projected = self._project(x).mul_(self._hidden_scale).view(shape)
        both = self._norm(projected).add_(own).mul_(2**-0.5)
        return both.transpose(0, 1).contiguous()
