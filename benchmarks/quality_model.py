"""A mixture-of-experts model whose blocks can be put at any bitwidth, and its loss on text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from models.plane_bytes import block_bytes, plane_bytes
from runtime.calibration_experts import find_experts
from runtime.calibration_tables import fitted_table
from runtime.nested_kmeans import NestedRows, quantize_rows
from runtime.row_gain import with_row_gain

BITS = (2, 3, 4, 5, 6, 7, 8)
MAX_LOGITS = 8 << 20  # numbers held at once


def fitted_rows(weights: np.ndarray, nested: NestedRows, moment: np.ndarray) -> NestedRows:
    """The same codes with every table fitted to the outputs."""
    tables = {
        q: fitted_table(weights, nested.codes >> (nested.parent_bits - q), table, moment)
        for q, table in nested.tables.items()
    }
    return NestedRows(nested.codes, tables)


class MixedPrecisionModel:
    """Weights of all blocks as nested codes; ``hold`` writes a mixture of widths into the model.

    Args:
        model: A transformers causal language model.
        sensitivity: Block id -> [K] weights of the clustering.
        moment: Block id -> second moment of its inputs, for tables of unit gain; None leaves the
            plain centroids.
        fitted: With moments: tables fitted to the block's outputs by least squares, instead.
    """

    def __init__(
        self,
        model: Any,
        sensitivity: Any,
        threads: int = 1,
        *,
        moment: Any = None,
        fitted: bool = False,
    ) -> None:
        self.model = model
        self.layers = find_experts(model)
        first = self.layers[0]
        self.experts = first.experts
        self.num_blocks = 2 * len(self.layers) * self.experts
        self.full = [self._stored(block).clone() for block in range(self.num_blocks)]
        self.rows: list[NestedRows] = []
        for block in range(self.num_blocks):
            rows = quantize_rows(
                self.full[block].numpy(), np.asarray(sensitivity(block)), threads=threads
            )
            if moment is not None and fitted:
                rows = fitted_rows(self.full[block].numpy(), rows, moment(block))
            elif moment is not None:
                rows = with_row_gain(self.full[block].numpy(), rows, moment(block))
            tables = {q: table.astype(np.float16) for q, table in rows.tables.items()}
            self.rows.append(NestedRows(rows.codes, tables))
        self.held = np.full(self.num_blocks, 16)

    def place(self, block: int) -> tuple[int, int, int]:
        """(layer, expert, module) of a block id."""
        return block // 2 // self.experts, block // 2 % self.experts, block % 2

    def _stored(self, block: int) -> torch.Tensor:
        layer, expert, module = self.place(block)
        experts = self.layers[layer]
        return (experts.down if module else experts.gate_up)[expert]

    def weights(self, block: int) -> np.ndarray:
        """[N, K] float32 original weights."""
        return self.full[block].numpy()

    def reconstructions(self, block: int) -> Iterator[np.ndarray]:
        """[N, K] float32 at every width of BITS."""
        for bits in BITS:
            yield self.rows[block].reconstruct(bits).astype(np.float32)

    def hold(self, bits: np.ndarray | int) -> None:
        """Put every block at a width; 16 is full precision."""
        wanted = np.broadcast_to(bits, self.num_blocks)
        for block in np.flatnonzero(wanted != self.held):
            q = int(wanted[block])
            if q == 16:
                self._stored(block).copy_(self.full[block])
            else:
                rows = self.rows[block].reconstruct(q).astype(np.float32)
                self._stored(block).copy_(torch.from_numpy(rows))
            self.held[block] = q

    def bytes_table(self, accounting: str) -> np.ndarray:
        """[blocks, levels] bytes: ``planes`` alone, or with ``resident`` tables (all up to q).

        A drop must move no bytes, so a block at q bits keeps the tables of 2..q.
        """
        sizes = []
        for weights in self.full:
            n, k = weights.shape
            if accounting == "planes":
                sizes.append([q * plane_bytes(n, k) for q in BITS])
            else:
                sizes.append([block_bytes(n, k, q, tables="all") for q in BITS])
        return np.array(sizes, dtype=np.int64)


@torch.inference_mode()
def sequence_losses(model: Any, sequences: torch.Tensor) -> np.ndarray:
    """[n] mean negative log-likelihood of every sequence, nats per token."""
    losses = []
    batch = max(1, MAX_LOGITS // (sequences.shape[1] * model.config.vocab_size))
    for start in range(0, len(sequences), batch):
        x = sequences[start : start + batch]
        logits = model(input_ids=x, use_cache=False).logits[:, :-1]
        flat = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="none"
        )
        losses.append(flat.view(len(x), -1).double().mean(1).numpy())
    return np.concatenate(losses)


@dataclass(frozen=True)
class Increase:
    """Loss of one setting against full precision, sequence by sequence."""

    losses: np.ndarray
    full: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))

    @property
    def perplexity_increase(self) -> float:
        return self.perplexity - float(np.exp(self.full.mean()))

    @property
    def nats(self) -> float:
        return float((self.losses - self.full).mean())

    @property
    def nats_standard_error(self) -> float:
        """Paired over sequences."""
        return float((self.losses - self.full).std(ddof=1) / np.sqrt(len(self.full)))

    def ratio_to(self, other: Increase, seed: int = 0) -> tuple[float, float, float]:
        """Perplexity increase over that of ``other``, with a paired bootstrap 95 % interval."""
        rng = np.random.default_rng(seed)
        n = len(self.full)
        draws = rng.integers(0, n, (2000, n))
        full, own, their = (x[draws].mean(1) for x in (self.full, self.losses, other.losses))
        ratios = (np.exp(own) - np.exp(full)) / (np.exp(their) - np.exp(full))
        low, high = np.quantile(ratios, [0.025, 0.975])
        ratio = self.perplexity_increase / other.perplexity_increase
        return ratio, float(low), float(high)

    def record(self) -> dict[str, float]:
        return {
            "perplexity": self.perplexity,
            "perplexity_increase": self.perplexity_increase,
            "nats": self.nats,
            "nats_standard_error": self.nats_standard_error,
        }
