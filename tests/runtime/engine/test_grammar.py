"""Answers of a model that knows nothing still have the form that was asked for."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.engine.frames import Grammar, Sampling
from runtime.engine.grammar import MAX_GRAMMAR_BYTES, GrammarCompiler, GrammarError
from runtime.engine.sampler import Sampled, SequenceSampler, sample

VOCABULARY = 512
EOS, END_OF_TURN = 0, 2
TEXTS = ['{"name": "hello", "age": 12}', "the quick brown fox [1, 2, 3] true false null"] * 10


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eos>", "<bos>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_style(*, metaspace: bool) -> Tokenizer:
    """Bytes as <0x00>.., words that begin with the SentencePiece space, as Llama and Gemma."""
    pieces = ["</s>", "<s>", "<|end|>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["\u2581", *'abcdefghijklmnopqrstuvwxyz0123456789{}[]",:.-', "\u2581a", '{"']
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocabulary, merges=[("\u2581", "a"), ("{", '"')], byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["</s>", "<s>", "<|end|>"])
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    return tokenizer


TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, VOCABULARY, (EOS, END_OF_TURN))


def random_answer(
    grammar: Grammar,
    seed: int,
    compiler: GrammarCompiler = COMPILER,
    **settings: Any,
) -> tuple[list[int], Sampled]:
    """Of a model with random logits, which likes to end at the first chance."""
    settings = {"max_tokens": 3000, "seed": seed, "grammar": grammar, **settings}
    one = SequenceSampler(
        Sampling(**settings), VOCABULARY, (EOS, END_OF_TURN), (1,), compiler.compile(grammar)
    )
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while True:
        logits = 2 * torch.randn(1, VOCABULARY, generator=generator)
        logits[0, EOS] += 8
        # What closes strings, lists and numbers, or a random answer takes for ever.
        for text in '"]},':
            token = TOKENIZER.token_to_id(text)
            logits[0, token] += 4
        found = sample(logits, [one])[0]
        if found.token is not None:
            tokens.append(found.token)
        if found.finish is not None:
            return tokens, found


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b c", "\u00e9"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "choice of types": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": [1, "x"]}]},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,5}-[0-9]+$", "maxLength": 9},
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -5, "maximum": 5},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_of_random_logits_is_valid_under_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps(schema))
    for seed in range(12):
        tokens, last = random_answer(grammar, seed)
        assert last.finish == "stop", last.error
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


def test_every_json_object_answer_is_an_object() -> None:
    for seed in range(12):
        tokens, last = random_answer(Grammar("json_object"), seed)
        assert last.finish == "stop", last.error
        assert isinstance(json.loads(TOKENIZER.decode(tokens)), dict)


@pytest.mark.parametrize(
    "pattern",
    [r"[0-9]{3}-[a-c]+", r"(yes|no)( really)?!", r"a/b\\?", "(?i)abc", "^x(y|zz){0,3}$", r"\d\d"],
)
def test_every_answer_matches_the_regular_expression_whole(pattern: str) -> None:
    for seed in range(12):
        tokens, last = random_answer(Grammar("regex", pattern), seed)
        assert last.finish == "stop", last.error
        assert re.fullmatch(pattern, TOKENIZER.decode(tokens))


def test_every_answer_is_one_of_the_choices_and_all_come_up() -> None:
    choices = ["a", "ab", 'say "no" / \\', "two\nlines", "h\u00e9 \U0001f600", "{}"]
    grammar = Grammar("choice", json.dumps(choices))
    found = {TOKENIZER.decode(random_answer(grammar, seed)[0]) for seed in range(150)}
    assert found == set(choices)


def test_a_lark_grammar_is_followed() -> None:
    grammar = Grammar("lark", 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,2}/\n')
    for seed in range(12):
        text = TOKENIZER.decode(random_answer(grammar, seed)[0])
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}[0-9]{{1,2}}\){{{depth}}}", text)


@pytest.mark.parametrize("metaspace", [True, False])
def test_tokens_of_sentencepiece_style_stand_for_their_bytes(metaspace: bool) -> None:
    tokenizer = sentencepiece_style(metaspace=metaspace)
    compiler = GrammarCompiler(tokenizer, VOCABULARY, (EOS,))
    byte_a = tokenizer.token_to_id("<0x61>")
    state = compiler.compile(Grammar("choice", json.dumps([" a", "a"])))
    allowed = {tokenizer.id_to_token(int(i)) for i in np.flatnonzero(state.mask())}
    assert allowed == {"\u2581", "\u2581a", "<0x20>", "a", "<0x61>"}
    state.accept(byte_a)
    assert state.is_finished

    euro = compiler.compile(Grammar("choice", json.dumps(["\u20ac"])))
    for piece in ("<0xE2>", "<0x82>", "<0xAC>"):
        assert np.flatnonzero(euro.mask()).tolist() == [tokenizer.token_to_id(piece)]
        euro.accept(tokenizer.token_to_id(piece))
    assert euro.is_finished


def test_padding_of_the_vocabulary_and_special_tokens_are_never_allowed() -> None:
    known = TOKENIZER.get_vocab_size()
    state = COMPILER.compile(Grammar("regex", "(?s).*"))
    for _ in range(3):
        mask = state.mask()
        assert mask.shape == (VOCABULARY,)
        assert not mask[known:].any()
        assert mask[EOS]
        assert mask[END_OF_TURN]
        assert not mask[1]
        state.accept(int(np.flatnonzero(mask)[-1]))


def test_a_vocabulary_smaller_than_the_tokenizer_is_served_too() -> None:
    state = GrammarCompiler(TOKENIZER, 100, (EOS,)).compile(Grammar("regex", "[a-z]+"))
    assert state.mask().shape == (100,)


def test_an_answer_may_end_only_where_it_is_complete() -> None:
    state = COMPILER.compile(Grammar("regex", "ab?"))
    assert not state.mask()[[EOS, END_OF_TURN]].any()
    state.accept(TOKENIZER.token_to_id("a"))
    assert state.mask()[[EOS, END_OF_TURN]].all()
    assert state.is_accepting
    assert not state.is_finished
    state.accept(TOKENIZER.token_to_id("b"))
    assert state.is_finished


def test_a_token_that_may_not_come_is_refused() -> None:
    state = COMPILER.compile(Grammar("regex", "a"))
    token = TOKENIZER.token_to_id("z")
    with pytest.raises(GrammarError, match=f"token {token} is not allowed here"):
        state.accept(token)


def test_a_complete_grammar_ends_the_answer_even_with_ignore_eos() -> None:
    tokens, last = random_answer(Grammar("choice", '["ab"]'), 0, ignore_eos=True)
    assert TOKENIZER.decode(tokens) == "ab"
    assert last.finish == "stop"
    assert last.token == tokens[-1]
    tokens, last = random_answer(Grammar("regex", "a+"), 0, ignore_eos=True)
    assert set(TOKENIZER.decode(tokens)) == {"a"}
    assert last == Sampled(finish="stop", stop_token=last.stop_token)
    assert last.stop_token in {EOS, END_OF_TURN}


def test_a_dead_end_of_grammar_and_settings_ends_the_answer() -> None:
    bias = {token: -float("inf") for token in range(VOCABULARY) if token != EOS}
    tokens, last = random_answer(Grammar("choice", '["ab"]'), 0, logit_bias=bias)
    assert tokens == []
    assert last == Sampled(finish="stop")


def test_greedy_and_penalised_answers_stay_in_the_grammar() -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMAS["object"]))
    for settings in ({"temperature": 0.0}, {"repetition_penalty": 1.8, "presence_penalty": 2.0}):
        tokens, last = random_answer(grammar, 3, **settings)
        assert last.finish == "stop", last.error
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), SCHEMAS["object"])


def test_answers_of_one_grammar_do_not_share_their_place() -> None:
    grammar = Grammar("choice", '["xy", "xz"]')
    first, second = COMPILER.compile(grammar), COMPILER.compile(grammar)
    before = second.mask().copy()
    first.accept(TOKENIZER.token_to_id("x"))
    assert (second.mask() == before).all()
    assert not (first.mask() == before).all()
    assert (COMPILER.compile(grammar).mask() == before).all()


def test_white_space_between_json_tokens_is_bounded() -> None:
    state = COMPILER.compile(Grammar("json_object"))
    state.accept(TOKENIZER.token_to_id("{"))
    newline = TOKENIZER.encode("\n").ids[0]
    state.accept(TOKENIZER.encode("\n").ids[0])
    num_allowed = 1
    while state.mask()[newline]:
        state.accept(newline)
        num_allowed += 1
        assert num_allowed <= 64
    assert num_allowed == 64


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "regex.*unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("json_schema", "{"), "json_schema.*not JSON"),
        (Grammar("json_schema", "[1]"), "JSON object"),
        (Grammar("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Grammar("json_schema", '{"not": {}}'), "not"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "does not fetch"),
        (Grammar("json_schema", "[" * 60_000), "nested too deeply"),
        (Grammar("json_schema", '{"items":' * 900 + "{}" + "}" * 900), "json_schema"),
        (Grammar("lark", "start: foo"), 'unknown name: "foo"'),
        (Grammar("lark", ""), "lark"),
        (Grammar("choice", "[]"), "non-empty strings"),
        (Grammar("choice", '["a", 3]'), "non-empty strings"),
        (Grammar("choice", '["a", ""]'), "non-empty strings"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_BYTES + 1)), f"allowed are {MAX_GRAMMAR_BYTES}"),
        (Grammar("regex", "(" * 30_000 + ")" * 30_000), "regex"),
    ],
    ids=lambda value: value.text[:20] if isinstance(value, Grammar) else None,
)
def test_a_bad_grammar_is_one_clear_line(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        COMPILER.compile(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "integer", "multipleOf": 999983, "minimum": 1}'),
        Grammar(
            "json_schema",
            json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"required": [f"a{i}{j}"]} for j in range(8)]} for i in range(12)
                    ]
                }
            ),
        ),
    ],
)
def test_a_grammar_that_is_too_costly_to_compile_is_refused(grammar: Grammar) -> None:
    with pytest.raises(GrammarError):
        COMPILER.compile(grammar)


@pytest.mark.timeout(60)
def test_patterns_that_would_be_intersected_for_ever_are_refused() -> None:
    patterns = [{"type": "string", "pattern": f".*{i}.*"} for i in range(30)]
    schema = json.dumps({"allOf": patterns})
    for grammar in (Grammar("json_schema", schema), Grammar("lark", f"start: %json {schema}")):
        with pytest.raises(GrammarError, match="more than 2 s to compile"):
            COMPILER.compile(grammar)


def test_many_patterns_of_separate_strings_are_no_trouble() -> None:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-f]{{{i}}}$"} for i in range(9)},
        "required": [f"p{i}" for i in range(9)],
        "additionalProperties": False,
    }
    tokens, last = random_answer(Grammar("json_schema", json.dumps(schema)), 1)
    assert last.finish == "stop", last.error
    jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1,1000}){1,1000}){1,1000}",
        "(.*a.{2000})",
        r"(\w{1,200}\W{1,200}){1,200}",
        "(.*[ab].{30}|.*[bc].{31}|.*[cd].{32}){5}",
        "(a|aa)*b.*(x|y){300}.{0,200}[ab]",
    ],
)
def test_a_pathological_pattern_ends_and_does_not_hang(pattern: str) -> None:
    _, last = random_answer(Grammar("regex", pattern), 0, max_tokens=200)
    assert last.finish in {"stop", "length", "error"}


def test_a_grammar_that_goes_over_its_limits_ends_its_own_answer_only() -> None:
    """2,500 optional properties: more ways to go on than the parser takes into one row."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2500)}}
    state = COMPILER.compile(Grammar("json_schema", json.dumps(schema, separators=(",", ":"))))
    settings = Sampling(max_tokens=50, temperature=0.0)
    wide = SequenceSampler(settings, VOCABULARY, (EOS,), (1,), state)
    plain = SequenceSampler(settings, VOCABULARY, (EOS,), (1,))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        logits = torch.randn(2, VOCABULARY, generator=generator)
        logits[1, 5] = 100.0
        found = sample(logits, [wide, plain])
        assert found[1].token == 5
        if found[0].finish is not None:
            break
    assert found[0].finish == "error"
    assert isinstance(found[0].error, GrammarError)


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(GrammarError, match="no structured output with this tokenizer"):
        GrammarCompiler(words, 2, ())


def test_a_compiler_is_made_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZER.save(str(path))
    compiler = GrammarCompiler(path, VOCABULARY, (EOS,))
    tokens, _ = random_answer(Grammar("regex", "[0-9]{3}"), 1, compiler)
    assert re.fullmatch("[0-9]{3}", TOKENIZER.decode(tokens))


def test_states_can_be_compiled_from_many_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    grammars = [Grammar("regex", f"a{{{1 + i % 40}}}") for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(COMPILER.compile, grammars))
    token = TOKENIZER.token_to_id("a")
    assert all(state.mask()[token] for state in states)
