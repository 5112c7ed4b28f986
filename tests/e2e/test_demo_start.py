"""`runtime serve` without a model: the first minute of a new user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from runtime.demo_model import DemoRecipe
from runtime.demo_model_wheel import cache_folder
from tests.e2e.server_process import STOP_LIMIT_S, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_model_is_served_and_the_greeting_s_own_call_answers():
    made = cache_folder() / "demo-models" / DemoRecipe().folder_name
    if not (made / "config.json").is_file() or shutil.which("curl") is None:
        pytest.skip("needs curl, and the demo model: runtime demo-model makes it")
    server = Server(None)
    try:
        server.wait_until_ready()
        said = server.said()
        call = said[said.index("  curl ") :].strip()
        call = "\n".join(call.splitlines()[:2])  # what comes after is the log
        answer = subprocess.run(
            ["bash", "-c", call],
            capture_output=True,
            timeout=STOP_LIMIT_S,
            env=os.environ | {"no_proxy": "127.0.0.1"},
            check=True,
        )
        body = json.loads(answer.stdout)
        # 32 tokens at temperature 0: the model is small, not clever, but it knows this
        assert "Paris" in body["choices"][0]["message"]["content"]
        assert body["model"] == DemoRecipe().folder_name
        assert server.stop() == 0
    finally:
        server.kill()
