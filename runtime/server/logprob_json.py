"""Logprobs in OpenAI's two forms and in vLLM's form for prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.engine.frames import TokenLogprobs
from runtime.text.logprob_text import TextOffsets, chat_token, completion_token
from runtime.text.tokenizer import TextTokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot write; vLLM's choice."""


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if math.isfinite(logprob) and logprob > FLOOR else FLOOR


def chat_logprobs(
    tokenizer: TextTokenizer | None, entries: Iterable[TokenLogprobs], top: int
) -> dict[str, Any]:
    """``logprobs`` of a chat's choice.

    Args:
        tokenizer: Of the tokens.
        entries: One per token.
        top: How many of the likeliest are shown.
    """

    def named(token: int, logprob: float) -> dict[str, Any]:
        text, raw = chat_token(tokenizer, token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    return {
        "content": [
            named(entry.token, entry.logprob)
            | {"top_logprobs": [named(*pair) for pair in entry.top[:top]]}
            for entry in entries
        ]
    }


class CompletionLogprobs:
    """``logprobs`` of a completion's choice, in pieces; offsets go on from piece to piece.

    Args:
        tokenizer: Of the tokens.
        top: How many of the likeliest are shown.
        skip_special_tokens: As in the text.
    """

    def __init__(
        self, tokenizer: TextTokenizer | None, top: int, *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skip = skip_special_tokens
        self._offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)

    def prompt(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs], characters: int
    ) -> dict[str, Any]:
        """Of an echoed prompt: its first token has none.

        Args:
            tokens: All of the prompt.
            entries: From the second token on.
            characters: Of the prompt's text.
        """
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=False).push(tokens)
        self._offsets = TextOffsets(
            self._tokenizer, start=characters, skip_special_tokens=self._skip
        )
        first = {
            "tokens": [completion_token(self._tokenizer, tokens[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": offsets[:1],
        }
        return joined(first, self._of(entries, offsets[1:]))

    def answer(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of generated tokens."""
        return self._of(entries, self._offsets.push([entry.token for entry in entries]))

    def _of(self, entries: Sequence[TokenLogprobs], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [completion_token(self._tokenizer, entry.token) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top_of(entry) for entry in entries],
            "text_offset": offsets[: len(entries)],
        }

    def _top_of(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest, and the token itself where it is none of them."""
        named = {
            completion_token(self._tokenizer, token): finite(logprob)
            for token, logprob in entry.top[: self._top]
        }
        named.setdefault(completion_token(self._tokenizer, entry.token), finite(entry.logprob))
        return named


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Lists behind lists."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    tokenizer: TextTokenizer | None, entries: Sequence[TokenLogprobs], top: int
) -> list[Any]:
    """vLLM's ``prompt_logprobs``: None for the first token, then id -> logprob, rank, text."""

    def named(logprob: float, rank: int, token: int) -> dict[str, Any]:
        text = "" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    shown: list[Any] = [None]
    for entry in entries:
        found = {
            str(token): named(logprob, rank, token)
            for rank, (token, logprob) in enumerate(entry.top[:top], 1)
        }
        found.setdefault(str(entry.token), named(entry.logprob, entry.rank, entry.token))
        shown.append(found)
    return shown
