"""Numbers that are none, steps that fail: those concerned end in error, others notice nothing."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.engine.core import EngineCore
from runtime.engine.frames import Control, ControlDone, Outputs
from runtime.engine.process import MAX_FAILED_STEPS, EngineProcess
from runtime.engine.wire import from_engine_decoder, packed, receive
from runtime.model.step import StepBatch
from runtime.quantize import QuantizeSettings, quantize_checkpoint
from tests.runtime.engine.core_cases import (
    STORE,
    ask,
    drive,
    engine,
    make_checkpoint,
    one,
    prompt,
    running,
    settle,
)

BAD_TOKEN = 200  # beyond what ``prompt`` draws
KINDS = ("plain", "quantized")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model, one whose ``BAD_TOKEN`` is not a number, and both quantized."""
    path = tmp_path_factory.mktemp("faults")
    sound = make_checkpoint(path / "plain", "qwen2_moe")
    quantize_checkpoint(
        sound, path / "quantized", QuantizeSettings(parent_bits=4, seed_bits=2, min_bits=2)
    )
    for kind in KINDS:
        source, bad = path / kind, path / f"{kind}-bad"
        bad.mkdir()
        for file in source.iterdir():
            (bad / file.name).write_bytes(file.read_bytes())
    _spoil(path / "plain-bad" / "model.safetensors")
    return {folder.name: folder for folder in path.iterdir()}


def _spoil(file: Path) -> None:
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("embed_tokens.weight")]
    tensors[name][BAD_TOKEN] = float("nan")
    save_file(tensors, file, {"format": "pt"})


class Spoiled:
    """A forward pass in which the embedding of ``BAD_TOKEN`` is not a number."""

    def __init__(self, core: EngineCore) -> None:
        decoder = next(
            cell.cell_contents.decoder
            for cell in core.parts.forward.__closure__ or ()  # type: ignore[attr-defined]
            if hasattr(cell.cell_contents, "decoder")
        )
        self._embedding = decoder._embedding
        decoder._embedding = self

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._embedding(tokens).clone()
        rows[tokens == BAD_TOKEN] = float("nan")
        return rows


class Failing:
    """A forward pass that raises when told to, or behind some of its layers."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.forward, self.fails = core, core.parts.forward, False
        self.batches: list[StepBatch] = []
        core.parts.forward = self

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        self.batches.append(batch)
        if self.fails:
            raise ArithmeticError("the device has a cold")
        return self.forward(batch)


# --- numbers that are none ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_whose_numbers_are_none_fails_alone(folders: dict[str, Path], kind: str) -> None:
    bad = [ask([*prompt(20), BAD_TOKEN, *prompt(30)], 10), ask([BAD_TOKEN], 10)]
    good = [ask(prompt(length), 10) for length in (3, 30, 40)]
    options: dict[str, Any] = {} if kind == "plain" else {"precision": 4}
    with running(folders[kind], **options) as core:
        expected = [one(core, new).said for new in good]
    # Few pages, so that those of the failed ones are used again at once.
    memory_bytes = (15 + (0 if kind == "plain" else 230)) * 8192
    with running(folders[kind], prefix=STORE, memory_bytes=memory_bytes, **options) as core:
        Spoiled(core)
        for _ in range(2):
            answers = drive(core, [good[0], bad[0], good[1], bad[1], good[2]], every=1)
            assert [answer.said for answer in answers[::2]] == expected
            for answer in answers[1::2]:
                assert answer.finish == "error"
                assert "not a finite number" in answer.error
                assert answer.cached_tokens % 16 == 0
                assert answer.cached_tokens < 32  # blocks of the bad token are not kept
        assert core.stats().failed_steps_total == 0


def test_a_checkpoint_with_numbers_that_are_none_serves_the_rest(
    folders: dict[str, Path],
) -> None:
    with running(folders["plain"]) as core:
        expected = one(core, ask(prompt(20))).said
    with running(folders["plain-bad"]) as core:
        bad, good = drive(core, [ask([5, BAD_TOKEN, 7]), ask(prompt(20))])
        assert bad.finish == "error"
        assert good.said == expected


def test_routing_that_is_no_number_does_not_move_the_planner(folders: dict[str, Path]) -> None:
    with running(folders["quantized"]) as core:
        Spoiled(core)
        control = core.parts.control
        assert control is not None
        drive(core, [ask(prompt(30)), ask([5, BAD_TOKEN])])
        assert (control.mass.m1 >= 0).all()
        assert (control.mass.m2 >= 0).all()
        assert control.mass.m1.sum() > 0


def test_blocks_of_a_failed_sequence_are_not_kept(folders: dict[str, Path]) -> None:
    with running(folders["plain"], prefix=STORE) as core:
        expected = one(core, ask(prompt(40), salt="other")).said
        settle(core)
        right = core.parts.forward

        def wrong(batch: StepBatch) -> torch.Tensor:
            return right(batch).fill_(float("nan"))

        core.parts.forward = wrong
        assert one(core, ask(prompt(40))).finish == "error"
        settle(core)
        core.parts.forward = right
        answer = one(core, ask(prompt(40)))
        assert answer.said == expected
        assert answer.cached_tokens == 0


# --- steps that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_ends_its_sequences_and_the_next_request_is_served(
    folders: dict[str, Path], kind: str
) -> None:
    with running(folders[kind], prefix=STORE) as core:
        failing = Failing(core)
        start_pages = core.parts.arena.use().kv_pages
        expected = one(core, ask(prompt(20))).said
        failing.fails = True
        answers = drive(core, [ask(prompt(30)), ask(prompt(5))])
        assert {answer.error for answer in answers} == {
            "the step failed: ArithmeticError: the device has a cold"
        }
        failing.fails = False
        settle(core)
        assert core.parts.arena.use().kv_pages == start_pages
        assert one(core, ask(prompt(20), salt="other")).said == expected
        stats = core.stats()
        assert (stats.failed_steps_total, stats.running, stats.waiting) == (1, 0, 0)


def test_a_step_that_fails_in_mid_model_leaves_routing_statistics_whole(
    folders: dict[str, Path],
) -> None:
    with running(folders["quantized"], precision_settings={"use_routing": False}) as core:
        control = core.parts.control
        assert control is not None
        expected = one(core, ask(prompt(20))).said
        experts = next(
            cell.cell_contents
            for cell in core.parts.forward.__closure__ or ()
            if hasattr(cell.cell_contents, "observe")
        )
        observe, calls = experts.observe, []

        def fail_once(layer: int, *routing: Any) -> None:
            calls.append(layer)
            if len(calls) == 2:
                raise MemoryError("once")
            observe(layer, *routing)

        experts.observe = fail_once
        assert "MemoryError: once" in one(core, ask(prompt(33))).error
        before = control.mass.m1.copy()
        assert one(core, ask(prompt(20))).said == expected
        assert (control.mass.m1 != before).any()


def test_sequences_that_were_not_in_the_step_outlive_its_failure(
    folders: dict[str, Path],
) -> None:
    with running(folders["plain"], max_running=1) as core:
        failing = Failing(core)
        waiting = ask(prompt(20))

        def fail(step: int) -> None:
            failing.fails = step == 2

        first, second = drive(core, [ask(prompt(9)), waiting], at_step=fail)
        assert "the step failed" in first.error
        assert len(first.tokens) == 2
        assert (second.finish, len(second.tokens)) == ("length", 8)


def test_twenty_failed_steps_in_a_row_end_the_engine_with_a_word_to_everybody(
    folders: dict[str, Path],
) -> None:
    core = engine(folders["plain"], max_running=1)
    ours, theirs = socket.socketpair()
    process = EngineProcess(theirs, core.parts)
    Failing(process.core).fails = True
    thread = threading.Thread(target=process.run, daemon=True)
    asks = [ask(prompt(5)) for _ in range(MAX_FAILED_STEPS + 5)]
    ours.sendall(b"".join(packed(new) for new in asks))
    thread.start()
    errors: dict[str, str] = {}
    ours.settimeout(60)
    while len(errors) < len(asks):
        body = receive(ours)
        assert body is not None, f"{len(errors)} of {len(asks)} have been told"
        message = from_engine_decoder.decode(body)
        if isinstance(message, Outputs):
            errors |= {output.sequence_id: output.error for output in message.outputs}
    thread.join(30)
    assert not thread.is_alive()
    told = list(errors.values())
    assert told[0] == "the step failed: ArithmeticError: the device has a cold"
    assert told[-5:] == [f"the engine ends after {MAX_FAILED_STEPS} failed steps in a row"] * 5
    ours.close()
    theirs.close()
    core.parts.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x02\xc1\xc1",
        b"\x00\x00\x00\x09" + b"\x81\xa4type\xa1\xff\x00"[:9],
        b"\x00\x00\x00\x10abc",
    ],
    ids=["huge", "no message", "no text", "cut short"],
)
def test_a_frame_that_is_none_ends_the_engine_cleanly(
    folders: dict[str, Path], frame: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    core = engine(folders["plain"])
    ours, theirs = socket.socketpair()
    process = EngineProcess(theirs, core.parts)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    ours.sendall(frame)
    ours.shutdown(socket.SHUT_WR)
    thread.join(30)
    assert not thread.is_alive()
    assert "the front end is gone" in capfd.readouterr().err
    ours.close()
    theirs.close()
    core.parts.close()


def test_a_control_order_that_fails_is_answered_and_the_engine_goes_on(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    core = engine(folders["plain"], decision_log=str(tmp_path / "none" / "log.gz"))
    ours, theirs = socket.socketpair()
    process = EngineProcess(theirs, core.parts)
    thread = threading.Thread(target=process.run, daemon=True)
    thread.start()
    ours.settimeout(60)
    ours.sendall(packed(Control(command="write_decisions", number=0)))
    ours.sendall(packed(Control(command="reset_prefix_cache", number=1)))
    ours.sendall(packed(Control(command="shutdown", number=2)))
    done: dict[int, str] = {}
    while len(done) < 3:
        received = receive(ours)
        assert received is not None
        message = from_engine_decoder.decode(received)
        if isinstance(message, ControlDone):
            done[message.number] = message.error
    thread.join(30)
    assert not thread.is_alive()
    assert str(tmp_path / "none") in done[0]
    assert (done[1], done[2]) == ("", "")
    ours.close()
    theirs.close()
    core.parts.close()


# --- shapes that cannot be served ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"hidden_act": "tanh_of_doom"}, "hidden_act"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_a_shape_that_cannot_be_computed_is_refused_at_the_start(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    for file in folders["plain"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=says):
        engine(tmp_path)
