"""Engines as deployments of Ray Serve: the same answers, an actor that is killed, its return."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.engine.frames import Abort, EngineInfo, EngineStats, NewSequence, Outputs, Sampling
from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.engine.wire import packed
from runtime.server.instances_open import open_instances
from runtime.server.instances_restart import RestartedEngine
from runtime.server.instances_settings import InstanceSettings
from runtime.server.process_engine import EngineStartError
from runtime.server.ray_cluster import require_ray
from runtime.server.ray_engine import RayEngine, messages_of
from runtime.server.ray_replica import EngineReplica
from tests.runtime.server.instances_live import (
    PROMPTS,
    answers,
    app_of,
    kill_while_it_answers,
    settings_of,
    single_answers,
    until,
)
from tests.runtime.server.scripted import client_of
from twin.replay import replay_log

pytestmark = pytest.mark.anyio


class Remote:
    """A method of a deployment handle without Ray."""

    def __init__(self, call: Any) -> None:
        self.remote = call


class Stream:
    """What such a method streams."""

    def __init__(self, generator: AsyncIterator[bytes]) -> None:
        self._generator = generator

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._generator

    def cancel(self) -> None:
        pass


class Handle:
    """A deployment handle whose replica is in this event loop."""

    def __init__(self, replica: EngineReplica) -> None:
        self.say = Remote(replica.say)
        self.listen = Remote(lambda: Stream(replica.listen()))

    def options(self, **_: Any) -> Handle:
        return self


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny", "qwen2_moe")


def replica_of(settings: EngineSettings) -> EngineReplica:
    import msgspec

    return EngineReplica(msgspec.msgpack.encode(settings))


def ask(name: str, max_tokens: int = 12) -> NewSequence:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return NewSequence(sequence_id=name, prompt=tuple(PROMPTS[0]), sampling=sampling)


async def test_a_replica_answers_as_an_engine_does_and_ends_when_told(tiny: Path) -> None:
    expected = single_answers(tiny)[0]
    replica = replica_of(settings_of(tiny))
    engine = await RayEngine.connect(Handle(replica))
    assert engine.info.vocabulary > 0 and engine.is_alive
    tokens = [token async for output in engine.submit(ask("a")) for token in output.tokens]
    assert tokens == expected
    await engine.control("write_decisions")
    replica.check_health()
    replica.__del__()
    await until(lambda: not engine.is_alive)
    with pytest.raises(RuntimeError, match="has ended"):
        replica.check_health()
    with pytest.raises(RuntimeError, match="has ended"):
        await replica.say(packed(Abort(("a",))))
    await engine.close()


async def test_sequences_of_a_front_end_that_is_gone_are_aborted(tiny: Path) -> None:
    replica = replica_of(settings_of(tiny))
    stream = replica.listen()
    (info,) = messages_of(await anext(stream))
    assert isinstance(info, EngineInfo)
    await replica.say(packed(ask("a", 100)) + packed(ask("b", 100)) + packed(Abort(("b",))))
    while not any(isinstance(one, Outputs) for one in messages_of(await anext(stream))):
        pass
    await stream.aclose()  # type: ignore[attr-defined]
    again = replica.listen()
    assert messages_of(await anext(again)) == [info]
    last = EngineStats(running=1)
    while last.running + last.waiting:
        reports = [one for one in messages_of(await anext(again)) if isinstance(one, EngineStats)]
        last = reports[-1] if reports else last
    assert last.aborted_total == 2 and last.finished_total == 0
    newest = replica.listen()
    await anext(newest)
    assert [piece async for piece in again] == [], "a new listener takes the old one's place"
    await newest.aclose()  # type: ignore[attr-defined]
    replica.__del__()


async def test_what_keeps_an_engine_from_starting_is_said_to_who_listens(tmp_path: Path) -> None:
    replica = replica_of(EngineSettings(model=str(tmp_path)))
    with pytest.raises(EngineStartError, match=r"config\.json"):
        await RayEngine.connect(Handle(replica))
    with pytest.raises(RuntimeError, match=r"config\.json"):
        await replica.say(b"")
    replica.check_health()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(EngineSettingsError, match=r"pip install 'serving-twin\[cluster\]'"):
        require_ray()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("ray://127.0.0.1:9", "no Ray cluster answers at ray://127.0.0.1:9"),
        ("somewhere", "must be host:port"),
        ("host:0", "must be host:port"),
    ],
)
def test_a_cluster_that_does_not_answer_is_said_at_once(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", sys)  # it is not asked
    with pytest.raises(EngineSettingsError, match=said):
        require_ray(address)


def listening_elsewhere(process_ids: list[int]) -> list[str]:
    """TCP ports of these processes that listen on more than loopback."""
    inodes = set()
    for process in process_ids:
        for link in Path(f"/proc/{process}/fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    loopback = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            is_listening = fields[3] == "0A"
            if is_listening and fields[9] in inodes and fields[1].split(":")[0] not in loopback:
                found.append(fields[1])
    return found


def descendants() -> list[int]:
    """Processes of this one, and theirs."""
    import os

    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pydantic")
async def test_two_deployments_answer_as_one_and_a_killed_one_comes_back(
    tiny: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("grpc") is None:
        pytest.skip("Ray Serve is not installed: pip install 'serving-twin[cluster]'")
    import ray
    from ray.util import list_named_actors

    ray.shutdown()  # another test of this process may have left one
    earlier = set(descendants())
    expected = single_answers(tiny)
    log = tmp_path / "decisions.jsonl.gz"
    instances = await open_instances(
        settings_of(tiny, log), InstanceSettings(count=2, place="ray", routing="round_robin")
    )

    def kill() -> None:
        actors = list_named_actors(all_namespaces=True)
        (name,) = [one for one in actors if "-0#engine" in one["name"]]
        ray.kill(ray.get_actor(**name))

    try:
        processes = [process for process in descendants() if process not in earlier]
        assert len(processes) >= 4, "GCS, raylet, replicas"
        assert listening_elsewhere(processes) == []
        async with client_of(app_of(instances)) as client:
            assert await answers(client) == expected
            assert instances.routed == [3, 3]
            found = await kill_while_it_answers(client, instances, kill)
            assert sorted(one.status_code for one in found) == [200, 200, 503, 503]
            failed = next(one for one in found if one.status_code == 503)
            assert failed.json()["error"]["code"] == "engine_gone"
            assert await answers(client) == expected, "the other one goes on"
            await until(lambda: all(one.is_alive for one in instances.instances))
            before = instances.routed[0]
            assert await answers(client) == expected
            assert instances.routed[0] == before + 3
            first = instances.instances[0]
            assert isinstance(first, RestartedEngine) and first.restarts == 1
    finally:
        await asyncio.wait_for(instances.close(), 100)
    assert not ray.is_initialized()
    for name in ("decisions-0.jsonl.gz", "decisions-1.jsonl.gz", "decisions.jsonl.gz"):
        replayed = replay_log(tmp_path / name)
        assert replayed.difference is None and replayed.num_calls > 5, name
