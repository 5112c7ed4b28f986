"""The `openai` package for Node, unmodified; skipped where Node or the package cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import Served

SOURCE = Path(__file__).parent / "clients" / "openai_node"
INSTALL_LIMIT_S = 90.0
RUN_LIMIT_S = 240.0
LEAST_CHECKS = 9
LEAST_NODE = 20

pytestmark = pytest.mark.timeout(600)  # the first start on a machine builds kernels


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the script beside its package; `$SERVING_TWIN_NODE_MODULES` may have it already."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(told.lstrip("v").split(".")[0]) < LEAST_NODE:
        pytest.skip(f"the openai package needs Node {LEAST_NODE}, found {told.strip()}")
    folder = tmp_path_factory.mktemp("openai_node")
    for name in ("package.json", "check.mjs"):
        shutil.copy(SOURCE / name, folder / name)
    if modules := os.environ.get("SERVING_TWIN_NODE_MODULES"):
        (folder / "node_modules").symlink_to(modules, target_is_directory=True)
        return folder
    try:
        done = subprocess.run(
            [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm install openai took more than {INSTALL_LIMIT_S:.0f} s")
    if done.returncode:
        pytest.skip(f"npm install openai failed: {(done.stderr or done.stdout).strip()[-300:]}")
    return folder


def test_the_openai_package_for_node_finds_what_it_expects(installed: Path, served: Served):
    done = subprocess.run(
        ["node", "check.mjs", served.url, served.name, served.key],
        cwd=installed,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [check for check in checks if not check["ok"]]
    assert failed == [], done.stderr
    assert done.returncode == 0, done.stderr
    assert len(checks) >= LEAST_CHECKS
