"""The crash benchmark, short: clients and servers killed under load."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_fifteen_kills_under_load_lose_nothing_and_show_nothing_wrong(tmp_path: Path) -> None:
    """Rows 1, 3, 8, 9, 10, 15, 24; the long run is benchmarks/results/store_crash.json."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "store_crash.py")]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:  # a socket's path must be short
        options = [
            *("--kills", "15", "--seed", "4", "--index-blocks", "2000"),
            *("--folder", folder, "--json", str(report)),
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert report.exists(), done.stderr
    found = json.loads(report.read_text())
    assert found["failures"] == [], found
    assert found["kills"] == found["server_kills"] + found["writer_kills"] + found["reader_kills"]
    assert found["server_kills"] >= 3
    assert found["committed_blocks"] > 100
    assert found["blocks_asked"] >= found["committed_blocks"]
    assert found["blocks_read_by_clients"] > 50
    assert found["wrong_blocks"] == found["uncommitted_visible"] == 0
    assert found["index_blocks"] == 2000
