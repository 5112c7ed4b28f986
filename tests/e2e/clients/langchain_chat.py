"""LangChain's chat model against a server: `python langchain_chat.py URL MODEL [KEY]`.

Needs langchain-openai. Exit code 1 if an answer is not as it must be.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import langchain_core
import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """A form that a random model, too, can fill in."""

    sky: Literal["clear", "cloudy"]
    wind: Literal[1, 2, 3]


def main(url: str, model: str, key: str = "none") -> None:
    def llm(**options: object) -> ChatOpenAI:
        return ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key=key,
            temperature=0,
            max_retries=0,
            stream_usage=True,
            **({"max_tokens": 8} | options),
        )

    asked = [SystemMessage("be brief"), HumanMessage("say hello")]
    whole = llm().invoke(asked)
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    print(f"invoke: {usage}")

    parts = list(llm().stream(asked))
    assert "".join(str(part.content) for part in parts) == whole.content
    told = [part.usage_metadata for part in parts if part.usage_metadata]
    assert len(told) == 1, told
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert told[0][name] == usage[name], (told, usage)
    print(f"stream: {len(parts)} chunks, the text and usage of invoke")

    texts = [f"say {number}" for number in range(8)]
    batch = llm().batch(texts)
    assert [each.content for each in batch] == [llm().invoke(text).content for text in texts]
    print("batch: 8 answers, each as alone")

    async def both() -> list[object]:
        return await asyncio.gather(*[llm().ainvoke(text) for text in texts[:4]])

    assert [each.content for each in asyncio.run(both())] == [m.content for m in batch[:4]]
    print("ainvoke: as batch")

    scored = llm(logprobs=True, top_logprobs=2).invoke(asked)
    entries = scored.response_metadata["logprobs"]["content"]
    assert len(entries) >= 1
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    print(f"logprobs: {len(entries)} tokens")

    form = llm(max_tokens=800).with_structured_output(Weather, method="json_schema")
    found = form.invoke("the weather?")
    assert isinstance(found, Weather)
    print(f"with_structured_output: {found!r}")

    try:
        llm(max_tokens=-1).invoke(asked)
    except openai.BadRequestError as error:
        print(f"error: {type(error).__name__}, {error.param}")
    else:
        raise AssertionError("max_tokens -1 was taken")
    try:
        llm().invoke("x " * 20_000)
    except ContextOverflowError as error:
        print(f"error: {type(error).__name__}")
    else:
        raise AssertionError("a prompt of 40,000 bytes was taken")
    print(f"ok, langchain-core {langchain_core.__version__}")


if __name__ == "__main__":
    main(*sys.argv[1:])
