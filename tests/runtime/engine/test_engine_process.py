"""The engine as a process of its own: started, asked, interrupted, killed from either side."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.engine.frames import NewSequence
from runtime.engine.private_folder import PrivateFolder
from runtime.engine.process import write_decisions
from runtime.engine.settings import EngineSettings
from runtime.server.engine_client import EngineGoneError
from runtime.server.process_engine import EngineStartError, ProcessEngine
from runtime.store.arena import arena_path
from tests.runtime.engine.core_cases import (
    STORE,
    ask,
    drive,
    generated,
    make_checkpoint,
    prompt,
    running,
)
from twin.replay import replay_log

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2_moe")


def settings(folder: Path, **changes: Any) -> EngineSettings:
    given: dict[str, Any] = {
        "model": str(folder),
        "memory_bytes": 4 << 20,
        "prefix": STORE,
        "report_interval_s": 0.02,
    }
    return EngineSettings(**(given | changes))


def run(work: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work, 4 * PATIENCE_S)

    asyncio.run(within())


async def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it does not come about"
        await asyncio.sleep(0.01)


async def answered(engine: ProcessEngine, new: NewSequence) -> list[int]:
    tokens: list[int] = []
    async for output in engine.submit(new):
        tokens += output.tokens
        assert not output.error
    return tokens


def is_gone(process_id: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_process_answers_aborts_takes_orders_and_ends_when_told(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl.gz"

    async def work() -> None:
        engine = await ProcessEngine.start(settings(folder, decision_log=str(log)))
        assert engine.is_alive
        assert engine.info.vocabulary == 320
        prompts = [prompt(length) for length in (3, 40, 20)]
        answers = await asyncio.gather(*(answered(engine, ask(p, 10)) for p in prompts))
        assert answers == [generated(folder, p, 10) for p in prompts]

        # Closing the iterator aborts, before anything was said and in the middle.
        idle = engine.submit(ask(prompt(5), 900))
        await idle.aclose()  # type: ignore[attr-defined]
        stream = engine.submit(ask(prompt(5), 900))
        heard = [await anext(stream) for _ in range(3)]
        assert [len(output.tokens) for output in heard] == [1, 1, 1]
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: engine.stats.aborted_total == 1)
        await until(lambda: engine.stats.kv_pages == 0)
        assert engine.stats.running == 0

        # So does the front end's own word, which the iterator hears.
        new = ask(prompt(5), 900)
        reasons = []
        async for output in engine.submit(new):
            reasons.append(output.finish_reason)
            if len(reasons) == 2:
                engine.abort([new.sequence_id, "unknown"])
        assert reasons[-1] == "abort"
        await until(lambda: engine.stats.aborted_total == 2)

        # What is wrong with one request is its own answer.
        refused = [output async for output in engine.submit(ask([5000], 3))]
        assert [output.finish_reason for output in refused] == ["error"]

        # Prefixes are found until they are to be forgotten.
        async def cached() -> int:
            outputs = [output async for output in engine.submit(ask(prompt(40), 2))]
            await until(lambda: engine.stats.store["saving_blocks"] == 0)
            return sum(output.cached_tokens for output in outputs)

        assert await cached() == 32
        await engine.control("reset_prefix_cache")
        assert await cached() == 0
        assert await cached() == 32

        await engine.control("write_decisions")
        written = replay_log(log)
        assert written.difference is None
        assert written.num_calls > 40
        assert await cached() == 32  # steps that compute nothing are not in the log
        assert engine.silent_s < PATIENCE_S
        process_id = engine.process_id
        await engine.close()
        assert is_gone(process_id)
        assert not engine.is_alive
        final = replay_log(log)  # written once more at the end
        assert final.difference is None
        assert final.num_calls > written.num_calls
        with pytest.raises(EngineGoneError):
            await answered(engine, ask(prompt(3)))
        with pytest.raises(EngineGoneError):
            await engine.control("write_decisions")

    run(work())


def test_an_engine_that_is_killed_fails_everybody_in_flight(folder: Path) -> None:
    async def work() -> None:
        engine = await ProcessEngine.start(settings(folder))
        streams = [engine.submit(ask(prompt(5, seed), 900)) for seed in range(5)]
        for stream in streams:
            await anext(stream)
        os.kill(engine.process_id, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineGoneError):
                async for _ in stream:
                    pass
        assert not engine.is_alive
        with pytest.raises(EngineGoneError):
            await engine.control("reset_prefix_cache")
        await engine.close()

    run(work())


def test_an_engine_answers_on_while_its_process_group_is_told_to_end(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl.gz"

    async def work() -> None:
        engine = await ProcessEngine.start(settings(folder, decision_log=str(log)))
        stream = engine.submit(ask(prompt(5), 300))
        tokens = list((await anext(stream)).tokens)
        os.kill(engine.process_id, signal.SIGTERM)  # as a signal to the group reaches it
        async for output in stream:
            tokens += output.tokens
        assert tokens == generated(folder, prompt(5), 300)
        assert engine.is_alive
        await engine.close()
        assert engine._process.returncode == 0

    run(work())
    assert replay_log(log).difference is None


def test_what_a_killed_engine_leaves_is_cleared_by_the_next_and_nothing_in_use_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of this process
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of engines

    def made() -> set[Path]:
        return set(tmp_path.glob("serving-twin-prefixes-*"))

    async def work() -> None:
        killed = await ProcessEngine.start(settings(folder))
        (left,) = made()
        os.kill(killed.process_id, signal.SIGKILL)
        await killed.close()
        assert left.is_dir()
        assert arena_path(left).exists()
        other = PrivateFolder()  # of an engine that has not yet opened its store
        living = await ProcessEngine.start(settings(folder))
        assert not left.exists()
        assert not arena_path(left).exists()
        assert len(made()) == 2
        (of_living,) = made() - {other.path}
        with running(folder, prefix=STORE):
            assert of_living.is_dir()
            assert arena_path(of_living).exists()
            assert len(made()) == 3
        assert await answered(living, ask(prompt(5), 10)) == generated(folder, prompt(5), 10)
        await living.close()
        assert made() == {other.path}
        other.close()
        assert not made()

    run(work())


def test_an_engine_whose_front_end_is_killed_ends_by_itself(folder: Path) -> None:
    """In the middle of a long answer, and it takes its temporary folder with it."""
    script = """
        import asyncio, sys, msgspec
        from runtime.engine.frames import NewSequence, Sampling
        from runtime.engine.settings import EngineSettings
        from runtime.server.process_engine import ProcessEngine

        async def main():
            settings = msgspec.json.decode(sys.argv[1], type=EngineSettings)
            engine = await ProcessEngine.start(settings)
            sampling = Sampling(max_tokens=1000, temperature=0.0, ignore_eos=True)
            new = NewSequence(sequence_id="a", prompt=(5, 6, 7), sampling=sampling)
            async for output in engine.submit(new):
                print(engine.process_id, flush=True)

        asyncio.run(main())
    """
    told = msgspec.json.encode(settings(folder)).decode()
    front = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), told], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    engine_id = int(front.stdout.readline())
    temporary = [
        link.readlink()
        for link in Path(f"/proc/{engine_id}/fd").iterdir()
        if "serving-twin-prefixes-" in str(link.readlink())
    ]
    front.kill()
    front.wait(20)
    front.stdout.close()
    end_s = time.monotonic() + PATIENCE_S
    while not is_gone(engine_id):
        assert time.monotonic() < end_s, "the engine is left behind"
        time.sleep(0.02)
    assert temporary
    for path in temporary:  # the folder and what lies in it
        assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"memory_bytes": 3},
            r"memory_bytes: --memory asks for 3 bytes, [\d,]+ are available: .* 0 tokens; give",
        ),
        (
            {"memory_bytes": 999 << 40},
            r"--memory asks for 1,098,412,116,148,224 bytes, [\d,]+ are available: ask for less",
        ),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_an_engine_that_cannot_start_says_why_in_its_own_words(
    folder: Path, changes: dict[str, Any], says: str
) -> None:
    async def work() -> None:
        with pytest.raises(EngineStartError, match=says):
            await ProcessEngine.start(settings(folder, **changes))

    run(work())


def test_an_engine_that_dies_before_it_is_ready_is_named_by_its_exit_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def work() -> None:
        with pytest.raises(EngineStartError, match="exit code 1 before it was ready"):
            await ProcessEngine.start(settings(folder))

    run(work())


def test_a_log_of_a_run_in_this_process_is_that_of_the_same_orders(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl.gz"
    with running(
        folder, prefix=STORE, memory_bytes=7 * 8192, decision_log=str(log), prefill_tokens=16
    ) as core:
        drive(core, [ask(prompt(20 + seed, seed), 30) for seed in range(6)], every=2)
        assert core.stats().preemptions_total > 0
        write_decisions(core.parts)
        told = core.stats().decisions_logged
    found = replay_log(log)
    assert (found.difference, found.num_calls, found.num_left_out) == (None, told, 0)
