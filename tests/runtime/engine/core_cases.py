"""Tiny engines in this process, what they are asked, and what they answered."""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.demo_model_tiny import FAMILIES, make_tiny_checkpoint
from runtime.engine.build import build_engine
from runtime.engine.core import EngineCore
from runtime.engine.frames import NewSequence, Sampling, SequenceOutput, TokenLogprobs
from runtime.engine.settings import EngineSettings, PrefixSettings
from tests.runtime.model.conftest import make_model

MEMORY_BYTES = 4 << 20
VOCABULARY = 97  # of the smallest checkpoint
MOST_STEPS = 20_000
PATIENCE_S = 30.0
NO_STORE = PrefixSettings(place="none")
STORE = PrefixSettings(memory_bytes=16 << 20)
_names = itertools.count()


def make_checkpoint(folder: Path, family: str) -> Path:
    """One of our own tiny models, or a variant that transformers writes."""
    if family in FAMILIES:
        return make_tiny_checkpoint(folder, family)
    with contextlib.redirect_stderr(io.StringIO()):
        make_model(family).save_pretrained(folder)
    return folder


def engine(folder: Path, **changes: Any) -> EngineCore:
    """An engine of the checkpoint; close its parts."""
    given: dict[str, Any] = {
        "model": str(folder),
        "memory_bytes": MEMORY_BYTES,
        "prefix": NO_STORE,
        "decision_log_calls": 50_000,
    }
    return EngineCore(build_engine(EngineSettings(**(given | changes))))


@contextlib.contextmanager
def running(folder: Path, **changes: Any) -> Any:
    """An engine that is closed behind its block, and has lost no page by then."""
    core = engine(folder, **changes)
    try:
        yield core
        core.parts.cache.check()
        core.parts.arena.check()
    finally:
        core.parts.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Tokens of every checkpoint's vocabulary, none of them special."""
    return tuple(np.random.default_rng([seed, length]).integers(4, VOCABULARY, length).tolist())


def ask(tokens: Sequence[int], max_tokens: int = 8, *, salt: str = "", **how: Any) -> NewSequence:
    """A greedy request that reports log probabilities and does not end early."""
    given: dict[str, Any] = {"temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    return NewSequence(
        sequence_id=f"s{next(_names)}",
        prompt=tuple(tokens),
        sampling=Sampling(max_tokens=max_tokens, **(given | how)),
        salt=salt,
    )


@dataclass
class Answer:
    """All that an engine has said about a sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None
    error: str = ""
    cached_tokens: int = 0
    preemptions: int = 0

    def hear(self, output: SequenceOutput) -> None:
        assert self.finish is None, "an output behind the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish, self.error = output.finish_reason, output.error
        self.cached_tokens += output.cached_tokens
        self.preemptions += output.preemptions

    @property
    def said(self) -> tuple[Any, ...]:
        """What must not depend on anything but the request, to the last bit."""
        return self.tokens, self.logprobs, self.prompt_logprobs, self.finish, self.error


def drive(
    core: EngineCore,
    asks: Iterable[NewSequence],
    *,
    every: int = 0,
    most_steps: int = MOST_STEPS,
    at_step: Callable[[int], None] = lambda step: None,
) -> list[Answer]:
    """Step until all are answered; one arrives every so many steps, all at once for 0."""
    asks = list(asks)
    coming = list(asks)
    answers = {new.sequence_id: Answer() for new in asks}
    end_s = time.monotonic() + PATIENCE_S
    for step in range(most_steps):
        while coming and (not every or step % every == 0):
            core.add(coming.pop(0))
            if every:
                break
        at_step(step)
        for output in core.step():
            if output.sequence_id in answers:
                answers[output.sequence_id].hear(output)
        if not coming and not core.has_work:
            return list(answers.values())
        if core.is_starved and core.has_work:
            assert time.monotonic() < end_s, "nothing gets on"
            time.sleep(0.0005)
    raise AssertionError(f"not done after {most_steps} steps")


def one(core: EngineCore, new: NewSequence, **how: Any) -> Answer:
    """The answer of an engine that has nothing else to do."""
    (answer,) = drive(core, [new], **how)
    return answer


def settle(core: EngineCore) -> None:
    """Idle until everything on its way has arrived: saves, loads, widths."""
    prefix, mover = core.parts.prefix, core.parts.mover
    end_s = time.monotonic() + PATIENCE_S
    while True:
        if prefix is not None:
            prefix.drain(PATIENCE_S)
        core.idle()
        if not (prefix and prefix.saving_blocks) and (mover is None or mover.at_rest):
            return
        assert time.monotonic() < end_s, "the engine does not come to rest"
        time.sleep(0.001)


@cache
def _oracle(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


def generated(folder: Path, tokens: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' greedy ``generate`` answers, end tokens ignored."""
    with torch.no_grad():
        out = _oracle(folder).generate(
            torch.tensor([tokens]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(out[0, len(tokens) :].tolist())


def prompt_scores(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """[n - 1] log probabilities of the tokens behind the first, by transformers."""
    with torch.no_grad():
        logits = _oracle(folder)(torch.tensor([tokens])).logits[0, :-1]
    following = torch.tensor(tokens[1:])[:, None]
    return torch.log_softmax(logits.double(), -1).gather(1, following)[:, 0].numpy()
