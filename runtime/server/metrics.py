"""``/metrics``: our names, and vLLM's for dashboards that know those; one count behind both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime.engine.frames import EngineInfo, EngineStats
from runtime.server.admission import Admission
from runtime.server.engine_client import EngineClient
from runtime.server.request_metrics import RequestMetrics

OURS = "serving_twin_"
ALIAS = "vllm:"
_LABELS = ("model_name", "engine")

# Our name, vLLM's (empty: none), what it is, how to read it off the engine's report.
_Gauge = tuple[str, str, str, Callable[[EngineStats], float]]
ENGINE_GAUGES: tuple[_Gauge, ...] = (
    (
        "num_requests_running",
        "num_requests_running",
        "Sequences with pages.",
        lambda s: s.running,
    ),
    (
        "num_requests_waiting",
        "num_requests_waiting",
        "Sequences in the engine's queue or being loaded.",
        lambda s: s.waiting + s.loading,
    ),
    (
        "kv_cache_usage_perc",
        "kv_cache_usage_perc",
        "Share of the pages that KV can get which it holds, 0 to 1.",
        lambda s: s.kv_usage,
    ),
    ("num_requests_loading", "", "Sequences whose prefix is being loaded.", lambda s: s.loading),
    ("waiting_tokens", "", "Prompt tokens in the engine's queue.", lambda s: s.waiting_tokens),
    ("mean_bits", "", "Average bits per expert weight; 0: not quantized.", lambda s: s.mean_bits),
    ("damage", "", "Expected loss of quality of the widths in use.", lambda s: s.damage),
)
ENGINE_COUNTERS: tuple[_Gauge, ...] = (
    ("num_preemptions", "num_preemptions", "Preemptions.", lambda s: s.preemptions_total),
    (
        "prefix_cache_queries",
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix store.",
        lambda s: s.prefix_queries_total,
    ),
    (
        "prefix_cache_hits",
        "prefix_cache_hits",
        "Prompt tokens found there.",
        lambda s: s.prefix_hits_total,
    ),
    ("engine_prompt_tokens", "", "Prompt tokens, per answer.", lambda s: s.prompt_tokens_total),
    ("engine_cached_tokens", "", "Of them not computed.", lambda s: s.cached_tokens_total),
    ("engine_generated_tokens", "", "Tokens generated.", lambda s: s.generated_tokens_total),
    ("engine_computed_tokens", "", "All computed ones.", lambda s: s.computed_tokens_total),
    ("engine_steps", "", "Steps.", lambda s: s.step),
    ("engine_failed_steps", "", "Steps that ended in an error.", lambda s: s.failed_steps_total),
    ("engine_refused", "", "Sequences refused.", lambda s: s.refused_total),
    ("engine_aborted", "", "Sequences aborted.", lambda s: s.aborted_total),
    ("engine_finished", "", "Sequences finished.", lambda s: s.finished_total),
    ("weight_drops", "", "Weight blocks whose width went down.", lambda s: s.weight_drops_total),
    ("weight_raises", "", "Weight blocks whose width went up.", lambda s: s.weight_raises_total),
    ("moved_bytes", "", "Bytes of weight planes copied.", lambda s: s.moved_bytes_total),
    ("decisions_logged", "", "Policy calls in the decision log.", lambda s: s.decisions_logged),
)
_HISTOGRAM_HELP = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Between tokens.",
    "request_time_per_output_token_seconds": "Mean time between an answer's tokens.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "In the engine's queue.",
    "request_prefill_time_seconds": "From the queue to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of an answer.",
    "iteration_tokens_total": "Tokens of a step.",
    "request_num_preemptions": "Preemptions of an answer.",
}


class ServerCollector(Collector):
    """Reads the counts when they are asked for.

    Args:
        model: Name that labels carry.
        engines: Instances, in the order of their numbers; empty while they are loading.
        admission: The queue before the engine.
        requests: What clients saw.
    """

    def __init__(
        self,
        model: str,
        engines: Callable[[], Sequence[EngineClient]],
        admission: Admission,
        requests: RequestMetrics,
    ) -> None:
        self._model = model
        self._engines = engines
        self._admission = admission
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """All metrics; no label holds anything of a request's content."""
        engines = self._engines()
        stats = [engine.stats for engine in engines]
        yield from self._engines_alive(engines)
        yield from self._engine_numbers(stats)
        yield from self._by_label(stats)
        yield from self._front_end()
        yield from self._histograms()
        if engines:
            yield from _infos(self._model, [engine.info for engine in engines])

    def _engines_alive(self, engines: Sequence[EngineClient]) -> Iterator[Metric]:
        alive = GaugeMetricFamily(
            OURS + "engine_alive", "1 while the engine is there, else 0.", labels=_LABELS
        )
        starts = CounterMetricFamily(
            OURS + "engine_starts", "Starts of the engine, the first among them.", labels=_LABELS
        )
        for number, engine in enumerate(engines):
            labels = [self._model, str(number)]
            alive.add_metric(labels, float(engine.is_alive))
            starts.add_metric(labels, getattr(engine, "starts", 1))
        yield from (alive, starts)

    def _engine_numbers(self, stats: Sequence[EngineStats]) -> Iterator[Metric]:
        for family, numbers in (
            (GaugeMetricFamily, ENGINE_GAUGES),
            (CounterMetricFamily, ENGINE_COUNTERS),
        ):
            for ours, alias, text, read in numbers:
                for name in _names(ours, alias):
                    metric = family(name, text, labels=_LABELS)
                    for number, report in enumerate(stats):
                        metric.add_metric([self._model, str(number)], read(report))
                    yield metric

    def _by_label(self, stats: Sequence[EngineStats]) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            OURS + "pages", "Pages of the arena, by holder.", labels=[*_LABELS, "use"]
        )
        moves = CounterMetricFamily(
            OURS + "planner_moves", "Orders of the planner, by reason.", labels=[*_LABELS, "reason"]
        )
        store = GaugeMetricFamily(
            OURS + "store", "Numbers of the prefix store, by name.", labels=[*_LABELS, "name"]
        )
        waiting = GaugeMetricFamily(
            ALIAS + "num_requests_waiting_by_reason",
            "Sequences that wait: for room, or for their prefix.",
            labels=[*_LABELS, "reason"],
        )
        external = {
            kind: CounterMetricFamily(
                f"{ALIAS}external_prefix_cache_{kind}",
                "Prompt tokens looked up in the prefix store, and found.",
                labels=_LABELS,
            )
            for kind in ("queries", "hits")
        }
        for number, report in enumerate(stats):
            labels = [self._model, str(number)]
            for use in ("kv", "weight", "free"):
                pages.add_metric([*labels, use], getattr(report, f"{use}_pages"))
            for reason, count in sorted(report.planner_moves_total.items()):
                moves.add_metric([*labels, reason], count)
            for name, value in sorted(report.store.items()):
                store.add_metric([*labels, name], value)
            waiting.add_metric([*labels, "capacity"], report.waiting)
            waiting.add_metric([*labels, "deferred"], report.loading)
            external["queries"].add_metric(labels, report.prefix_queries_total)
            external["hits"].add_metric(labels, report.prefix_hits_total)
        yield from (pages, moves, store, waiting, *external.values())

    def _front_end(self) -> Iterator[Metric]:
        requests, admission = self._requests, self._admission
        labels = [self._model, "0"]
        for ours, alias, text, value in (
            ("prompt_tokens", "prompt_tokens", "Prompt tokens answered.", requests.prompt_tokens),
            (
                "prompt_tokens_cached",
                "prompt_tokens_cached",
                "Of them found in the prefix store.",
                requests.cached_tokens,
            ),
            (
                "generation_tokens",
                "generation_tokens",
                "Tokens told to clients.",
                requests.generated_tokens,
            ),
        ):
            for name in _names(ours, alias):
                counter = CounterMetricFamily(name, text, labels=_LABELS)
                counter.add_metric(labels, value)
                yield counter
        yield from _counted(
            ("request_success", "request_success"),
            "Answers that ended, by reason.",
            "finished_reason",
            requests.finished.items(),
            labels,
        )
        yield from _counted(
            ("admission_rejections", "admission_rejections"),
            "Requests refused before they were queued, by reason.",
            "reason",
            admission.rejected.items(),
            labels,
        )
        responses = CounterMetricFamily(
            OURS + "http_requests", "Responses, by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(requests.http.items()):
            responses.add_metric([route, str(status)], count)
        yield responses
        for name, text, gauge in (
            ("queued_requests", "Answers without a first token yet.", admission.queued),
            ("queued_tokens", "Prompt tokens of those.", admission.queued_tokens),
            ("active_requests", "Requests under way.", admission.active),
        ):
            yield GaugeMetricFamily(OURS + name, text, value=gauge)

    def _histograms(self) -> Iterator[Metric]:
        for name, histogram in self._requests.histograms.items():
            for prefix in (OURS, ALIAS):
                metric = HistogramMetricFamily(prefix + name, _HISTOGRAM_HELP[name], labels=_LABELS)
                metric.add_metric([self._model, "0"], histogram.buckets(), histogram.sum)
                yield metric


def _names(ours: str, alias: str) -> list[str]:
    return [OURS + ours] + ([ALIAS + alias] if alias else [])


def _counted(
    names: tuple[str, str],
    text: str,
    label: str,
    counts: Iterable[tuple[str, int]],
    labels: list[str],
) -> Iterator[Metric]:
    found = sorted(counts)
    for name in _names(*names):
        counter = CounterMetricFamily(name, text, labels=[*_LABELS, label])
        for value, count in found:
            counter.add_metric([*labels, value], count)
        yield counter


def _infos(model: str, infos: Sequence[EngineInfo]) -> Iterator[Metric]:
    for name in _names("cache_config", "cache_config"):
        metric = InfoMetricFamily(name, "Geometry of the arena.", labels=_LABELS)
        for number, info in enumerate(infos):
            metric.add_metric(
                [model, str(number)],
                {
                    "block_size": str(info.block_tokens),
                    "page_bytes": str(info.page_bytes),
                    "num_gpu_blocks": str(info.kv_capacity_tokens // max(info.block_tokens, 1)),
                    "arena_pages": str(info.arena_pages),
                    "cache_dtype": info.dtype,
                    "enable_prefix_caching": str(info.has_prefix_store),
                },
            )
        yield metric
    lora = GaugeMetricFamily(
        ALIAS + "lora_requests_info",
        "Adapters in use: none are served.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    lora.add_metric(["0", "", ""], 0.0)
    yield lora


def make_registry(collector: ServerCollector) -> CollectorRegistry:
    """A registry of its own, so that several front ends may live in one process."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
