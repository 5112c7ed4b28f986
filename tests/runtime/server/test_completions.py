"""What ``/v1/completions`` answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
Call = Callable[..., Any]


async def test_a_prompt_is_continued_until_the_answer_ends(call: Call) -> None:
    answer = (await call({"model": "tiny", "prompt": "abc", "max_tokens": 100})).json()
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "hello world, this is a scripted answer",
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
