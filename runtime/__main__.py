"""The ``runtime`` command."""

from __future__ import annotations

from runtime.cli import app


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="runtime")


if __name__ == "__main__":
    main()
