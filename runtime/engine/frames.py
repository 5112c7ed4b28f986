"""What the front end and the engine tell each other: plain records, packed by msgspec.

A *sequence* is one answer to one prompt. A request with several prompts or ``n`` > 1 is several
sequences to the engine, each with a seed of its own, so what one gets depends on nothing else.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


class Grammar(msgspec.Struct, frozen=True):
    """What the answer must look like.

    Attributes:
        kind: How ``text`` is to be read.
        text: A JSON schema, a regular expression, a JSON list of choices, a Lark grammar; empty
            for ``json_object``.
    """

    kind: GrammarKind
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when to end. Ranges are checked by the front end.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        min_tokens: No end token and no ``stop_token_ids`` before so many.
        temperature: 0: the most likely token.
        top_p: In (0, 1]: the smallest set of likeliest tokens with at least this probability.
        top_k: The so many likeliest; 0: all.
        min_p: In [0, 1]: tokens of at least this share of the likeliest one's probability.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens in
            prompt or answer.
        presence_penalty, frequency_penalty: Taken off the logit of tokens in the answer, once and
            per occurrence.
        logit_bias: Token -> what is added to its logit.
        seed: Of this sequence's own draws.
        ignore_eos: The model's end tokens do not end the answer.
        stop_token_ids: Further tokens that do.
        logprobs: Most likely tokens reported with every token of the answer (0: the chosen one
            alone); None: none are.
        prompt_logprobs: The same for every token of the prompt but the first.
        grammar: Restricts the tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class NewSequence(msgspec.Struct, frozen=True, kw_only=True, tag="new"):
    """A prompt for the engine.

    Attributes:
        sequence_id: Unique among the living ones of this front end.
        prompt: Token ids, at least one.
        sampling: How to answer.
        salt: Of the tenant; sequences with different salts share no cached blocks.
        session: Conversation it belongs to, for routing and replays; empty: none.
    """

    sequence_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    session: str = ""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody waits for these sequences any more; they end without a further word."""

    sequence_ids: tuple[str, ...]


class Control(msgspec.Struct, frozen=True, kw_only=True, tag="control"):
    """An order of the operator: ``reset_prefix_cache``, ``write_decisions``, ``shutdown``."""

    command: Literal["reset_prefix_cache", "write_decisions", "shutdown"]
    number: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token and the likeliest ones beside it.

    Attributes:
        token: Its id.
        logprob: Natural logarithm of its probability (of the model's raw logits).
        rank: 1 for the likeliest.
        top: (token, logprob) of the likeliest, descending.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SequenceTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds in the engine: in the queue, until the first token, from it to the last."""

    queue_s: float
    prefill_s: float
    decode_s: float


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step brought one sequence.

    Attributes:
        sequence_id: Of ``NewSequence``.
        tokens: New tokens, in order; the end token is not among them.
        logprobs: One per token, where asked for.
        prompt_logprobs: Of the prompt's tokens from the second on, with the first output only.
        finish_reason: On the last output.
        stop_token: The token that ended it, where one did.
        error: What went wrong, for ``error``.
        cached_tokens: Tokens of the prompt that were not computed; with the first output.
        preemptions: How often it gave its pages up; on the last output.
        times: On the last output.
    """

    sequence_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    times: SequenceTimes | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag="info"):
    """What an engine serves; the first thing it says.

    Attributes:
        model: Folder of the checkpoint.
        model_type: Of its configuration.
        vocabulary: Size.
        context_tokens: Most tokens of prompt and answer together.
        kv_capacity_tokens: Tokens that one sequence can have in the arena with every weight block
            at its narrowest; longer ones can never be served.
        eos_token_ids: Tokens that end an answer.
        dtype: Of weights and activations.
        device: ``cpu`` or ``cuda:0``.
        experts: ``plain``, ``quantized`` or ``none``.
        block_tokens: Tokens of a KV block.
        page_bytes: Of the arena.
        arena_pages: Pages for weights and KV.
        has_prefix_store: Whether prefixes are kept.
    """

    model: str
    model_type: str
    vocabulary: int
    context_tokens: int
    kv_capacity_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    experts: str
    block_tokens: int
    page_bytes: int
    arena_pages: int
    has_prefix_store: bool


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges now, counters since the start (``*_total``).

    Attributes:
        step: Steps done.
        running, waiting, loading: Sequences with pages, in the queue, being loaded from the store.
        waiting_tokens: Prompt tokens in the queue.
        kv_pages, weight_pages, free_pages: Of the arena, by holder.
        kv_usage: Share of the pages that KV can get which it holds, 0..1.
        mean_bits: Average bits per expert weight; 0 where experts are not quantized.
        damage: Expected loss of quality of the widths in use.
        prompt_tokens_total, cached_tokens_total, generated_tokens_total: Counted once per
            sequence, not again after a preemption.
        computed_tokens_total: Every token computed, recomputation included.
        prefix_queries_total, prefix_hits_total: Prompt tokens looked up in the store, and found.
        preemptions_total, refused_total, aborted_total, finished_total: Sequences.
        failed_steps_total: Steps that ended in an error.
        planner_moves_total: Decision reason -> how often it ordered something.
        weight_drops_total, weight_raises_total: Blocks whose width went down, up.
        moved_bytes_total: Bytes of planes copied.
        store: Numbers of the prefix store, flat: name -> value.
        step_tokens: Tokens of each step since the last report.
        decisions_logged: Policy calls in the decision log.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    waiting_tokens: int = 0
    kv_pages: int = 0
    weight_pages: int = 0
    free_pages: int = 0
    kv_usage: float = 0.0
    mean_bits: float = 0.0
    damage: float = 0.0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    computed_tokens_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    preemptions_total: int = 0
    refused_total: int = 0
    aborted_total: int = 0
    finished_total: int = 0
    failed_steps_total: int = 0
    planner_moves_total: dict[str, int] = {}
    weight_drops_total: int = 0
    weight_raises_total: int = 0
    moved_bytes_total: int = 0
    store: dict[str, float] = {}
    step_tokens: tuple[int, ...] = ()
    decisions_logged: int = 0


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What a step brought, for all sequences of one front end."""

    outputs: tuple[SequenceOutput, ...]


class ControlDone(msgspec.Struct, frozen=True, tag="done"):
    """A control order has been carried out, or what went wrong."""

    number: int
    error: str = ""


ToEngine = NewSequence | Abort | Control
FromEngine = EngineInfo | EngineStats | Outputs | ControlDone
