"""Starts the Streamlit page on loopback."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NoReturn

from models.strict_tables import ScenarioError


def dashboard_command(port: int) -> list[str]:
    """The command line that serves the page: loopback only, no telemetry.

    Raises:
        ScenarioError: If Streamlit or the page is not installed.
    """
    if importlib.util.find_spec("streamlit") is None:
        raise ScenarioError("the dashboard needs Streamlit: pip install 'serving-twin[dashboard]'")
    page = Path(__file__).resolve().parent.parent / "dashboard" / "app.py"
    return [
        sys.executable,
        "-m",
        "streamlit",
        "run",
        str(page),
        "--server.headless=true",
        "--server.address=127.0.0.1",
        f"--server.port={port}",
        "--server.fileWatcherType=none",
        "--browser.gatherUsageStats=false",
    ]


def serve_dashboard(port: int) -> NoReturn:
    """Become the server: whoever ends this process ends the page, and leaves nothing behind."""
    command = dashboard_command(port)
    sys.stderr.write(f"dashboard: http://127.0.0.1:{port} (Ctrl-C ends it)\n")
    sys.stderr.flush()
    os.execv(command[0], command)
