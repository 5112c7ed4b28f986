"""Tokens to text while they come: only text that no later token can change is given out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from runtime.text.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
_MOST_HELD_TOKENS = 32


class Detokenizer:
    """Text of one growing sequence of tokens.

    All pushes and the finish together are ``tokenizer.decode`` of all tokens, however they are
    split (for the decoder families ``byte_level`` and ``byte_fallback``; others are decoded in a
    window of the last tokens, which is the same where a token's text depends on the one before it
    alone). The first bytes of a character wait for the rest. Bytes in a row of a ``byte_fallback``
    tokenizer wait for the token after them, since one wrong byte makes all of them U+FFFD; ``peek``
    shows them earlier. A token costs the same wherever in the text it comes.

    Args:
        tokenizer: Of the tokens.
        skip_special_tokens: Special tokens add nothing.
    """

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._characters = 0
        self._stream: _Stream
        match tokenizer.form.family:
            case "byte_level":
                self._stream = _ByteLevelStream(tokenizer)
            case "byte_fallback":
                self._stream = _FallbackStream(tokenizer)
            case _:
                self._stream = _WindowStream(tokenizer)

    def push(self, tokens: Sequence[int]) -> str:
        """New text that is final."""
        if self._skipped:
            tokens = [token for token in tokens if token not in self._skipped]
        text = self._stream.push(tokens)
        self._characters += len(text)
        return text

    def peek(self) -> str:
        """Whole characters held back that end the text if no more tokens come; else empty.

        A stop string may end in them: the answer can end there without one token more.
        """
        return self._stream.peek()

    def finish(self) -> str:
        """What is left; bytes of a character that stayed incomplete are U+FFFD."""
        text = self._stream.finish()
        self._characters += len(text)
        return text

    @property
    def characters(self) -> int:
        """Characters of the text begun so far and complete: where the next token's text starts."""
        return self._characters + self._stream.held_characters()


class _Stream(Protocol):
    def push(self, tokens: Sequence[int]) -> str: ...

    def peek(self) -> str: ...

    def finish(self) -> str: ...

    def held_characters(self) -> int: ...


class _ByteLevelStream:
    """Bytes through an incremental UTF-8 decoder, which replaces as ``bytes.decode`` does."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Sequence[int]) -> str:
        piece = self._piece
        return self._decoder.decode(b"".join([piece(token) for token in tokens]))  # type: ignore[misc]

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    def held_characters(self) -> int:
        return 0


class _FallbackStream:
    """Texts at once; bytes when the row of them has ended."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._piece = tokenizer.piece
        self._is_known = tokenizer.is_known
        form = tokenizer.form
        self._mark = form.drops_first_mark
        self._raw = tokenizer.token_text
        self._strip_character = form.strip_character
        self._left_to_strip = form.strip_left
        self._row = bytearray()

    def push(self, tokens: Sequence[int]) -> str:
        parts: list[str] = []
        for token in tokens:
            piece = self._piece(token)
            if isinstance(piece, int):
                self._row.append(piece)
                continue
            if not piece and not self._is_known(token):
                continue  # decoding leaves it out: a row of bytes goes on over it
            if self._row:
                parts.append(self._strip(self._end_row()))
            if self._mark:
                piece, self._mark = self._raw(token).replace(self._mark, ""), ""
            parts.append(self._strip(piece) if self._left_to_strip else str(piece))
        return "".join(parts)

    def peek(self) -> str:
        if not self._row:
            return ""
        try:
            text = self._row.decode()
        except UnicodeDecodeError:
            return ""
        return text[self._count_stripped(text) :]

    def finish(self) -> str:
        return self._strip(self._end_row()) if self._row else ""

    def held_characters(self) -> int:
        if not self._row:
            return 0
        text = codecs.utf_8_decode(bytes(self._row), "replace", False)[0]
        return len(text) - self._count_stripped(text)

    def _end_row(self) -> str:
        row, self._row = self._row, bytearray()
        try:
            return row.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(row)

    def _count_stripped(self, text: str) -> int:
        count = 0
        while count < min(self._left_to_strip, len(text)) and text[count] == self._strip_character:
            count += 1
        return count

    def _strip(self, piece: str | bytes) -> str:
        text = str(piece)
        count = self._count_stripped(text)
        self._left_to_strip = self._left_to_strip - count if count == len(text) else 0
        return text[count:]


class _WindowStream:
    """Decodes the last tokens behind one that was given out before, and takes the difference."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        parts: list[str] = []
        for token in tokens:
            if not self._tokenizer.is_known(token):
                continue
            self._held.append(token)
            text = self._new_text()
            if text.endswith(_REPLACEMENT) and len(self._held) < _MOST_HELD_TOKENS:
                continue
            parts.append(text)
            self._given, self._held = self._held, []
        return "".join(parts)

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        text = self._new_text()
        self._given, self._held = self._given + self._held, []
        return text

    def held_characters(self) -> int:
        return 0

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        before = decode(self._given, skip_special_tokens=False)
        return decode(self._given + self._held, skip_special_tokens=False)[len(before) :]
