"""Several engines behind one entrance: who gets what, who dies, what is known of prefixes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.frames import EngineInfo, EngineStats, NewSequence, Sampling, SequenceOutput
from runtime.engine.settings import EngineSettings, EngineSettingsError, PrefixSettings
from runtime.server.app import App, make_app
from runtime.server.engine_client import EngineClient, EngineGoneError
from runtime.server.framed_engine import FramedEngine
from runtime.server.instances import Instances, session_number
from runtime.server.instances_costs import PrefillSpeed, routing_costs
from runtime.server.instances_open import make_routing
from runtime.server.instances_prefixes import InstancePrefixes
from runtime.server.instances_restart import Backoff, RestartedEngine
from runtime.server.instances_settings import (
    InstanceSettings,
    decision_file_of,
    instance_settings,
    settings_of_instance,
)
from runtime.server.instances_sums import InstancesDifferError, stats_of_all
from runtime.server.settings import ServerSettings
from tests.runtime.server.scripted import ScriptedEngine, client_of
from twin.replay import replay_log

pytestmark = pytest.mark.anyio
QUICK = Backoff(first_s=0.01, most_s=0.04, well_after_s=60.0, watch_s=0.002)


class Scripted(ScriptedEngine):
    """A scripted engine that says which instance it is by its tokens."""

    def __init__(self, number: int) -> None:
        super().__init__(lambda _: [number] * 4)
        self.starts = 1
        self.number = number


def new(name: str, prompt: Any = (1,), **how: Any) -> NewSequence:
    return NewSequence(
        sequence_id=name, prompt=tuple(prompt), sampling=Sampling(max_tokens=4), **how
    )


def behind_one(
    engines: list[Any], rule: Any = "round_robin", file: Path | None = None, **prefix: Any
) -> Instances:
    settings = EngineSettings(
        model="scripted",
        prefix=PrefixSettings(**prefix),
        decision_log=None if file is None else str(file),
    )
    chosen = InstanceSettings(count=len(engines), routing=rule)
    return Instances(engines, make_routing(engines[0].info, settings, chosen))


async def all_of(outputs: AsyncIterator[SequenceOutput]) -> list[int]:
    return [token async for output in outputs for token in output.tokens]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.002)


async def test_in_turn_every_instance_gets_its_sequences() -> None:
    engines = [Scripted(number) for number in range(3)]
    instances = behind_one(engines)
    found = [await all_of(instances.submit(new(f"s{at}"))) for at in range(6)]
    assert found == [[at % 3] * 4 for at in range(6)]
    assert instances.routed == [2, 2, 2]


async def test_a_shared_prefix_brings_requests_to_the_same_instance() -> None:
    engines = [Scripted(number) for number in range(4)]
    instances = behind_one(engines, "prefix_aware")
    documents = [[place] * 160 for place in range(8)]
    first = {}
    for at, document in enumerate(documents):
        first[at] = await all_of(instances.submit(new(f"a{at}", [*document, 7])))
    assert len({tuple(tokens) for tokens in first.values()}) > 1
    for turn in range(3):
        for at, document in enumerate(documents):
            asked = new(f"b{turn}{at}", [*document, *range(20 + turn)])
            assert await all_of(instances.submit(asked)) == first[at]
    others = [
        await all_of(instances.submit(new(f"c{at}", [*documents[0], 7], salt=f"tenant {at}")))
        for at in range(12)
    ]
    assert len({tuple(tokens) for tokens in others}) > 1, "tenants share no blocks"


async def test_what_an_answer_added_counts_as_prefix_of_the_next_turn() -> None:
    prefixes = behind_one([Scripted(0), Scripted(1)], "prefix_aware")
    engine = prefixes.instances[0]
    assert isinstance(engine, Scripted)
    prompt = [5] * 30
    answer = await all_of(prefixes.submit(new("a", prompt)))
    routing = prefixes._routing
    chain = routing.prefixes.keys_of([*prompt, *answer, 9], "")
    assert len(chain) == 2
    assert [routing.prefixes.leading(at, chain.leading(2)) for at in range(2)].count(2) == 1


async def test_waiting_prompts_count_until_their_first_token() -> None:
    engines = [Scripted(number) for number in range(2)]
    instances = behind_one(engines, "prefix_aware")
    for engine in engines:
        engine.gate.clear()
    asked = [
        asyncio.create_task(all_of(instances.submit(new(f"s{at}", [at] * 200)))) for at in range(8)
    ]
    await until(lambda: sum(len(engine.live) for engine in engines) == 8)
    assert instances.routed == [4, 4], "equal prompts are shared out equally"
    policy = instances._routing.policy.policy
    assert policy._backlog_s[0] == pytest.approx(policy._backlog_s[1]) and policy._backlog_s[0] > 0
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*asked)
    assert policy._backlog_s == pytest.approx([0.0, 0.0])


async def test_a_session_stays_and_moves_when_its_instance_is_gone() -> None:
    engines = [Scripted(number) for number in range(3)]
    instances = behind_one(engines, "sticky")
    first = (await all_of(instances.submit(new("a", session="chat"))))[0]
    for at in range(5):
        found = await all_of(instances.submit(new(f"b{at}", session="chat")))
        assert found == [first] * 4
    engines[first].is_alive = False
    second = (await all_of(instances.submit(new("c", session="chat"))))[0]
    assert second != first
    engines[first].is_alive = True
    assert await all_of(instances.submit(new("d", session="chat"))) == [second] * 4
    assert session_number("") == -1 and session_number("chat") >= 0


async def test_sequences_of_a_dead_instance_fail_and_the_others_go_on() -> None:
    engines = [Scripted(0), Scripted(1)]
    instances = behind_one(engines)
    engines[0].dies_after = 2
    dying = instances.submit(new("a"))
    assert [(await anext(dying)).tokens for _ in range(2)] == [(0,), (0,)]
    living = instances.submit(new("b"))
    assert (await anext(living)).tokens == (1,)
    with pytest.raises(EngineGoneError):
        await anext(dying)
    assert await all_of(living) == [1] * 3
    assert instances.is_alive
    assert [await all_of(instances.submit(new(f"c{at}"))) for at in range(3)] == [[1] * 4] * 3
    engines[1].is_alive = False
    assert not instances.is_alive
    with pytest.raises(EngineGoneError, match="all instances"):
        await anext(instances.submit(new("d")))


async def test_a_silent_instance_gets_nothing_new_while_others_speak() -> None:
    engines = [Scripted(0), Scripted(1)]
    instances = behind_one(engines)
    engines[0].silent_s = 60.0
    assert [(await all_of(instances.submit(new(f"a{at}"))))[0] for at in range(4)] == [1] * 4
    assert instances.silent_s == 0.0
    engines[1].silent_s = 50.0
    assert {(await all_of(instances.submit(new(f"b{at}"))))[0] for at in range(4)} == {0, 1}
    assert instances.silent_s == 50.0


async def test_an_abort_goes_to_the_instance_that_has_the_sequence() -> None:
    engines = [Scripted(0), Scripted(1)]
    instances = behind_one(engines)
    outputs = [instances.submit(new(f"s{at}")) for at in range(2)]
    for each in outputs:
        await anext(each)
    instances.abort(["s1", "unknown"])
    assert [engine.aborted for engine in engines] == [[], ["s1"]]
    for each in outputs:
        await each.aclose()  # type: ignore[attr-defined]
    assert not engines[0].live and not engines[1].live


async def test_orders_go_to_all_that_live_and_failures_are_named() -> None:
    engines = [Scripted(0), Scripted(1), Scripted(2)]
    instances = behind_one(engines, "prefix_aware")
    await all_of(instances.submit(new("a", [1] * 64)))
    prefixes = instances._routing.prefixes
    assert sum(prefixes.num_blocks(at) for at in range(3)) == 4
    engines[2].is_alive = False
    await instances.control("reset_prefix_cache")
    assert [engine.controls for engine in engines] == [["reset_prefix_cache"]] * 2 + [[]]
    assert sum(prefixes.num_blocks(at) for at in range(3)) == 0
    engines[1].fails_with = "disk full"
    with pytest.raises(RuntimeError, match="instance 1: disk full"):
        await instances.control("write_decisions")
    engines[0].is_alive = engines[1].is_alive = False
    with pytest.raises(EngineGoneError):
        await instances.control("write_decisions")


@pytest.mark.parametrize("rule", ["random", "round_robin", "sticky", "prefix_aware"])
async def test_the_routers_decisions_replay(rule: str, tmp_path: Path) -> None:
    engines = [Scripted(0), Scripted(1), Scripted(2)]
    file = tmp_path / "decisions.jsonl.gz"
    instances = behind_one(engines, rule, file)
    for at in range(30):
        engines[1].is_alive = not 10 <= at < 20
        asked = new(f"s{at}", [at % 4] * (20 + at), session=f"chat {at % 5}")
        await all_of(instances.submit(asked))
    await instances.close()
    found = replay_log(file)
    assert found.difference is None
    assert found.num_calls >= 90, "a choice, work given, work done"
    assert all(engine.is_closed for engine in engines)


async def test_an_engine_that_ended_is_started_again_and_its_blocks_are_forgotten() -> None:
    made: list[Scripted] = []
    refusals = [2]

    async def start(starts: int) -> EngineClient:
        if made and refusals[0]:
            refusals[0] -= 1
            raise OSError("not yet")
        made.append(Scripted(len(made)))
        assert starts == len(made) - 1
        return made[-1]

    first = RestartedEngine(0, await start(0), start, QUICK)
    other = Scripted(9)
    instances = behind_one([first, other], "prefix_aware")
    prefixes = instances._routing.prefixes
    for at in range(8):
        await all_of(instances.submit(new(f"s{at}", [at] * 64)))
    blocks = [prefixes.num_blocks(at) for at in range(2)]
    assert min(blocks) > 0
    made[0].is_alive = False
    assert first.stats == EngineStats() and not first.is_alive and instances.is_alive
    with pytest.raises(EngineGoneError):
        await first.control("write_decisions")
    await until(lambda: len(made) == 2)
    await until(lambda: first.is_alive)
    assert made[0].is_closed and first.starts == 2 and first.restarts == 1
    other.is_alive = False
    assert await all_of(instances.submit(new("again"))) == [1] * 4
    assert [prefixes.num_blocks(at) for at in range(2)] == [0, blocks[1]]
    await instances.close()
    assert made[1].is_closed


async def test_waits_between_starts_grow_to_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds != QUICK.watch_s:
            waits.append(seconds)
        await sleep(0)

    async def refuse(_: int) -> EngineClient:
        raise OSError("never")

    engine = Scripted(0)
    engine.is_alive = False
    monkeypatch.setattr("runtime.server.instances_restart.asyncio.sleep", note)
    restarted = RestartedEngine(0, engine, refuse, QUICK)
    async with asyncio.timeout(10):
        while len(waits) < 5:
            await sleep(0)
    await restarted.close()
    assert waits[:5] == [0.01, 0.02, 0.04, 0.04, 0.04]


def app_of(instances: Instances) -> App:
    return make_app(
        ServerSettings(model_names=("tiny",), metrics_open=True),
        instances,
        instances=instances.instances,
    )


async def test_health_says_how_many_are_there_and_metrics_tell_them_apart() -> None:
    engines = [Scripted(0), Scripted(1)]
    engines[0].stats = EngineStats(running=3)
    engines[1].stats = EngineStats(running=5)
    async with client_of(app_of(behind_one(engines))) as client:
        assert (await client.get("/ready")).json() == {
            "status": "ready",
            "instances": {"alive": 2, "configured": 2},
        }
        metrics = (await client.get("/metrics")).text
        for number, running in ((0, 3.0), (1, 5.0)):
            labels = f'{{engine="{number}",model_name="tiny"}}'
            assert f"vllm:num_requests_running{labels} {running}" in metrics
            assert f"serving_twin_engine_alive{labels} 1.0" in metrics
            assert f"serving_twin_engine_starts_total{labels} 1.0" in metrics
        engines[1].is_alive = False
        answer = await client.get("/health")
        assert answer.status_code == 200
        assert answer.json()["instances"] == {"alive": 1, "configured": 2}
        assert 'alive{engine="1",model_name="tiny"} 0.0' in (await client.get("/metrics")).text
        engines[0].is_alive = False
        for path in ("/health", "/ready"):
            answer = await client.get(path)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_gone"


async def test_the_cache_key_or_user_of_a_request_is_its_session() -> None:
    engine = Scripted(0)
    async with client_of(app_of(behind_one([engine]))) as client:
        for body in ({"user": "u"}, {"user": "u", "prompt_cache_key": "k"}, {}):
            answer = await client.post("/v1/completions", json={"prompt": [1], **body})
            assert answer.status_code == 200, answer.text
    assert [one.session for one in engine.submitted] == ["u", "k", ""]


def info(**changes: Any) -> EngineInfo:
    return msgspec.structs.replace(Scripted(0).info, **changes)


async def test_what_holds_for_all_is_the_smallest() -> None:
    engines = [Scripted(0), Scripted(1)]
    engines[1].info = info(context_tokens=100, kv_capacity_tokens=50)
    found = behind_one(engines).info
    assert (found.context_tokens, found.kv_capacity_tokens) == (100, 50)
    engines[1].info = info(vocabulary=7)
    with pytest.raises(InstancesDifferError, match="instance 1: vocabulary is 7"):
        behind_one(engines)


async def test_numbers_of_several_are_sums_and_averages_by_pages() -> None:
    found = stats_of_all(
        [
            EngineStats(
                running=1, kv_pages=10, free_pages=30, weight_pages=100, mean_bits=8.0,
                planner_moves_total={"a": 1}, store={"hits": 2.0}, damage=0.5,
            ),
            EngineStats(
                running=2, kv_pages=30, free_pages=10, weight_pages=300, mean_bits=4.0,
                planner_moves_total={"a": 2, "b": 1}, store={"hits": 1.0}, step_tokens=(5,),
            ),
        ]
    )  # fmt: skip
    assert (found.running, found.kv_usage, found.mean_bits, found.damage) == (3, 0.5, 5.0, 0.5)
    assert found.planner_moves_total == {"a": 3, "b": 1} and found.store == {"hits": 3.0}
    assert found.step_tokens == () and stats_of_all([]) == EngineStats()


async def test_the_index_keeps_what_was_touched_last_and_roots_longest() -> None:
    prefixes = InstancePrefixes(info(), 2, most_blocks=6)
    chains = [prefixes.keys_of([at] * 64, "") for at in range(3)]
    for chain in chains[:2]:
        prefixes.given(0, chain.leading(4))
    assert prefixes.num_blocks(0) == 6
    assert [prefixes.leading(0, chain.leading(4)) for chain in chains] == [2, 4, 0]
    assert prefixes.leading(1, chains[0].leading(4)) == 0


async def test_a_shared_store_is_there_for_all_and_the_last_token_is_never_cached() -> None:
    for is_near in (True, False):
        prefixes = InstancePrefixes(info(), 2, is_shared=True, is_near=is_near)
        chain = prefixes.keys_of([1] * 64, "")
        prefixes.given(0, chain.leading(4))
        first, second = prefixes.states(chain, 64)
        assert first == (0, 3, 3) and second == (0, 3 if is_near else 0, 3)
        assert prefixes.states(chain, 65)[0].pooled_blocks == 4


async def test_speed_is_measured_and_told_only_when_it_has_changed() -> None:
    prefill = routing_costs(info()).prefill
    speed = PrefillSpeed(prefill)
    told = [speed.answer(1000, 0, 3 * prefill.seconds(1000)) for _ in range(50)]
    news = [factor for factor in told if factor is not None]
    assert len(news) == 1 and news[0] == pytest.approx(3.0)
    later = [speed.answer(1000, 500, 9 * prefill.seconds(500, 500)) for _ in range(400)]
    factors = [factor for factor in later if factor is not None]
    assert factors == sorted(factors) and 9 / 1.3 < factors[-1] <= 9.0
    assert speed.answer(10, 10, 1.0) is None


async def test_costs_are_those_of_the_model(tmp_path: Path) -> None:
    from runtime.demo_model_tiny import make_tiny_checkpoint

    folder = make_tiny_checkpoint(tmp_path / "tiny", "mixtral")
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    costs = routing_costs(info(model=str(folder)))
    assert costs.prefill.layers == config["num_hidden_layers"]
    assert costs.prefill.heads == config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * 4 * config["num_key_value_heads"] * head_dim * config["num_hidden_layers"]
    assert costs.block_bytes == 16 * token_bytes
    assert math.isfinite(costs.prefill.seconds(100))


async def test_every_engine_has_its_threads_its_folder_and_its_log(tmp_path: Path) -> None:
    both = EngineSettings(
        model="m",
        threads=5,
        prefix=PrefixSettings(place=str(tmp_path / "store")),
        decision_log=str(tmp_path / "d.jsonl.gz"),
    )
    two = InstanceSettings(count=2)
    first, again = (settings_of_instance(both, 1, two, starts=starts) for starts in (0, 1))
    assert first.threads == 2
    assert first.prefix.place == str(tmp_path / "store" / "instance-1")
    assert first.decision_log == str(tmp_path / "d-1.jsonl.gz")
    assert again.decision_log == str(tmp_path / "d-1-start-2.jsonl.gz")
    socket = msgspec.structs.replace(both, prefix=PrefixSettings(place="/run/store.sock"))
    assert settings_of_instance(socket, 1, two).prefix.place == "/run/store.sock"
    gpu = msgspec.structs.replace(both, device="cuda:4")
    assert settings_of_instance(gpu, 1, two).device == "cuda:5"
    of_cluster = InstanceSettings(count=2, place="ray", ray_address="head:6379")
    replica = settings_of_instance(gpu, 1, of_cluster)
    assert (replica.device, replica.threads) == ("cuda:0", 5)
    assert decision_file_of(Path("log"), 3) == Path("log-3")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, "process", None, ""), "--instances: must be 1..64, found 0"),
        ((2, "threads", None, ""), "--engine: must be process, ray, found 'threads'"),
        ((2, "process", "nearest", ""), "--routing: must be random, round_robin"),
        ((1, "process", "random", ""), "--routing: says nothing with one instance"),
        ((2, "process", None, "host:1"), "--ray-address: only with --engine ray"),
    ],
)
async def test_options_that_say_nothing_or_nonsense_are_refused(given: Any, said: str) -> None:
    with pytest.raises(EngineSettingsError, match=said):
        instance_settings(*given)
    assert instance_settings(1, "process", None, "").is_plain
    assert not instance_settings(1, "ray", None, "").is_plain


async def test_each_report_of_steps_is_told_once() -> None:
    engine = FramedEngine(info())
    engine._hear(EngineStats(step_tokens=(1, 2)))
    engine._hear(EngineStats(step_tokens=(3,)))
    assert engine.stats.step_tokens == (3,)


async def test_a_salt_that_is_no_text_is_left_to_the_engine() -> None:
    instances = behind_one([Scripted(0), Scripted(1)], "prefix_aware")
    assert len(await all_of(instances.submit(new("a", [1] * 40, salt="\ud800")))) == 4
