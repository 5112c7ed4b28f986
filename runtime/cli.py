"""The ``runtime`` command: what it reads, what it runs, what it prints.

Every command imports what it needs when it runs, so that ``--help`` needs no torch.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    name="runtime",
    help="The runtime that the twin is a twin of: quantized expert weights in pages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _commands() -> None:
    """Commands of the runtime."""
