"""Real engines of a tiny checkpoint behind one entrance, and what a single one answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from runtime.engine.settings import EngineSettings, PrefixSettings
from runtime.server.app import App, make_app
from runtime.server.instances import Instances
from runtime.server.settings import ServerSettings

PROMPTS = [[5 + at, 20, 31, 44, 9 + 2 * at, 60, 70 - at] for at in range(6)]
PATIENCE_S = 120.0


def settings_of(folder: Path, log: Path | None = None) -> EngineSettings:
    """An engine small enough that two of them start quickly."""
    return EngineSettings(
        model=str(folder),
        threads=2,
        memory_bytes=4 << 20,
        prefix=PrefixSettings(memory_bytes=16 << 20),
        decision_log=None if log is None else str(log),
        decision_log_calls=10_000,
    )


def single_answers(folder: Path) -> list[list[int]]:
    """Greedy answers of one engine in this process."""
    from tests.runtime.engine.core_cases import ask, one, running

    with running(folder) as core:
        return [one(core, ask(prompt, 12)).tokens for prompt in PROMPTS]


def app_of(instances: Instances) -> App:
    """The front end before them, without a tokenizer: prompts and answers are token ids."""
    return make_app(
        ServerSettings(model_names=("tiny",), metrics_open=True),
        instances,
        instances=instances.instances,
    )


async def answer(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
    body: dict[str, Any] = {
        "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    return await client.post("/v1/completions", json=body)


async def answers(client: httpx.AsyncClient) -> list[list[int]]:
    """Token ids of the answers to all prompts, asked at the same time."""
    found = await asyncio.gather(*(answer(client, prompt) for prompt in PROMPTS))
    assert [one.status_code for one in found] == [200] * len(PROMPTS), found[0].text
    return [one.json()["choices"][0]["token_ids"] for one in found]


async def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


async def kill_while_it_answers(
    client: httpx.AsyncClient, instances: Instances, kill: Callable[[], None]
) -> list[httpx.Response]:
    """Long requests to both instances; instance 0 is killed in their middle."""
    before = list(instances.routed)
    body = {"prompt": PROMPTS[0], "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    asked = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
    while [now - then for now, then in zip(instances.routed, before, strict=True)] != [2, 2]:
        await asyncio.sleep(0.001)
    kill()
    return list(await asyncio.gather(*asked))
