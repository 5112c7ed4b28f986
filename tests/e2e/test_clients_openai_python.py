"""The `openai` package for Python, unmodified, against a server that runs a real model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.e2e.conftest import MAX_QUEUED, Served

PROMPT = "the quick brown fox"
UNICODE = "naïve 🤖👩‍🚀 日本語 \U0001f1e8\U0001f1ed"
HELLO: list[Any] = [{"role": "user", "content": "say hello"}]

pytestmark = pytest.mark.timeout(600)  # the first start on a machine builds kernels


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=120
    ) as made:
        yield made


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **options)


def chat(client: openai.OpenAI, messages: list[Any] | None = None, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=messages or HELLO, **options)


# --- what is there -----------------------------------------------------------------------------


def test_the_model_is_listed_and_found_by_its_name(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


# --- tokens counted and repeated ---------------------------------------------------------------


def test_usage_adds_up_and_is_what_tokenizing_gives(client, served):
    answer = complete(client, max_tokens=5, extra_body={"ignore_eos": True})
    told = httpx.post(
        f"{served.url}/tokenize",
        json={"model": "tiny", "prompt": PROMPT},
        headers={"Authorization": f"Bearer {served.key}"},
    ).json()
    assert answer.usage.prompt_tokens == told["count"]
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == told["count"] + 5
    assert answer.choices[0].finish_reason == "length"


def test_greedy_answers_and_seeded_ones_are_repeated(client):
    greedy = [complete(client, max_tokens=8, temperature=0).choices[0].text for _ in range(2)]
    assert greedy[0] == greedy[1]
    drawn = {
        seed: [
            complete(client, max_tokens=8, temperature=1, seed=seed).choices[0].text
            for _ in range(2)
        ]
        for seed in (7, 8)
    }
    assert all(first == second for first, second in drawn.values())
    assert drawn[7] != drawn[8]


def test_a_chat_without_tools_is_the_completion_of_its_template(client):
    prompt = "<|im_start|>user\nsay hello<|im_end|>\n<|im_start|>assistant\n"
    spoken = chat(client, max_completion_tokens=8, temperature=0, logprobs=True)
    written = complete(
        client, prompt, max_tokens=8, temperature=0, logprobs=0, extra_body={"seed": 1}
    )
    assert spoken.choices[0].message.role == "assistant"
    assert spoken.choices[0].message.tool_calls is None
    assert spoken.choices[0].message.content == written.choices[0].text
    assert [entry.logprob for entry in spoken.choices[0].logprobs.content] == pytest.approx(
        written.choices[0].logprobs.token_logprobs, abs=1e-4
    )


def test_n_answers_and_prompt_lists_come_in_order(client):
    many = chat(client, max_tokens=4, n=3, temperature=1, seed=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in many.choices}) > 1
    texts = ["a", "the lazy dog", [70, 71, 72]]
    alone = [complete(client, text, max_tokens=4, temperature=0) for text in texts]
    together = complete(client, texts[:2], max_tokens=4, temperature=0)
    tokens = complete(client, [texts[2], texts[2]], max_tokens=4, temperature=0)
    assert [choice.text for choice in together.choices] == [a.choices[0].text for a in alone[:2]]
    assert [choice.text for choice in tokens.choices] == [alone[2].choices[0].text] * 2
    assert together.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone[:2])


# --- streams -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_a_stream_says_what_the_whole_answer_says(client, is_chat):
    ask = chat if is_chat else complete
    whole = ask(client, max_tokens=12, temperature=0)
    events = list(
        ask(
            client,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [event.choices[0] for event in events if event.choices]
    text = "".join((c.delta.content or "") if is_chat else c.text for c in choices)
    assert text == (whole.choices[0].message.content if is_chat else whole.choices[0].text)
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": events[-1].usage.prompt_tokens_details}
    )
    assert len({event.id for event in events}) == 1


def test_usage_is_streamed_only_if_asked_for(client):
    assert all(event.choices for event in complete(client, max_tokens=3, stream=True))
    assert all(event.usage is None for event in chat(client, max_tokens=3, stream=True))


def test_the_streaming_helper_assembles_a_chat(client):
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, max_tokens=200, temperature=0, extra_body={"min_tokens": 2}
    ) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.current_completion_snapshot.choices[0].message.content == said
    assert said == chat(
        client, max_tokens=200, temperature=0, extra_body={"min_tokens": 2}
    ).choices[0].message.content  # fmt: skip


def test_several_streamed_answers_are_told_apart_by_their_index(client):
    options = {"max_tokens": 6, "n": 3, "temperature": 1, "seed": 11}
    whole = complete(client, **options)
    texts = ["", "", ""]
    for event in complete(client, **options, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_characters_of_many_tokens_are_streamed_whole(client):
    events = list(
        chat(
            client,
            max_tokens=300,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"guided_choice": [UNICODE]},
        )
    )
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == UNICODE
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert events[-1].usage.completion_tokens >= len(UNICODE.encode())


def test_a_stop_string_ends_a_stream_and_is_not_shown(client):
    whole = complete(client, max_tokens=40, extra_body={"guided_choice": ["one, two, three"]})
    assert whole.choices[0].text == "one, two, three"
    events = list(
        complete(
            client,
            max_tokens=40,
            stop=["o, th", "never"],
            stream=True,
            extra_body={"guided_choice": ["one, two, three"]},
        )
    )
    assert "".join(event.choices[0].text for event in events) == "one, tw"
    assert events[-1].choices[0].finish_reason == "stop"


# --- logprobs ----------------------------------------------------------------------------------


def test_chat_logprobs_name_each_token_and_the_likeliest(client):
    entries = (
        chat(client, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
        .choices[0]
        .logprobs.content
    )
    assert entries
    for entry in entries:
        likeliest = [top.logprob for top in entry.top_logprobs]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert entry.logprob == likeliest[0], "greedy takes the likeliest"
        assert entry.bytes is not None


def test_completion_logprobs_cover_the_text(client):
    choice = complete(client, max_tokens=6, temperature=0, logprobs=2).choices[0]
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset)
    assert all(max(top.values()) == value for top, value in zip(
        found.top_logprobs, found.token_logprobs, strict=True
    ))  # fmt: skip
    assert found.text_offset[0] == 0


def test_an_echoed_prompt_is_scored_as_transformers_scores_it(client, served):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = [1, *range(60, 92)]
    found = complete(client, tokens, max_tokens=1, temperature=0, echo=True, logprobs=1)
    told = found.choices[0].logprobs.token_logprobs
    model = transformers.AutoModelForCausalLM.from_pretrained(served.folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    assert told[0] is None
    expected = [float(logprobs[at, token]) for at, token in enumerate(tokens[1:])]
    assert told[1:-1] == pytest.approx(expected, abs=1e-4)
    assert told[-1] == pytest.approx(float(logprobs[-1].max()), abs=1e-4)


# --- answers of a given form -------------------------------------------------------------------


class Weather(pydantic.BaseModel):
    """A form that a random model, too, can fill in."""

    model_config = pydantic.ConfigDict(extra="forbid")

    sky: Literal["clear", "cloudy"]
    wind: Literal[1, 2, 3]
    is_cold: bool


def test_a_json_schema_is_parsed_into_the_clients_type(client):
    for seed in (1, 2):
        found = client.chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Weather, max_tokens=800, seed=seed
        )
        assert isinstance(found.choices[0].message.parsed, Weather)
        assert found.choices[0].finish_reason == "stop"


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"model": "nope"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"top_p": 0}, openai.BadRequestError, "top_p"),
        ({"stop": ["x"] * 5}, openai.BadRequestError, "stop"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": [5] * 5_000}, openai.BadRequestError, "prompt"),
        ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
        ({"logprobs": 99}, openai.BadRequestError, "logprobs"),
    ],
)
def test_a_bad_request_is_an_error_of_its_class_that_names_the_field(client, options, kind, param):
    with pytest.raises(kind) as caught:
        client.completions.create(**({"model": "tiny", "prompt": PROMPT} | options))
    assert caught.value.param == param
    assert caught.value.request_id


def test_a_wrong_key_a_missing_route_a_late_answer_and_a_full_queue_have_their_classes(
    client, served
):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.InternalServerError) as late:
        complete(client, max_tokens=900, extra_headers={"X-Request-Timeout": "0.001"})
    assert late.value.status_code == 504
    with pytest.raises(openai.RateLimitError) as full:
        asyncio.run(_too_many(served))
    assert int(full.value.response.headers["retry-after"]) >= 1
    patient = client.with_options(max_retries=8)  # the queue empties
    assert complete(patient, max_tokens=2, extra_body={"ignore_eos": True}).usage


async def _too_many(served: Served) -> None:
    """More answers than the queue has room for, from requests that have room each."""
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=120
    ) as client:
        await asyncio.gather(
            *[
                client.completions.create(model="tiny", prompt=["a"] * MAX_QUEUED, max_tokens=1)
                for _ in range(8)
            ]
        )


# --- many at a time, and gone before the end ----------------------------------------------------


def test_sixteen_at_a_time_say_what_they_say_alone(client, served):
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=served.key, max_retries=0, timeout=120
        ) as many:
            answers = await asyncio.gather(
                *[
                    many.completions.create(
                        model="tiny", prompt=f"prompt {number}", max_tokens=6, temperature=0
                    )
                    for number in range(16)
                ]
            )
        return [answer.choices[0].text for answer in answers]

    together = asyncio.run(all_at_once())
    for number in (0, 5, 15):
        alone = complete(client, f"prompt {number}", max_tokens=6, temperature=0)
        assert together[number] == alone.choices[0].text


def wait_for_report(client: openai.OpenAI, served: Served) -> None:
    """Until the engine has reported behind all that was asked before: it does so now and then."""
    complete(client, max_tokens=1)
    steps = served.metric("serving_twin_engine_steps_total")
    assert served.wait_for(
        lambda: (
            complete(client, max_tokens=1).choices
            and served.metric("serving_twin_engine_steps_total") != steps
        )
    )


def test_a_client_that_leaves_a_stream_frees_its_slot_and_pages(client, served):
    wait_for_report(client, served)
    before = served.metric("serving_twin_engine_aborted_total")
    with complete(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True}) as stream:
        assert next(iter(stream)).choices
    assert served.wait_for(
        lambda: (
            served.metric("serving_twin_engine_aborted_total") == before + 1
            and served.metric("vllm:num_requests_running") == 0
            and served.metric("vllm:kv_cache_usage_perc") == 0
        )
    )


def test_numbers_of_the_client_are_those_of_the_metrics(client, served):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [served.metric(name) for name in names]
    usages = [complete(client, max_tokens=number).usage for number in (1, 4, 7)]
    after = [served.metric(name) for name in names]
    assert after[0] - before[0] == sum(usage.prompt_tokens for usage in usages)
    assert after[1] - before[1] == sum(usage.completion_tokens for usage in usages)
    assert all(math.isfinite(value) for value in after)
