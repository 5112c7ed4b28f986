"""What the front end counts itself: the very tokens and seconds its clients saw."""

from __future__ import annotations

from collections import Counter

from runtime.engine.frames import SequenceOutput
from runtime.server import metric_counts as counts
from runtime.server.metric_counts import Histogram


class RequestMetrics:
    """Sums since the start.

    Attributes:
        prompt_tokens, cached_tokens: Of prompts whose first answer has begun, once per prompt.
        generated_tokens: Told to clients.
        finished: Reason -> answers that ended.
        http: (route, status) -> responses.
        histograms: Name -> histogram.
    """

    def __init__(self, context_tokens: int = 1 << 20) -> None:
        token_edges = counts.one_two_five(context_tokens)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(counts.TTFT_EDGES_S),
            "inter_token_latency_seconds": Histogram(counts.TOKEN_EDGES_S),
            "request_time_per_output_token_seconds": Histogram(counts.TOKEN_EDGES_S),
            "e2e_request_latency_seconds": Histogram(counts.REQUEST_EDGES_S),
            "request_queue_time_seconds": Histogram(counts.REQUEST_EDGES_S),
            "request_prefill_time_seconds": Histogram(counts.REQUEST_EDGES_S),
            "request_decode_time_seconds": Histogram(counts.REQUEST_EDGES_S),
            "request_prompt_tokens": Histogram(token_edges),
            "request_generation_tokens": Histogram(token_edges),
            "iteration_tokens_total": Histogram(counts.ITERATION_EDGES_TOKENS),
            "request_num_preemptions": Histogram(counts.PREEMPTION_EDGES),
        }

    def iterations(self, step_tokens: tuple[int, ...]) -> None:
        """Steps of the engine."""
        histogram = self.histograms["iteration_tokens_total"]
        for tokens in step_tokens:
            histogram.observe(tokens)


class SequenceClock:
    """Times of one answer, as its client sees them.

    Args:
        metrics: Where they are counted.
        arrived_s: When the request came.
        prompt_tokens: Of its prompt.
        counts_prompt: Whether this is its prompt's first answer.
    """

    def __init__(
        self, metrics: RequestMetrics, arrived_s: float, prompt_tokens: int, *, counts_prompt: bool
    ) -> None:
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._prompt_tokens = prompt_tokens
        self._counts_prompt = counts_prompt
        self._first_s: float | None = None
        self._last_s = 0.0

    def output(self, output: SequenceOutput, new_tokens: int, now: float) -> None:
        """Something came; ``new_tokens`` of it are told to the client."""
        metrics = self._metrics
        if self._first_s is None:
            self._first_s = now
            metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrived_s)
            if self._counts_prompt:
                metrics.prompt_tokens += self._prompt_tokens
                metrics.cached_tokens += output.cached_tokens
            between = new_tokens - 1
            gap = 0.0
        else:
            between = new_tokens
            gap = (now - self._last_s) / max(new_tokens, 1)
        if between > 0:
            metrics.histograms["inter_token_latency_seconds"].observe(gap, between)
        if new_tokens:
            self._last_s = now
        metrics.generated_tokens += new_tokens

    def finished(
        self, reason: str, num_tokens: int, output: SequenceOutput | None, now: float
    ) -> None:
        """It has ended; ``output`` is the engine's last, if that is why."""
        metrics = self._metrics
        histograms = metrics.histograms
        metrics.finished[reason] += 1
        histograms["e2e_request_latency_seconds"].observe(now - self._arrived_s)
        histograms["request_prompt_tokens"].observe(self._prompt_tokens)
        histograms["request_generation_tokens"].observe(num_tokens)
        if self._first_s is not None and num_tokens > 1:
            histograms["request_time_per_output_token_seconds"].observe(
                (self._last_s - self._first_s) / (num_tokens - 1)
            )
        if output is None:
            return
        histograms["request_num_preemptions"].observe(output.preemptions)
        if output.times is not None:
            histograms["request_queue_time_seconds"].observe(output.times.queue_s)
            histograms["request_prefill_time_seconds"].observe(output.times.prefill_s)
            histograms["request_decode_time_seconds"].observe(output.times.decode_s)
