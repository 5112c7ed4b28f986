"""Structured output: which tokens a JSON schema, a regular expression or a grammar lets follow.

The work is llguidance's: a lexer of regex derivatives under an Earley parser, both lazy, so what a
grammar costs shows step by step. Every step has a budget, and a grammar that goes over it
ends its own sequence with an error instead of holding up the others.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from runtime.engine.frames import Grammar
from runtime.engine.grammar_check import MAX_CHECK_CPU_S, compiles_in_time, may_be_costly

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 64 * 1024
"""Longest text of a grammar: about a second of compilation for the worst one measured."""

_MAX_ERROR_CHARACTERS = 300
_CACHED_GRAMMARS = 32

# At most so many white-space characters in a row, so a model that likes them cannot fill its
# whole answer with them; deep enough for 16 levels of four.
_JSON_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"

# Fuel: about 20 ms for the first lexer, 15 ms for each later step; states: 1 to 2 kB each.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar cannot be compiled, went over its limits, or was given a token it forbids."""


class GrammarState:
    """Where one answer stands in its grammar.

    Args:
        matcher: Of llguidance, owned by this state.
        vocabulary: Columns of the logits.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def mask(self) -> npt.NDArray[np.bool_]:
        """[vocabulary]: which tokens may come next; the end tokens where the answer may end.

        Tokens that the tokenizer does not know (padding of the vocabulary) never may.

        Raises:
            GrammarError: If the grammar went over its limits.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"grammar: {_one_line(self._matcher.get_error())}")
        allowed = np.unpackbits(packed, count=self._vocabulary, bitorder="little")
        return allowed.view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by one token.

        Raises:
            GrammarError: If the token may not come here, or the grammar went over its limits.
        """
        if not self._matcher.consume_token(token):
            reason = _one_line(self._matcher.get_error())
            raise GrammarError(f"grammar: token {token} is not allowed here: {reason}")

    @property
    def is_accepting(self) -> bool:
        """Whether the answer so far is complete, though more may be allowed to follow."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()


class GrammarCompiler:
    """Makes states from grammars, for one tokenizer.

    Compiling takes milliseconds, for the largest grammars allowed about a second, and releases the
    interpreter's lock meanwhile; safe to call from several threads. The last grammars are kept
    compiled.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``, or the path of a ``tokenizer.json``.
        vocabulary: Columns of the logits; may be larger than the tokenizer.
        eos_token_ids: Tokens by which an answer may end.

    Raises:
        GrammarError: If the tokenizer's tokens cannot be told as bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer | Path | str, vocabulary: int, eos_token_ids: Iterable[int]
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.from_file(str(tokenizer))
        self._vocabulary = vocabulary
        known = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        size = max(known, vocabulary)
        ends = sorted(token for token in set(eos_token_ids) if 0 <= token < size)
        try:
            self._tokenizer = LLTokenizer(
                _with_plain_decoder(tokenizer), n_vocab=size, eos_token=ends or None
            )
        except ValueError as error:
            raise GrammarError(
                f"no structured output with this tokenizer: {_one_line(str(error))}"
            ) from error
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> GrammarState:
        """A state at the start of an answer.

        Raises:
            GrammarError: If the text is too long, malformed, or asks for something not supported;
                one line that says which.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                return GrammarState(matcher.deep_copy(), self._vocabulary)
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(f"grammar ({grammar.kind}): {_one_line(matcher.get_error())}")
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), self._vocabulary)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form."""
    num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"grammar ({grammar.kind}): {num_bytes} bytes, allowed are {MAX_GRAMMAR_BYTES}"
        )
    if grammar.kind == "json_object":
        return _json_source({"type": "object"})
    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        source = str(LLMatcher.grammar_from_lark(grammar.text))
        # Schemas can be written inside.
        return _checked(source, grammar) if "%json" in grammar.text else source
    value = _parsed(grammar)
    if grammar.kind == "choice":
        return _choice_source(value)
    if value is True:
        return _json_source({})
    if not isinstance(value, dict):
        raise GrammarError("grammar (json_schema): wanted is a JSON object, or true for any JSON")
    source = _json_source(value)
    return _checked(source, grammar) if may_be_costly(grammar.text, value) else source


def _checked(source: str, grammar: Grammar) -> str:
    if compiles_in_time(source):
        return source
    raise GrammarError(
        f"grammar ({grammar.kind}): takes more than {MAX_CHECK_CPU_S} s to compile; "
        "use fewer patterns and lengths for one string"
    )


def _json_source(schema: dict[str, object]) -> str:
    overrides: JsonCompileOptions = {"whitespace_pattern": _JSON_WHITE_SPACE}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar (json_schema): {_one_line(str(error))}") from error


def _choice_source(value: object) -> str:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(choice, str) and choice for choice in value)
    ):
        raise GrammarError("grammar (choice): wanted is a JSON list of non-empty strings")
    choices = " | ".join(json.dumps(choice) for choice in dict.fromkeys(value))
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n"))


def _parsed(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.text)
    except RecursionError:
        raise GrammarError(f"grammar ({grammar.kind}): JSON nested too deeply") from None
    except ValueError as error:
        raise GrammarError(f"grammar ({grammar.kind}): not JSON: {error}") from error


def _with_plain_decoder(tokenizer: Tokenizer) -> str:
    """The tokenizer as JSON, with a decoder that llguidance reads: it knows no Metaspace alone."""
    fields = json.loads(tokenizer.to_str())
    decoder = fields.get("decoder") or {}
    if decoder.get("type") == "Metaspace":
        replace = {
            "type": "Replace",
            "pattern": {"String": decoder.get("replacement", "\u2581")},
            "content": " ",
        }
        steps = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]
        fields["decoder"] = {"type": "Sequence", "decoders": steps}
    # Not the tokens' business, and a length limit would cut the words llguidance encodes.
    fields["truncation"] = fields["padding"] = None
    return json.dumps(fields)


def _one_line(message: str) -> str:
    """The reason in an error message that may quote the grammar over several lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = reasons[0] if reasons else lines[0] if lines else "unknown reason"
    return reason[:_MAX_ERROR_CHARACTERS]
