"""The ``runtime`` command's entry: small, so that even an early interrupt ends in one line."""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from runtime.cli import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
