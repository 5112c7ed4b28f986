"""``runtime doctor``: what this machine can do, and what to install."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Look at everything that ``runtime serve`` needs or can use; say what to do where it is not.

    Ends with 0 when serving would work, else with 1.
    """
    from runtime.doctor import can_serve, examine

    checks = examine()
    works = can_serve(checks)
    if as_json:
        content = {"can_serve": works, "checks": [asdict(check) for check in checks]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            sys.stdout.write(f"{check.status:8}{check.name:{width}}  {check.found}\n")
            if check.advice:
                sys.stdout.write(f"{'':{8 + width}}  -> {check.advice}\n")
        stopped = [check.name for check in checks if check.stops_serving]
        verdict = "works here" if works else f"cannot work here: {', '.join(stopped)}"
        sys.stdout.write(f"\nruntime serve {verdict}\n")
    if not works:
        raise typer.Exit(1)
