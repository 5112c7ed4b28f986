"""Tokens as OpenAI's ``logprobs`` objects write them.

A token need not be whole characters. Chat completions give its bytes beside a string; the older
completions have a string alone. Where the bytes are no UTF-8, the string is an escape of them,
``\\xf0\\x9f`` for chat and ``bytes:\\xf0\\x9f`` for completions, as OpenAI's service answers, never
U+FFFD; so the bytes of all tokens put together are the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import TextTokenizer


def chat_token(tokenizer: TextTokenizer | None, token: int) -> tuple[str, list[int] | None]:
    """``token`` and ``bytes`` of a chat completion's logprob entry.

    Without a tokenizer the string is ``token_id:N`` and there are no bytes.
    """
    if tokenizer is None:
        return token_id_string(token), None
    raw = tokenizer.token_bytes(token)
    return _string(raw, ""), list(raw)


def completion_token(tokenizer: TextTokenizer | None, token: int) -> str:
    """An element of ``tokens`` and a key of ``top_logprobs`` of a completion."""
    if tokenizer is None:
        return token_id_string(token)
    return _string(tokenizer.token_bytes(token), "bytes:")


def token_id_string(token: int) -> str:
    """``token_id:N``, where a client asked for ids in place of strings; one per token."""
    return f"token_id:{token}"


class TextOffsets:
    """``text_offset`` of a completion: where in the answer each token's text starts.

    Characters of the text that was complete before the token, so the tokens of one character have
    the same offset, and a space taken off the beginning of the text does not count.

    Args:
        tokenizer: Of the tokens; None: every offset is ``start``, there is no text.
        start: Characters before the first token (an echoed prompt's).
        skip_special_tokens: As in the text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._start = start
        self._detokenizer = (
            None
            if tokenizer is None
            else Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        )

    def push(self, tokens: Sequence[int]) -> list[int]:
        """One offset per token."""
        if self._detokenizer is None:
            return [self._start] * len(tokens)
        offsets = []
        for token in tokens:
            offsets.append(self._start + self._detokenizer.characters)
            self._detokenizer.push((token,))
        return offsets


def _string(raw: bytes, mark: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in raw)
