"""A served prefix store is killed while the engine runs: slower meanwhile, no wrong token."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.engine.core import EngineCore
from runtime.engine.settings import PrefixSettings
from tests.runtime.engine.core_cases import (
    Answer,
    ask,
    drive,
    make_checkpoint,
    one,
    prompt,
    running,
    settle,
)
from tests.runtime.store.conftest import ServerProcess

PATIENCE_S = 60.0
LENGTHS = (40, 70, 100, 33)
PROMPTS = [prompt(length) for length in LENGTHS]
HITS = [(length - 1) // 16 * 16 for length in LENGTHS]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # its socket needs a short name
    one_server = ServerProcess(folder / "s", "--dram", "16MiB", "--block-bytes", "8192")
    one_server.start().close()
    yield one_server
    one_server.kill(signal.SIGTERM)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_killed_store_costs_recomputation_and_serves_again_when_it_is_back(
    server: ServerProcess, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen2_moe")
    with running(folder) as core:
        expected = [one(core, ask(tokens, 12)).said for tokens in PROMPTS]

    def serve(core: EngineCore, kill_at: int | None = None) -> list[Answer]:
        def kill(step: int) -> None:
            if step == kill_at:
                server.kill()

        answers = drive(core, [ask(tokens, 12) for tokens in PROMPTS], every=2, at_step=kill)
        assert [answer.said for answer in answers] == expected
        settle(core)
        assert core.parts.arena.use().kv_pages == 0
        return answers

    with running(folder, prefix=PrefixSettings(place=str(server.socket))) as core:
        assert [answer.cached_tokens for answer in serve(core)] == [0] * len(PROMPTS)
        assert [answer.cached_tokens for answer in serve(core)] == HITS
        first, *_, last = serve(core, kill_at=3)  # with loads and saves under way
        assert first.cached_tokens in (0, HITS[0])
        assert last.cached_tokens == 0
        for _ in range(3):
            assert [answer.cached_tokens for answer in serve(core)] == [0] * len(PROMPTS)
        assert core.stats().store["store_failures"] > 0

        server.start().close()
        end_s = time.monotonic() + PATIENCE_S
        while [answer.cached_tokens for answer in serve(core)] != HITS:
            assert time.monotonic() < end_s, "the store is back and not asked"
            time.sleep(0.1)
        assert core.stats().failed_steps_total == 0
