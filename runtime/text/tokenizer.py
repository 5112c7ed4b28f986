"""A checkpoint's tokenizer: text to token ids and back, as transformers 5 does both."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime.text.token_pieces import (
    DecoderForm,
    byte_level_bytes,
    decoder_form,
    fallback_piece,
)
from runtime.text.tokenizer_files import (
    TokenizerError,
    TokenizerFiles,
    is_of_library,
    read_tokenizer_files,
)

__all__ = ["TextTokenizer", "TokenizerError"]

_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGEST_ID = 2**32 - 1


class TextTokenizer:
    """Encodes and decodes; one object serves many threads at once, nothing of it changes.

    Attributes:
        folder: Where it came from.
        named_tokens: ``bos_token`` and the like -> its text.
        config: ``tokenizer_config.json``.
        form: How tokens become text.
    """

    def __init__(self, files: TokenizerFiles, folder: Path) -> None:
        self.folder = folder
        self.named_tokens = files.named_tokens
        self.config = files.config
        self._tokenizer = files.tokenizer
        decoder = (
            json.loads(files.tokenizer.to_str())["decoder"] if files.tokenizer.decoder else None
        )
        self.form: DecoderForm = decoder_form(decoder)
        added: dict[int, Any] = files.tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self._special_ids = frozenset(i for i, token in added.items() if token.content in special)
        # Filled as tokens are met; a lost race writes the same value again.
        self._pieces: dict[int, bytes | str | int] = {}

    @classmethod
    def open(cls, folder: Path) -> TextTokenizer | None:
        """Read the folder's tokenizer; None where it has no ``tokenizer.json``.

        Without a tokenizer only prompts of token ids can be answered, with token ids.

        Raises:
            TokenizerError: If a file is there and not usable.
        """
        files = read_tokenizer_files(folder)
        return None if files is None else cls(files, folder)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: Special tokens written out in it become those tokens.
            add_special_tokens: Put around it what the post-processor says (begin, end). Texts from
                a chat template have theirs already.

        Raises:
            TokenizerError: If the text has half a surrogate pair, which no UTF-8 can hold, or the
                tokenizer fails on it.
        """
        if match := _SURROGATE.search(text):
            raise TokenizerError(
                f"text has the lone surrogate U+{ord(match[0]):04X} at character {match.start()};"
                " only whole Unicode characters can be tokenized"
            )
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise self._failed("encode the text", error) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer lacks (a padded vocabulary) add nothing.

        Bytes that are no UTF-8 become U+FFFD. Spaces before punctuation stay
        (``clean_up_tokenization_spaces`` counts for no byte-pair tokenizer).

        Raises:
            TokenizerError: If an id is below 0 or above 2**32 - 1, or the tokenizer fails.
        """
        for token in tokens:
            _check_id(token)
        try:
            text: str = self._tokenizer.decode(
                list(tokens), skip_special_tokens=skip_special_tokens
            )
        except BaseException as error:
            raise self._failed("decode the tokens", error) from error
        return text

    def token_text(self, token: int) -> str:
        """As the vocabulary writes it (``Ġthe``, ``▁the``, ``<0x0A>``); empty: unknown."""
        _check_id(token)
        text: str | None = self._tokenizer.id_to_token(token)
        return "" if text is None else text

    def token_id(self, text: str) -> int | None:
        """Id of a token as the vocabulary writes it."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def token_bytes(self, token: int) -> bytes:
        """Bytes the token stands for, also where they are not whole characters.

        The spaces that decoding takes off the beginning of a text are still there.
        """
        piece = self.piece(token)
        if isinstance(piece, int):
            return bytes((piece,))
        return piece.encode() if isinstance(piece, str) else piece

    def piece(self, token: int) -> bytes | str | int:
        """What the token adds to a text: bytes (byte-level), text, or one byte (fallback)."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._find_piece(token)
        return piece

    def is_special(self, token: int) -> bool:
        """Whether ``decode`` can skip it."""
        return token in self._special_ids

    def is_known(self, token: int) -> bool:
        """Whether the tokenizer has it; a model's padded vocabulary has more."""
        return self._tokenizer.id_to_token(token) is not None

    def tokens_from(self, first: int) -> dict[int, str]:
        """Ids from ``first`` on -> the token as the vocabulary writes it, by id."""
        every = self._tokenizer.get_vocab(True)
        return dict(sorted((token, text) for text, token in every.items() if token >= first))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``decode`` skips by default."""
        return self._special_ids

    @property
    def bos_id(self) -> int | None:
        """Of the token that begins texts."""
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Of the token that ends texts; the model's configuration may know more of them."""
        return self._named_id("eos_token")

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens, the added ones included; the model's own may be larger (padded)."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token_bytes(self) -> int:
        """Of any token: n times so many bytes of text are hardly ever fewer than n tokens, so far
        too long prompts can be refused before they are tokenized. (A normalizer that shortens, or
        unknown characters fused into one token, make fewer.)"""
        return max(len(text.encode()) for text in self._tokenizer.get_vocab(True))

    def _failed(self, what: str, error: BaseException) -> BaseException:
        """One error type for what the library throws; its panics are no ``Exception``."""
        if not is_of_library(error):
            return error
        return TokenizerError(f"{self.folder}: the tokenizer cannot {what}: {error}")

    def _named_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.token_id(text)

    def _find_piece(self, token: int) -> bytes | str | int:
        text = self.token_text(token)
        if self.form.family == "byte_level":
            return byte_level_bytes(text)
        if self.form.family == "byte_fallback":
            return fallback_piece(text, self.form)
        return self.decode([token], skip_special_tokens=False)


def _check_id(token: int) -> None:
    if not 0 <= token <= _LARGEST_ID:
        raise TokenizerError(f"token id {token} is outside 0..{_LARGEST_ID}")
