"""Decision logs are one server's at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.cli import _is_input_error
from runtime.decision_files import DecisionFileError, reserved
from runtime.server.instances_settings import InstanceSettings, decision_files

HOLD = """
import sys
from pathlib import Path
from runtime.decision_files import reserved
with reserved([Path(sys.argv[1])]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_log_is_refused_while_another_process_has_it_and_free_after_it_was_killed(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.jsonl.gz"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(DecisionFileError, match="another server writes its log there") as found,
            reserved([tmp_path / "mine.jsonl.gz", log]),
        ):
            pass
        assert f"--decisions: {log}: " in str(found.value)
        assert _is_input_error(found.value)  # one line, exit code 2
        other.kill()
    with reserved([log]):
        pass
    assert not list(tmp_path.iterdir())


def test_logs_of_instances_are_reserved_with_that_of_the_router(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl.gz"
    two = decision_files(str(log), InstanceSettings(count=2))
    with (
        reserved(two),
        pytest.raises(DecisionFileError, match=r"log-1\.jsonl\.gz: another"),
        reserved(decision_files(str(tmp_path / "log-1.jsonl.gz"), InstanceSettings())),
    ):
        pass
    assert [file.name for file in two] == ["log.jsonl.gz", "log-0.jsonl.gz", "log-1.jsonl.gz"]
    assert decision_files(None, InstanceSettings(count=2)) == []
