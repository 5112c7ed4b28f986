"""The tables of a scenario about a pooled prefix cache: who computes what again, who fetches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from models.precision_settings import Llm
from models.strict_tables import (
    ScenarioError,
    require_at_least_one,
    require_at_most,
    require_not_negative,
    require_positive,
    require_rates,
    require_within,
)

PrefixModeName = Literal["vanilla", "local_prefix", "evostore", "ptstore", "product"]
RoutingName = Literal["random", "round_robin", "sticky", "prefix_aware"]
OwnerRuleName = Literal["rendezvous", "writer", "anchor"]
FlushName = Literal["on_commit", "on_reuse", "never"]
PREFIX_MODES: tuple[PrefixModeName, ...] = (
    "vanilla",
    "local_prefix",
    "evostore",
    "ptstore",
    "product",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadRequests:
    """One request after the other at an even distance, so that none waits for another."""

    kind: Literal["spread"] = "spread"
    gap_s: float = 2.0

    def __post_init__(self) -> None:
        require_within("workload.arrivals", 1e-6, 1e6, gap_s=self.gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonRequests:
    """Independent exponential gaps."""

    kind: Literal["poisson"] = "poisson"
    rate_per_s: float

    def __post_init__(self) -> None:
        require_rates("workload.arrivals", rate_per_s=self.rate_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentsWorkload:
    """Questions about documents: a prompt is a document and a question that nobody repeats.

    Attributes:
        documents: D, how many.
        questions: m, questions about each.
        question_tokens: q, the end of every prompt.
        prompt_tokens: Prompt lengths s, document and question; each is an experiment of its own.
        arrivals: When the D m requests come; their order is random.
    """

    kind: Literal["documents"] = "documents"
    documents: int = 10
    questions: int = 50
    question_tokens: int = 64
    prompt_tokens: Sequence[int] = (1024, 2048, 4096, 8192)
    arrivals: SpreadRequests | PoissonRequests = field(default_factory=SpreadRequests)

    def __post_init__(self) -> None:
        table = "workload"
        require_at_least_one(
            table,
            documents=self.documents,
            questions=self.questions,
            question_tokens=self.question_tokens,
        )
        require_at_most(table, 1_000_000, documents=self.documents, questions=self.questions)
        if not self.prompt_tokens:
            raise ScenarioError("[workload] prompt_tokens: is empty; give at least one length")
        if len(set(self.prompt_tokens)) != len(self.prompt_tokens):
            raise ScenarioError("[workload] prompt_tokens: a length is given twice")
        for tokens in self.prompt_tokens:
            if not self.question_tokens < tokens <= 10_000_000:
                raise ScenarioError(
                    f"[workload] prompt_tokens: each must be > question_tokens "
                    f"({self.question_tokens}) and <= 10,000,000, found {tokens:,}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedWorkload:
    """One of the seeded generators of requests with shared prefixes.

    Attributes:
        generator: Which.
        num_requests: The first so many of its requests; None: all.
        rate_scale: Factor on the rate of its arrivals.
    """

    kind: Literal["generated"] = "generated"
    generator: Literal["docqa", "chat", "agent", "mixed"] = "docqa"
    num_requests: int | None = None
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        require_at_least_one("workload", num_requests=self.num_requests)
        require_rates("workload", rate_scale=self.rate_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWorkload:
    """A recorded trace with prefix blocks; blocks are as large as the trace says.

    Attributes:
        trace: File.
        format: Format of the file, or ``auto``.
        skip_bad_rows: Leave rows out that break a rule (and report them) instead of stopping.
        num_requests: The first so many of its requests; None: all.
        rate_scale: Factor on the rate of its arrivals.
    """

    kind: Literal["trace"] = "trace"
    trace: str
    format: str = "auto"
    skip_bad_rows: bool = False
    num_requests: int | None = None
    rate_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.trace.strip():
            raise ScenarioError("[workload] trace: is empty; give a path")
        require_at_least_one("workload", num_requests=self.num_requests)
        require_rates("workload", rate_scale=self.rate_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixQuestion:
    """What is compared.

    Attributes:
        modes: Systems that serve the same requests: ``vanilla`` computes all; ``local_prefix``
            has a cache on each GPU; ``evostore`` pools host memory, without replicas; ``ptstore``
            keeps replicas up to a threshold; ``product`` looks on the GPU first, prices every
            copy, computes again what would be dearer to fetch, and overlaps its reads.
        routing: Which GPU gets a request.
        owners: Which node keeps a region.
        block_tokens: Tokens of a block; a trace brings its own.
        calibration: File of ``runtime profile`` that fills in what ``[gpu]``, ``[links]`` and
            ``[product]`` do not give.
    """

    modes: Sequence[PrefixModeName] = PREFIX_MODES
    routing: RoutingName = "random"
    owners: OwnerRuleName = "rendezvous"
    block_tokens: int = 64
    calibration: str | None = None

    def __post_init__(self) -> None:
        require_within("prefix", 1, 65_536, block_tokens=self.block_tokens)
        if not self.modes:
            raise ScenarioError(
                f"[prefix] modes: is empty; give some of {', '.join(map(repr, PREFIX_MODES))}"
            )
        if len(set(self.modes)) != len(self.modes):
            raise ScenarioError("[prefix] modes: a mode is given twice")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNodes:
    """How many there are, and what each keeps.

    Attributes:
        nodes, gpus_per_node: Numbers of them.
        memory_bytes: Host memory of a node's store.
        ssd_bytes: SSD of a node's store; 0: none.
    """

    nodes: int = 4
    gpus_per_node: int = 4
    memory_bytes: int = 256_000_000_000
    ssd_bytes: int = 0

    def __post_init__(self) -> None:
        require_at_least_one("cluster", nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        require_at_most("cluster", 1_000, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        require_at_least_one("cluster", memory_bytes=self.memory_bytes)
        require_not_negative("cluster", ssd_bytes=self.ssd_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillGpu:
    """The device that computes prompts; default: A100-40GB.

    Attributes:
        flops_per_s: Dense peak at the model's precision.
        mfu: Share of it that prefill reaches.
        memory_bytes, memory_bytes_per_s: Size and bandwidth.
        memory_share: Share of the memory that the engine may use.
        activation_bytes: Kept free for activations.
        forward_s: Fixed seconds of a forward pass.
        cache_tokens: Tokens of its prefix cache; None: what memory is left.
    """

    flops_per_s: float = 312e12
    mfu: float = 0.5
    memory_bytes: float = 40e9
    memory_bytes_per_s: float = 1.555e12
    memory_share: float = 0.9
    activation_bytes: float = 1.5e9
    forward_s: float = 0.006
    cache_tokens: int | None = None

    def __post_init__(self) -> None:
        require_positive(
            "gpu",
            flops_per_s=self.flops_per_s,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
        )
        require_within("gpu", 0.01, 1.0, mfu=self.mfu, memory_share=self.memory_share)
        require_not_negative(
            "gpu",
            activation_bytes=self.activation_bytes,
            forward_s=self.forward_s,
            cache_tokens=self.cache_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLinks:
    """How fast blocks move. Transfers that meet on a link share it max-min fair.

    Attributes:
        host_to_device_bytes_per_s: Host memory to a GPU, each direction, per GPU.
        client_bytes_per_s: What one GPU's process draws from the network at most.
        nic_bytes_per_s: Adapters of a node together, each direction.
        ssd_bytes_per_s: A node's SSD.
        rpc_s: Fixed seconds of a request to another node.
    """

    host_to_device_bytes_per_s: float = 14e9
    client_bytes_per_s: float = 20e9
    nic_bytes_per_s: float = 50e9
    ssd_bytes_per_s: float = 3e9
    rpc_s: float = 60e-6

    def __post_init__(self) -> None:
        require_within(
            "links",
            1e3,
            1e15,
            host_to_device_bytes_per_s=self.host_to_device_bytes_per_s,
            client_bytes_per_s=self.client_bytes_per_s,
            nic_bytes_per_s=self.nic_bytes_per_s,
            ssd_bytes_per_s=self.ssd_bytes_per_s,
        )
        require_not_negative("links", rpc_s=self.rpc_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledStore:
    """What ``evostore`` and ``ptstore`` are.

    Attributes:
        lookup_s: Seconds of finding out what is stored, with all software around a load.
        overlap: Share of the network's part of a load that runs beside the copy to the device.
        replica_share: Threshold of ``ptstore``: replicas beyond this share of the memory go first.
        flush: When blocks go to SSD, in every pooled mode.
    """

    lookup_s: float = 0.008
    overlap: float = 0.0
    replica_share: float = 0.5
    flush: FlushName = "on_commit"

    def __post_init__(self) -> None:
        require_not_negative("store", lookup_s=self.lookup_s)
        require_within("store", 0.0, 1.0, overlap=self.overlap)
        if not 0.0 < self.replica_share < 1.0:
            raise ScenarioError(
                f"[store] replica_share: must be > 0 and < 1, found {self.replica_share!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductStore:
    """What ``product`` is.

    Attributes:
        lookup_s: Seconds of finding out what is stored: the directory is in the process.
        overlap: Share of the network's part of a load that runs beside the copy to the device.
        eviction: Policy of host memory.
    """

    lookup_s: float = 0.0005
    overlap: float = 0.8
    eviction: str = "tree_hd"

    def __post_init__(self) -> None:
        require_not_negative("product", lookup_s=self.lookup_s)
        require_within("product", 0.0, 1.0, overlap=self.overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """How the twin runs.

    Attributes:
        seed: Seed of all named random streams.
        replications: Independent repetitions; one: intervals from batches of requests.
        confidence: Level of the intervals.
        decision_log_calls: How many calls of the store policies at most are written down.
    """

    seed: int = 1
    replications: int = 3
    confidence: float = 0.95
    decision_log_calls: int = 5_000

    def __post_init__(self) -> None:
        require_not_negative("run", seed=self.seed, decision_log_calls=self.decision_log_calls)
        require_at_most("run", 2**63 - 1, seed=self.seed)
        require_at_least_one("run", replications=self.replications)
        require_at_most("run", 1_000, replications=self.replications)
        require_within("run", 0.5, 0.999999, confidence=self.confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixScenario:
    """One experiment: what does a pooled prefix cache save, and whose?"""

    prefix: PrefixQuestion
    workload: DocumentsWorkload | GeneratedWorkload | TracedWorkload = field(
        default_factory=DocumentsWorkload
    )
    llm: Llm = field(default_factory=lambda: Llm(model="Mistral-7B"))
    cluster: ClusterNodes = field(default_factory=ClusterNodes)
    gpu: PrefillGpu = field(default_factory=PrefillGpu)
    links: ClusterLinks = field(default_factory=ClusterLinks)
    store: PooledStore = field(default_factory=PooledStore)
    product: ProductStore = field(default_factory=ProductStore)
    run: PrefixRun = field(default_factory=PrefixRun)
