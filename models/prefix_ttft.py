"""Seconds to the first token with and without a pooled prefix store: first order, no queueing.

Documents are asked about again and again, each question going to a random GPU. Of a prompt of s
tokens, s - q are the document. With kv = bytes per token * (s - q), full = t(s, 0) and
tail = t(q, s - q) of `models.prefix_costs.PrefillCost`:

    vanilla   = full
    prefix    = h_loc tail + (1 - h_loc) full
    pooled(r) = h_pool (tail + lookup + kv/B_h2d + r (1 - overlap) (rpc + kv/B_net))
              + (1 - h_pool) (full + lookup)
    h_loc     = (1 - d(G, m)/m) min(1, C_gpu/(D s))
    h_pool    = (1 - 1/m) min(1, pool/(D s kv per token))
    d(k, m)   = k (1 - (1 - 1/k)^m), the different ones of k that m random choices reach

EvoStore fetches from the owner, r = 1 - 1/n on n nodes; PTStore keeps what it fetched, so that only
a node's first read is remote, r = (d(n, m) - 1)/(m - 1), for the share of replicas that stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from models.prefix_costs import PrefillCost

LONG_PROMPT_TOKENS = 8192
SHORT_PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftParameters:
    """The experiment; defaults are Mistral-7B on nodes of four A100-40GB.

    Attributes:
        parameters, layers, heads, kv_heads, head_dim: Of the model.
        bytes_per_value: Of weights, keys and values.
        flops_per_s: Peak of a GPU.
        mfu: Share of it that prefill reaches, 0..1.
        gpu_memory_bytes, gpu_memory_bytes_per_s: Of a GPU.
        gpu_memory_share: What may be used of it, 0..1.
        activation_bytes: Of that, neither weights nor cache.
        forward_s: Fixed seconds of a forward pass.
        gpus, gpus_per_node: In all, and in a node.
        host_to_device_bytes_per_s: Of one GPU.
        network_bytes_per_s: Of one load from another node.
        rpc_s: Fixed seconds of a request to another node.
        lookup_s: Seconds to find out what is stored.
        host_bytes_per_node: Of the pool.
        network_overlap: Share of the time on the network that is hidden, 0..1.
        documents: D, in use at the same time.
        questions_per_document: m, >= 1.
        question_tokens: q, never stored.
        replicas_kept: Share of replicas that stay until they are wanted again, 0..1.
    """

    parameters: float = 7.24e9
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    bytes_per_value: int = 2
    flops_per_s: float = 312e12
    mfu: float = 0.5
    gpu_memory_bytes: float = 40e9
    gpu_memory_bytes_per_s: float = 1.555e12
    gpu_memory_share: float = 0.9
    activation_bytes: float = 1.5e9
    forward_s: float = 6e-3
    gpus: int = 16
    gpus_per_node: int = 4
    host_to_device_bytes_per_s: float = 14e9
    network_bytes_per_s: float = 12e9
    rpc_s: float = 60e-6
    lookup_s: float = 8e-3
    host_bytes_per_node: float = 256e9
    network_overlap: float = 0.0
    documents: int = 10
    questions_per_document: int = 50
    question_tokens: int = 64
    replicas_kept: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))
        if self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus must be a multiple of gpus_per_node, found {self.gpus} and"
                f" {self.gpus_per_node}"
            )
        if self.gpu_cache_tokens <= 0:
            raise ValueError("gpu_memory_bytes leaves no room for a cache beside the weights")

    @property
    def prefill(self) -> PrefillCost:
        """Of one GPU."""
        return PrefillCost(
            parameters=self.parameters,
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            weight_bytes=self.weight_bytes,
            flops_per_s=self.flops_per_s,
            mfu=self.mfu,
            memory_bytes_per_s=self.gpu_memory_bytes_per_s,
            forward_s=self.forward_s,
        )

    @property
    def weight_bytes(self) -> float:
        """Of the model."""
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def gpu_cache_tokens(self) -> float:
        """C_gpu: tokens whose keys and values fit beside weights and activations."""
        usable = self.gpu_memory_bytes * self.gpu_memory_share
        return (usable - self.weight_bytes - self.activation_bytes) / self.kv_bytes_per_token

    @property
    def nodes(self) -> int:
        """n."""
        return self.gpus // self.gpus_per_node


class TtftRatios(NamedTuple):
    """What is claimed of PTStore, as ratios of seconds.

    Attributes:
        prefix_long: R1, local prefix cache over PTStore at 8k tokens.
        evostore_long: R2, EvoStore over PTStore at 8k tokens.
        vanilla_long: R3, no cache over PTStore at 8k tokens.
        prefix_short: Local prefix cache over PTStore at 1k tokens.
    """

    prefix_long: float
    evostore_long: float
    vanilla_long: float
    prefix_short: float


CLAIMS = TtftRatios(1.8, 1.15, 4.8, 0.7), TtftRatios(2.2, 1.30, 6.2, 1.25)


def distinct_reached(places: int, choices: int) -> float:
    """d(k, m): how many of k places m random choices reach, in expectation."""
    return places * (1.0 - (1.0 - 1.0 / places) ** choices)


def local_hit_share(p: TtftParameters, prompt_tokens: int) -> float:
    """h_loc: share of questions whose document the GPU's own cache holds."""
    m = p.questions_per_document
    fits = min(1.0, p.gpu_cache_tokens / (p.documents * prompt_tokens))
    return (1.0 - distinct_reached(p.gpus, m) / m) * fits


def pool_hit_share(p: TtftParameters, prompt_tokens: int) -> float:
    """h_pool: share of questions whose document the pool holds."""
    pool_bytes = p.nodes * p.host_bytes_per_node
    wanted_bytes = p.documents * prompt_tokens * p.kv_bytes_per_token
    return (1.0 - 1.0 / p.questions_per_document) * min(1.0, pool_bytes / wanted_bytes)


def evostore_remote_share(p: TtftParameters) -> float:
    """r of EvoStore: the owner is another node."""
    return 1.0 - 1.0 / p.nodes


def ptstore_remote_share(p: TtftParameters) -> float:
    """r of PTStore: a node's first read, and later ones for replicas that did not stay."""
    return _with_replicas(p, _reads_by_new_nodes(p), p.questions_per_document - 1)


def vanilla_s(p: TtftParameters, prompt_tokens: int) -> float:
    """Seconds without any reuse."""
    return p.prefill.seconds(_checked(p, prompt_tokens))


def prefix_s(p: TtftParameters, prompt_tokens: int) -> float:
    """Mean seconds with a cache in each GPU and no pool."""
    h = local_hit_share(p, prompt_tokens)
    return h * _tail_s(p, prompt_tokens) + (1.0 - h) * vanilla_s(p, prompt_tokens)


def evostore_s(p: TtftParameters, prompt_tokens: int) -> float:
    """Mean seconds with a pool that keeps one copy."""
    return _pooled_s(p, prompt_tokens, evostore_remote_share(p))


def ptstore_s(p: TtftParameters, prompt_tokens: int) -> float:
    """Mean seconds with a pool that keeps replicas of what it fetched."""
    return _pooled_s(p, prompt_tokens, ptstore_remote_share(p))


def product_s(
    p: TtftParameters, prompt_tokens: int, *, network_overlap: float | None = None
) -> float:
    """Mean seconds with the GPU's cache first and the pool behind it, where the pool pays.

    Of the questions that miss in the GPU, ``(h_pool - h_loc)/(1 - h_loc)`` find their document in
    the pool. There the cheaper of fetching and computing is taken; the pool is not asked at all
    for prompts so short that looking costs more than it brings. Hence never slower than `prefix_s`.

    Args:
        p: The experiment.
        prompt_tokens: s, more than the question.
        network_overlap: Share of the network time that pipelining hides, in place of the
            experiment's.
    """
    pipelined = p if network_overlap is None else replace(p, network_overlap=network_overlap)
    full_s, tail_s = vanilla_s(p, prompt_tokens), _tail_s(p, prompt_tokens)
    h = local_hit_share(p, prompt_tokens)
    found = max(0.0, pool_hit_share(p, prompt_tokens) - h) / (1.0 - h)
    fetch_s = _fetch_s(pipelined, prompt_tokens, product_remote_share(p, prompt_tokens))
    asked_s = p.lookup_s + found * min(tail_s + fetch_s, full_s) + (1.0 - found) * full_s
    return h * tail_s + (1.0 - h) * min(asked_s, full_s)


def product_remote_share(p: TtftParameters, prompt_tokens: int) -> float:
    """r behind a GPU cache: the same first reads by nodes, among the questions that miss there."""
    missed = p.questions_per_document * (1.0 - local_hit_share(p, prompt_tokens)) - 1.0
    return _with_replicas(p, _reads_by_new_nodes(p), missed)


def ratios(p: TtftParameters) -> TtftRatios:
    """R1, R2, R3 at 8k tokens, and prefix over PTStore at 1k."""
    return TtftRatios(*_ratios(p))


def _ratios(p: TtftParameters) -> Iterator[float]:
    long_s = ptstore_s(p, LONG_PROMPT_TOKENS)
    yield prefix_s(p, LONG_PROMPT_TOKENS) / long_s
    yield evostore_s(p, LONG_PROMPT_TOKENS) / long_s
    yield vanilla_s(p, LONG_PROMPT_TOKENS) / long_s
    yield prefix_s(p, SHORT_PROMPT_TOKENS) / ptstore_s(p, SHORT_PROMPT_TOKENS)


def satisfies_claims(
    found: Iterable[float], bounds: tuple[TtftRatios, TtftRatios] = CLAIMS
) -> bool:
    """Whether all four ratios lie within the bounds, ends included; the first that does not ends
    the question.
    """
    return all(low <= x <= high for low, x, high in zip(bounds[0], found, bounds[1], strict=True))


def search_parameters(
    base: TtftParameters,
    grid: Mapping[str, Sequence[Any]],
    bounds: tuple[TtftRatios, TtftRatios] = CLAIMS,
) -> Iterator[tuple[TtftParameters, TtftRatios]]:
    """Combinations of a grid under which all four claims hold at once, in order of the grid.

    Args:
        base: What the grid does not vary.
        grid: Values by name of a parameter; the last name varies fastest.
        bounds: Least and largest ratios.

    Raises:
        ValueError: If a name is no parameter or a value is none of it.
    """
    known = [field.name for field in fields(TtftParameters)]
    for name in grid:
        if name not in known:
            raise ValueError(f"grid must name parameters ({', '.join(known)}), found {name!r}")
    for values in itertools.product(*grid.values()):
        p = replace(base, **dict(zip(grid, values, strict=True)))
        if satisfies_claims(_ratios(p), bounds):
            yield p, ratios(p)


def _tail_s(p: TtftParameters, prompt_tokens: int) -> float:
    return p.prefill.seconds(p.question_tokens, _checked(p, prompt_tokens) - p.question_tokens)


def _fetch_s(p: TtftParameters, prompt_tokens: int, remote_share: float) -> float:
    kv_bytes = p.kv_bytes_per_token * (prompt_tokens - p.question_tokens)
    network_s = p.rpc_s + kv_bytes / p.network_bytes_per_s
    visible = remote_share * (1.0 - p.network_overlap)
    return kv_bytes / p.host_to_device_bytes_per_s + visible * network_s


def _pooled_s(p: TtftParameters, prompt_tokens: int, remote_share: float) -> float:
    h = pool_hit_share(p, prompt_tokens)
    hit_s = _tail_s(p, prompt_tokens) + _fetch_s(p, prompt_tokens, remote_share)
    return p.lookup_s + h * hit_s + (1.0 - h) * vanilla_s(p, prompt_tokens)


def _reads_by_new_nodes(p: TtftParameters) -> float:
    """Per document: nodes that read it and did not write it."""
    return distinct_reached(p.nodes, p.questions_per_document) - 1.0


def _with_replicas(p: TtftParameters, new_node_reads: float, reads: float) -> float:
    """Share of remote reads; where replicas do not stay, the owner's node alone reads locally."""
    first = min(1.0, new_node_reads / reads) if reads > 0.0 else 0.0
    return first + (1.0 - p.replicas_kept) * max(0.0, evostore_remote_share(p) - first)


def _checked(p: TtftParameters, prompt_tokens: int) -> int:
    if prompt_tokens <= p.question_tokens:
        raise ValueError(
            f"prompt_tokens must be more than question_tokens ({p.question_tokens}),"
            f" found {prompt_tokens}"
        )
    return prompt_tokens


_SHARES = ("gpu_memory_share", "network_overlap", "replicas_kept")
_MAY_BE_ZERO = ("activation_bytes", "forward_s", "rpc_s", "lookup_s", "host_bytes_per_node")


def _check(name: str, value: float) -> None:
    if name in _SHARES and not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be a share in 0..1, found {value}")
    if name in _SHARES or name in _MAY_BE_ZERO:
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, found {value}")
    elif not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be finite and > 0, found {value}")
