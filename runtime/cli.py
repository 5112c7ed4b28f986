"""The ``runtime`` command: what it reads, what it runs, what it prints.

Every command imports what it needs when it runs, so that ``--help`` needs neither torch nor numba.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

import typer

from runtime.bench_command import bench
from runtime.calibrate_command import calibrate
from runtime.demo_model_command import demo_model
from runtime.doctor_command import doctor
from runtime.inspect_command import inspect
from runtime.profile_command import profile
from runtime.quantize_command import quantize
from runtime.replay_command import replay
from runtime.serve_command import serve
from runtime.store.commands import store_app

INTERRUPTED = 130
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Of all errors of options and arguments; typer exports only this one subclass of it."""

app = typer.Typer(
    name="runtime",
    help="The runtime that the twin is a twin of: quantized weights in pages, prefix store.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(serve)
app.command()(replay)
app.command()(bench)
app.command()(profile)
app.command()(calibrate)
app.command()(quantize)
app.command()(inspect)
app.command(name="demo-model")(demo_model)
app.command()(doctor)
app.add_typer(store_app, name="store")


@app.callback()
def _commands() -> None:
    """Commands of the runtime."""


def main() -> None:
    """Run the command line; bad input ends with exit code 2 and one message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            code = app(prog_name="runtime", standalone_mode=False)
        finally:
            sys.stdout.flush()
        if code == INTERRUPTED:
            _complain("interrupted")  # typer has made an exit code of it, without a word
        sys.exit(code if isinstance(code, int) else 0)
    except USAGE_ERROR as error:
        _complain_of_usage(error)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        _drop_output()
        place = "standard output" if error.filename is None else error.filename
        _complain(f"error: {place}: {error.strerror or error}")
        sys.exit(1)
    except MemoryError:
        _complain("error: not enough memory")
        sys.exit(2)
    except ValueError as error:
        if not _is_input_error(error):
            raise
        _complain(f"error: {error}")
        sys.exit(2)


def _is_input_error(error: ValueError) -> bool:
    """Whether the person at the keyboard can mend it: an error class of this program."""
    return type(error).__module__.partition(".")[0] in ("models", "runtime", "traces")


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the exit does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain_of_usage(error: Exception) -> None:
    """One line as for any other error; a command without words shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error}\n" if str(error) else "")
        return
    context = getattr(error, "ctx", None)
    path = f" (see {context.command_path} --help)" if context is not None else ""
    _complain(f"error: {error.format_message()}{path}")  # type: ignore[attr-defined]


def _complain(message: str) -> None:
    sys.stderr.write(message.replace("\n", "\\n").replace("\r", "\\r") + "\n")
