"""Options of `runtime serve` that contradict the checkpoint, the machine or each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from runtime.demo_model_tiny import make_tiny_checkpoint
from runtime.engine.build import build_engine
from runtime.engine.settings import EngineSettings, EngineSettingsError
from runtime.serve_command import _unknown_tokens
from runtime.serve_settings import ServeOptions, engine_settings
from runtime.text.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("settings") / "tiny")


@pytest.mark.parametrize("width", ["hull", "4"])
def test_precision_is_refused_where_the_experts_are_plain(plain: Path, width: str) -> None:
    with pytest.raises(EngineSettingsError, match=r"^--precision: .*/tiny holds plain experts"):
        engine_settings(ServeOptions(model=plain, precision=width))


def test_swap_is_refused_without_a_prefix_store_to_swap_to(plain: Path) -> None:
    with pytest.raises(EngineSettingsError, match=r"^--preemption: swap .* --prefix-store is none"):
        engine_settings(ServeOptions(model=plain, preemption="swap", prefix_store="none"))
    assert engine_settings(ServeOptions(model=plain, preemption="swap")).preemption == "swap"


def test_more_threads_than_cores_are_warned_of_and_as_many_are_not(plain: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    told: list[str] = []
    for threads in (0, cores):
        settings = engine_settings(ServeOptions(model=plain, threads=threads), say=told.append)
        assert settings.threads == cores
    assert told == []
    settings = engine_settings(ServeOptions(model=plain, threads=cores + 1), say=told.append)
    assert settings.threads == cores + 1
    assert len(told) == 1
    assert told[0].startswith(f"warning: --threads: {cores + 1} threads share {cores} cores")


def test_a_context_longer_than_the_model_s_is_refused_and_its_own_is_not(plain: Path) -> None:
    parts = build_engine(EngineSettings(model=str(plain), threads=1, memory_bytes=1 << 20))
    longest = parts.info.context_tokens
    parts.close()
    settings = EngineSettings(
        model=str(plain), threads=1, memory_bytes=1 << 20, context_tokens=longest
    )
    parts = build_engine(settings)
    assert parts.info.context_tokens == longest
    parts.close()
    with pytest.raises(
        EngineSettingsError, match=f"--context.*<= {longest:,}.*tiny, found {longest + 1:,}"
    ):
        build_engine(
            EngineSettings(model=str(plain), memory_bytes=1 << 20, context_tokens=longest + 1)
        )


def test_tokens_that_the_model_lacks_are_named_in_one_line(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny")
    text = TextTokenizer.open(folder)
    assert text is not None
    assert _unknown_tokens(text, 320) == ""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|new{i}|>", special=True) for i in range(7)])
    tokenizer.save(file)
    text = TextTokenizer.open(folder)
    assert text is not None
    told = _unknown_tokens(text, first + 1)
    assert told.startswith(f"warning: {folder}: ")
    assert f"0..{first}: '<|new1|>' ({first + 1}), " in told
    assert "'<|new5|>'" in told
    assert "<|new0|>" not in told
    assert "<|new6|>" not in told
    assert "and 1 more" in told
    assert "\n" not in told


def test_help_of_eighty_columns_shows_every_option_of_serve_whole() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "serve", "--help"],
        env=os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    for option in ("--context,--max-model-len", "--metrics-with-key", "--max-queued-requests"):
        assert option in done.stdout
