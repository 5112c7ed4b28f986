"""``runtime profile``: measure this machine with a model, for the twin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from models.calibration_file import Calibration


def profile(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a checkpoint; without one the scenario's or the demo model."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Calibration file. Default: MODEL-profile.json.")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="Scenario file: model, memory, precision.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Change the scenario; repeatable."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.0,
            help="For steps of the model: 60, or 10 with --quick. At least three rounds are made "
            "(two with --quick); loading and transfers come on top.",
        ),
    ] = None,
    threads: Annotated[
        int,
        typer.Option("--threads", min=0, help="CPU threads; 0: all cores (one for --clock cpu)."),
    ] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    clock: Annotated[
        str,
        typer.Option("--clock", help="wall, or cpu: this process's time, for a busy machine."),
    ] = "wall",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, fewer rounds.")] = False,
    tiers: Annotated[
        bool, typer.Option("--tiers/--no-tiers", help="Measure the prefix store's places as well.")
    ] = True,
    place: Annotated[
        Path | None,
        typer.Option("--ssd-folder", help="Where the SSD is; a temporary folder is made in it."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write the file though a fit means nothing; replace one."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, no tables.")] = False,
) -> None:
    """Measure how long the engine takes on this machine, and write what the twin reads.

    Attention, FFN and experts at every width, prefill, scheduling, page copies and the places of
    the prefix store go into one file, for [attention_ffn], [hardware] and [prefix] calibration.
    """
    from models.calibration import save_calibration
    from runtime.command_progress import phases
    from runtime.profile_clock import ProfileError
    from runtime.profile_fit import calibration_of
    from runtime.profile_quality import problems
    from runtime.profile_run import QUICK, ProfilePlan, profile_model
    from runtime.serve_settings import ServeOptions, engine_settings

    options = ServeOptions(
        model=model,
        scenario=scenario,
        overrides=tuple(overrides or ()),
        dtype=dtype,
        threads=1 if clock == "cpu" and not threads else threads,
    )
    settings = engine_settings(options, say=_say)
    folder = Path(settings.model)
    target = out or Path(f"{folder.name}-profile.json")
    if os.path.lexists(target) and not force:
        raise ProfileError(f"{target}: exists already; choose another --out, or --force")
    with phases() as phase:
        measured = profile_model(
            settings,
            plan=QUICK if quick else ProfilePlan(),
            clock=clock,
            budget_s=(10.0 if quick else 60.0) if seconds is None else seconds,
            name=folder.name,
            with_tiers=tiers,
            place=place,
            show=lambda label: phase(label, "s" if label == "model steps" else "", 1.0),
        )
    found = calibration_of(measured)
    bad = problems(found)
    if as_json:
        from models.calibration_file import write_calibration

        sys.stdout.write(json.dumps(json.loads(write_calibration(found)), indent=2) + "\n")
    else:
        _print(found)
    if bad and not force:
        raise ProfileError(
            "not written, since a fit means nothing: " + "; ".join(bad) + " (measure longer, "
            "on a quieter machine, or with --clock cpu; --force writes it as it is)"
        )
    for problem in bad:
        _say(f"warning: {problem}")
    if os.path.lexists(target):
        target.unlink()
    save_calibration(found, target)
    _say(
        f"written: {target} (use it with --set hardware.calibration={target}, "
        f"attention_ffn.calibration={target} or prefix.calibration={target})"
    )


def _print(found: Calibration) -> None:
    from rich.console import Console
    from rich.table import Table

    engine = found.engine
    assert engine is not None  # it has been measured
    console = Console()
    origin = engine.provenance
    console.print(
        f"{found.model} on {engine.device.name}: {origin.rounds} rounds, {origin.clock} time",
        highlight=False,
    )
    table = Table("fit", "points", "R2", "off, median", "worst", "measured range")
    for name, fit in engine.fits.items():
        table.add_row(
            name,
            str(fit.points),
            f"{fit.r2:.3f}",
            f"{100 * fit.median_relative_error:.1f} %",
            f"{100 * fit.max_relative_error:.0f} %",
            f"{fit.min:,.0f} to {fit.max:,.0f} {fit.unit}",
        )
    console.print(table)
    rates, device = engine.rates, engine.device
    figures = {
        "memory": f"{device.copy_bytes_per_s / 1e9:.3g} GB/s",
        "arithmetic": f"{device.flops_per_s / 1e9:.3g} GFLOP/s",
        "a layer, fixed": f"{rates.launch_us:.3g} us",
        "a step beside its forward pass": f"{rates.step_overhead_us:.3g} us",
        "page copies": f"{device.link_bytes_per_s / 1e9:.3g} GB/s",
        "attention stage": f"{found.coefficients.alpha_attention:.3g} s a token + "
        f"{found.coefficients.beta_attention:.3g} s",
        "FFN stage": f"{found.coefficients.alpha_ffn:.3g} s a token + "
        f"{found.coefficients.beta_ffn:.3g} s",
    }
    for bits, share in rates.bandwidth_share.items():
        figures[f"experts at {bits} bits"] = f"{100 * share:.3g} % of memory bandwidth"
    if engine.prefill is not None:
        figures["prefill"] = f"{100 * engine.prefill.mfu:.3g} % of arithmetic"
    for name, tier in engine.tiers.items():
        figures[f"prefixes, {name}"] = (
            f"load {tier.load_bytes_per_s / 1e9:.3g} GB/s + {1e3 * tier.load_request_s:.3g} ms, "
            f"save {tier.save_bytes_per_s / 1e9:.3g} GB/s + {1e3 * tier.save_request_s:.3g} ms, "
            f"lookup {1e3 * tier.lookup_s:.3g} ms"
        )
    for name, text in figures.items():
        console.print(f"  {name}: {text}", highlight=False)
    for name, fit in engine.fits.items():
        if fit.warning:
            console.print(f" - {name}: {fit.warning}", highlight=False)
    for note in found.notes:
        console.print(f" - {note}", highlight=False)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
