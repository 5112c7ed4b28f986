"""Two engine processes behind the HTTP front end: the same answers, a death, a return."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.server.instances_open import open_instances
from runtime.server.instances_restart import RestartedEngine
from runtime.server.instances_settings import InstanceSettings
from runtime.server.process_engine import EngineStartError, ProcessEngine
from tests.runtime.server.instances_live import (
    answers,
    app_of,
    kill_while_it_answers,
    settings_of,
    single_answers,
    until,
)
from tests.runtime.server.scripted import client_of
from twin.replay import replay_log

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def kill(one: object) -> None:
    assert isinstance(one, RestartedEngine) and isinstance(one.engine, ProcessEngine)
    os.kill(one.engine.process_id, signal.SIGKILL)


async def test_two_processes_answer_as_one_and_a_killed_one_comes_back(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "qwen2_moe")
    expected = single_answers(folder)
    log = tmp_path / "decisions.jsonl.gz"
    instances = await open_instances(
        settings_of(folder, log), InstanceSettings(count=2, routing="round_robin")
    )
    try:
        async with client_of(app_of(instances)) as client:
            assert await answers(client) == expected
            assert instances.routed == [3, 3]
            found = await kill_while_it_answers(
                client, instances, lambda: kill(instances.instances[0])
            )
            codes = sorted(one.status_code for one in found)
            assert codes == [200, 200, 503, 503]
            failed = next(one for one in found if one.status_code == 503)
            assert failed.json()["error"]["code"] == "engine_gone"
            assert await answers(client) == expected, "the other one goes on"
            await until(lambda: all(one.is_alive for one in instances.instances))
            before = instances.routed[0]
            assert await answers(client) == expected
            assert instances.routed[0] == before + 3
            await instances.control("write_decisions")
    finally:
        await instances.close()
    logs = sorted(path.name for path in tmp_path.glob("decisions*"))
    assert logs == [
        "decisions-0-start-2.jsonl.gz",
        "decisions-1.jsonl.gz",
        "decisions.jsonl.gz",
    ]  # what was killed has written nothing
    for name in logs:
        replayed = replay_log(tmp_path / name)
        assert replayed.difference is None and replayed.num_calls > 5, name


async def test_when_one_does_not_start_none_is_left(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny", "qwen2_moe")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(EngineStartError, match="safetensors"):
        await open_instances(settings_of(folder), InstanceSettings(count=2))
