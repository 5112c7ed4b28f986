"""What ``/v1/completions`` answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from runtime.server.app import App
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.server.scripted import ScriptedEngine, client_of, events_of, text_of

pytestmark = pytest.mark.anyio
Call = Callable[..., Any]
ANSWER = "hello world, this is a scripted answer"


async def test_a_prompt_is_continued_until_the_answer_ends(call: Call) -> None:
    answer = (await call({"model": "tiny", "prompt": "abc", "max_tokens": 100})).json()
    assert answer["choices"] == [
        {
            "index": 0,
            "text": ANSWER,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 38,
        "total_tokens": 41,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")


async def test_every_form_of_prompt_reaches_the_engine_as_token_ids(
    build: Callable[..., App], engine: ScriptedEngine, text: TextTokenizer
) -> None:
    ids = text.encode("abc")
    async with client_of(build()) as client:
        for prompt, count in (("abc", 1), (["abc", "abc"], 2), (ids, 1), ([ids, ids, ids], 3)):
            engine.submitted.clear()
            answer = await client.post("/v1/completions", json={"prompt": prompt})
            assert answer.status_code == 200, answer.text
            assert [new.prompt for new in engine.submitted] == [tuple(ids)] * count
            assert [choice["index"] for choice in answer.json()["choices"]] == list(range(count))


async def test_max_tokens_is_sixteen_by_default_and_ends_with_length(call: Call) -> None:
    choice = (await call({"prompt": "abc"})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER[:16], "length")


async def test_fields_of_sampling_reach_the_engine(call: Call, engine: ScriptedEngine) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": 2, "7": -100},
        "seed": 12,
        "ignore_eos": True,
        "stop_token_ids": [4, 4, 5],
        "logprobs": 3,
        "cache_salt": "tenant",
        "priority": 3,
        "user": "someone",
        "no_such_field": {"ignored": True},
    }
    assert (await call(body)).status_code == 200
    new = engine.submitted[0]
    sampling = new.sampling
    assert new.salt == "tenant"
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (7, 2, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 5, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.0)
    assert (sampling.repetition_penalty, sampling.seed) == (1.25, 12)
    assert sampling.logit_bias == {5: 2.0, 7: -100.0}
    assert sampling.ignore_eos and sampling.stop_token_ids == (4, 5)
    assert sampling.logprobs == 3 and sampling.prompt_logprobs is None


async def test_null_means_the_default_for_every_field(call: Call, engine: ScriptedEngine) -> None:
    from runtime.server.bodies import CompletionBody

    body = dict.fromkeys(CompletionBody.__struct_fields__) | {"prompt": "abc"}
    assert (await call(body)).status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


async def test_each_of_n_answers_has_a_seed_of_its_own_and_the_first_has_the_request_s(
    call: Call, engine: ScriptedEngine
) -> None:
    answer = (await call({"prompt": ["a", "b"], "n": 3, "seed": 9, "temperature": 0})).json()
    seeds = [new.sampling.seed for new in engine.submitted]
    assert seeds[0] == 9 and len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:], "a prompt's answers do not depend on its place in the list"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 6 * 16


async def test_requests_without_a_seed_have_different_ones(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    async with client_of(build()) as client:
        for _ in range(3):
            await client.post("/v1/completions", json={"prompt": "a"})
    assert len({new.sampling.seed for new in engine.submitted}) == 3


async def test_echo_puts_the_prompt_before_the_answer(call: Call) -> None:
    answer = (await call({"prompt": "ab ", "echo": True, "max_tokens": 5})).json()
    assert answer["choices"][0]["text"] == "ab hello"


async def test_echo_with_logprobs_scores_prompt_and_answer(call: Call, text: TextTokenizer) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 2, "temperature": 0}
    found = (await call(body)).json()["choices"][0]["logprobs"]
    expected = [-t / 100 for t in text.encode("bc") + text.encode("he")]
    assert found["tokens"] == ["a", "b", "c", "h", "e"]
    assert found["token_logprobs"] == pytest.approx([None, *expected])
    assert found["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in found["top_logprobs"][1:]), "two and the token itself"
    assert found["text_offset"] == [0, 1, 2, 3, 4]


async def test_zero_max_tokens_with_echo_only_scores(call: Call, engine: ScriptedEngine) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await call(body)).json()
    choice = answer["choices"][0]
    assert engine.submitted[0].sampling.max_tokens == 1
    assert engine.submitted[0].sampling.prompt_logprobs == 1
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == 3


async def test_prompt_logprobs_come_in_vllm_s_form(call: Call, text: TextTokenizer) -> None:
    answer = (await call({"prompt": "ab", "prompt_logprobs": 1, "max_tokens": 1})).json()
    first, second = answer["choices"][0]["prompt_logprobs"]
    token = text.encode("b")[0]
    assert first is None
    assert second[str(token)] == {
        "logprob": pytest.approx(-token / 100),
        "rank": token + 1,
        "decoded_token": "b",
    }
    assert second["0"]["rank"] == 1


async def test_logprobs_in_a_stream_are_those_of_the_whole_answer(
    build: Callable[..., App],
) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 9, "stop": ["wo"]}
    async with client_of(build()) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/completions", json=body | {"stream": True})
    events = events_of(stream.content)
    joined: dict[str, list[Any]] = {}
    for event in events[:-1]:
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values)
    assert joined == whole["logprobs"]
    assert text_of(events) == whole["text"] == "abchello "
    assert whole["stop_reason"] == "wo"


async def test_token_ids_come_with_the_text_when_asked_for(call: Call, text: TextTokenizer) -> None:
    body = {"prompt": "abc", "max_tokens": 5, "return_token_ids": True}
    choice = (await call(body)).json()["choices"][0]
    assert choice["token_ids"] == text.encode("hello")
    assert choice["prompt_token_ids"] == text.encode("abc")


async def test_a_stop_token_ends_the_answer_and_is_named(call: Call, text: TextTokenizer) -> None:
    token = text.encode("w")[0]
    body = {"prompt": "abc", "max_tokens": 50, "stop_token_ids": [token]}
    choice = (await call(body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello ", "stop")
    assert choice["stop_reason"] == token
    kept = (await call(body | {"include_stop_str_in_output": True})).json()["choices"][0]
    assert kept["text"] == "hello w"


async def test_cached_tokens_are_in_the_usage(call: Call, engine: ScriptedEngine) -> None:
    engine.cached_tokens = 2
    usage = (await call({"prompt": ["abc", "abd"], "n": 2})).json()["usage"]
    assert usage["prompt_tokens"] == 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_request_id_is_the_client_s_own(build: Callable[..., App]) -> None:
    async with client_of(build(), **{"X-Request-Id": "mine-1.2:3_4"}) as client:
        answer = await client.post("/v1/completions", json={"prompt": "abc"})
    assert answer.headers["x-request-id"] == "mine-1.2:3_4"
    assert answer.json()["id"] == "cmpl-mine-1.2:3_4"


async def test_two_requests_may_have_one_id(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    async with client_of(build(), **{"X-Request-Id": "same"}) as client:
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": "abc"})
    assert len({new.sequence_id for new in engine.submitted}) == 2


@pytest.mark.parametrize(
    ("fields", "kind", "contents"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "null"}},
                }
            },
            "json_schema",
            '{"type": "null"}',
        ),
        ({"guided_json": '{"type":"object"}'}, "json_schema", '{"type":"object"}'),
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": "[a-c]+"}, "regex", "[a-c]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ],
)
async def test_the_form_of_an_answer_reaches_the_engine(
    call: Call, engine: ScriptedEngine, fields: dict[str, Any], kind: str, contents: str
) -> None:
    answer = await call({"prompt": "abc", **fields})
    assert answer.status_code == 200, answer.text
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None and (grammar.kind, grammar.text) == (kind, contents)


async def test_front_end_and_engine_agree_on_the_longest_grammar() -> None:
    from runtime.engine.grammar import MAX_GRAMMAR_BYTES as ENGINES
    from runtime.server.grammar_fields import MAX_GRAMMAR_BYTES as OURS

    assert OURS == ENGINES


async def test_a_grammar_that_only_the_engine_can_judge_is_still_a_bad_request(
    call: Call, engine: ScriptedEngine
) -> None:
    engine.fails_with = "grammar (regex): too large"
    answer = await call({"prompt": "abc", "guided_regex": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_grammar"


async def test_a_model_without_a_tokenizer_answers_ids_with_ids(
    engine: ScriptedEngine,
) -> None:
    from runtime.server.app import make_app
    from runtime.server.settings import ServerSettings

    async with client_of(make_app(ServerSettings(), engine)) as client:
        body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 3, "logprobs": 1}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/completions", json=body | {"stream": True})
        refused = await client.post("/v1/completions", json={"prompt": "abc"})
        chat = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
        )
    assert whole["text"] == "" and len(whole["token_ids"]) == 3
    ids = [i for e in events_of(stream.content)[:-1] for i in e["choices"][0]["token_ids"]]
    assert ids == whole["token_ids"]
    assert refused.status_code == chat.status_code == 400
    assert "tokenizer" in refused.json()["error"]["message"]


async def test_a_text_with_a_token_that_the_model_lacks_is_told_apart_from_a_wrong_id(
    build: Callable[..., App], engine: ScriptedEngine
) -> None:
    engine.info = msgspec.structs.replace(engine.info, vocabulary=256)  # <|end|> is 256
    async with client_of(build()) as client:
        for prompt, said in (
            (
                "abc<|end|>",
                "prompt: the tokenizer's token '<|end|>' (id 256) is not in the model's",
            ),
            ([97, 256], "prompt: token id 256 is not in the vocabulary"),
        ):
            answer = await client.post("/v1/completions", json={"prompt": prompt})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(said)
        assert engine.submitted == []
