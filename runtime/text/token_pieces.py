"""What each token adds to a text: the decoder of a ``tokenizer.json``, taken apart.

Two families cover the decoders of language models:

* byte-level (GPT-2, Llama 3, Qwen, OLMoE): a token is bytes, written in 256 stand-in characters
  (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2); a text is the
  UTF-8 of all bytes.
* pieces with byte fallback (SentencePiece: Llama 2, Mixtral, Gemma): a token is text with U+2581
  for a space, or ``<0x0A>`` for one byte; bytes in a row are UTF-8 together, and where they are not
  every one of them is U+FFFD.

Anything else is ``opaque``: only the tokenizer itself can decode it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

DecoderFamily = Literal["byte_level", "byte_fallback", "opaque"]

# Two hexadecimal digits; a sign before one digit is what the reference parser takes, too.
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2}|\+[0-9a-fA-F])>", re.ASCII)


@dataclass(frozen=True)
class DecoderForm:
    """How tokens become text.

    Attributes:
        family: See the module.
        replacements: (from, to) in each token's own text, in order; ``byte_fallback`` only.
        has_byte_tokens: Whether ``<0xNN>`` are bytes.
        strip_character: What ``strip_left`` takes off.
        strip_left: Most ``strip_character`` taken off the beginning of the whole text.
        drops_first_mark: Replacement mark that the first token loses wherever it stands in it;
            empty: none.
    """

    family: DecoderFamily
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_tokens: bool = False
    strip_character: str = " "
    strip_left: int = 0
    drops_first_mark: str = ""


OPAQUE = DecoderForm("opaque")


def decoder_form(decoder: dict[str, Any] | None) -> DecoderForm:
    """Of the ``decoder`` entry of a ``tokenizer.json``."""
    if decoder is None:
        return OPAQUE
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds and kinds[0] == "ByteLevel" and set(kinds[1:]) <= {"Fuse"}:
        return DecoderForm("byte_level")
    if kinds == ["Metaspace"]:
        mark = parts[0]["replacement"]
        drops = parts[0].get("prepend_scheme", "always") != "never"
        return DecoderForm("byte_fallback", ((mark, " "),), drops_first_mark=mark if drops else "")
    # Only this order is told apart into tokens: replacements see one token, the strip sees all.
    if not re.fullmatch(r"(R )*(B )?(F )?(?<=F )?(S )?", "".join(f"{k[0]} " for k in kinds)):
        return OPAQUE
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return OPAQUE
    if "Strip" in kinds and "Fuse" not in kinds:
        return OPAQUE
    replacements = []
    strip_character, strip_left = " ", 0
    for part in parts:
        if part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if not pattern:
                return OPAQUE
            replacements.append((pattern, part["content"]))
        if part["type"] == "Strip":
            if part["stop"]:
                return OPAQUE
            strip_character, strip_left = part["content"], part["start"]
    return DecoderForm(
        "byte_fallback", tuple(replacements), "ByteFallback" in kinds, strip_character, strip_left
    )


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; of one with other characters (added tokens), its UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_piece(token: str, form: DecoderForm) -> str | int:
    """A ``byte_fallback`` token's own text, or the value of its byte."""
    for old, new in form.replacements:
        token = token.replace(old, new)
    if form.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
        return int(match[1], 16)
    return token


def _stand_ins() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF = _stand_ins()
