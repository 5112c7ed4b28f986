"""LiteLLM's providers for OpenAI-compatible servers: `python litellm_provider.py URL MODEL [KEY]`.

Needs litellm; `LITELLM_LOCAL_MODEL_COST_MAP=True` keeps it from the network. Exit code 1 if an
answer is not as it must be.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import metadata

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

MESSAGES = [{"role": "user", "content": "say hello"}]


def main(url: str, model: str, key: str = "none") -> None:
    for provider in ("hosted_vllm", "openai"):
        named = {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": key}
        check(named)
        print(f"{provider}: ok")
    print(f"ok, litellm {metadata.version('litellm')}")


def check(named: dict[str, str]) -> None:
    asked = {**named, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**asked)
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert whole.choices[0].finish_reason in ("stop", "length")

    parts = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    told = [part.usage for part in parts if getattr(part, "usage", None)]
    assert told[-1].completion_tokens == usage.completion_tokens
    assert told[-1].prompt_tokens == usage.prompt_tokens

    written = litellm.text_completion(**named, prompt="the quick brown", max_tokens=4)
    assert written.usage.completion_tokens >= 1

    async def many() -> list[str]:
        answers = await asyncio.gather(*[litellm.acompletion(**asked) for _ in range(8)])
        return [answer.choices[0].message.content for answer in answers]

    assert set(asyncio.run(many())) == {whole.choices[0].message.content}

    for change, kind in (
        ({"model": named["model"] + "-not"}, litellm.NotFoundError),
        ({"messages": []}, litellm.BadRequestError),
        ({"top_p": 7}, litellm.BadRequestError),
        (
            {"messages": [{"role": "user", "content": "x " * 20_000}]},
            litellm.ContextWindowExceededError,
        ),
    ):
        try:
            litellm.completion(**(asked | change))
        except kind as error:
            print(f"  {type(error).__name__}: {str(error)[:100]}")
        else:
            raise AssertionError(f"{change} was taken")


if __name__ == "__main__":
    main(*sys.argv[1:])
