"""``python -m runtime.engine FD SETTINGS``: an engine on an inherited socket."""

from __future__ import annotations

import socket
import sys

import msgspec

from runtime.engine.process import run_engine
from runtime.engine.settings import EngineSettings


def main() -> int:
    """Start from the descriptor of a connected socket and settings as JSON."""
    from runtime.engine.build import build_engine

    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = msgspec.json.decode(sys.argv[2], type=EngineSettings)
    return run_engine(connection, settings, build_engine)


if __name__ == "__main__":
    sys.exit(main())
