"""A run's summary as text: rich tables on a terminal, plain columns in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

LEVEL_NAMES = {
    "mean_field": "mean field",
    "gaussian": "Gaussian",
    "pearson3": "Pearson III",
    "exact": "exact",
}
PLAIN_WIDTH = 100

Section = Callable[[Mapping[str, Any], bool], RenderableType]


def make_console(width: int | None = None) -> Console:
    """A console for reports: as wide as the terminal, or a fixed width in a pipe."""
    console = Console(highlight=False)
    if width is not None or not console.is_terminal:
        return Console(highlight=False, width=width or PLAIN_WIDTH)
    return console


def print_report(summary: Mapping[str, Any], console: Console) -> None:
    """Print every section of a run's summary that it has."""
    plain = not console.is_terminal
    optional: dict[str, Section] = {
        "simulation": simulation_table,
        "stragglers": stragglers_table,
        "faults": faults_table,
        "open_loop": open_loop_table,
    }
    sections: list[Section] = [workload_table, _answer, levels_table]
    sections += [section for name, section in optional.items() if summary.get(name)]
    console.print()
    for section in sections:
        console.print(section(summary, plain))
        console.print()
    print_warnings(summary.get("warnings", ()), console)


def print_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what limits the numbers above; nothing if there is nothing."""
    if not warnings:
        return
    console.print(Text("Mind", style="bold yellow"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=2, justify="right")
    grid.add_column(overflow="fold")
    for warning in warnings:
        grid.add_row("-", Text(warning))
    console.print(grid)


# --- numbers on screen ------------------------------------------------------------------------


def duration(seconds: float | None, digits: int = 4) -> str:
    """Seconds in the unit that reads best."""
    if seconds is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:,.{digits}g} {unit}" if seconds < 1e4 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.{digits}g} us" if seconds else "0 s"


def percent(share: float | None, digits: int = 2) -> str:
    """A share as a percentage; what rounds to nothing has no minus."""
    return "-" if share is None else f"{round(100.0 * share, digits) + 0.0:.{digits}f} %"


def count(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators."""
    return "-" if value is None else f"{value:,.{digits}f}"


def rate(value: float | None) -> str:
    """A rate with about four digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def with_interval(estimate: Mapping[str, Any] | None, scale: float = 1.0) -> str:
    """Mean and half width of an interval."""
    if not estimate:
        return "-"
    mean, half = scale * estimate["mean"], estimate["half_width"]
    if half is None:
        return rate(mean)
    spread = scale * half if half > 1e-9 * abs(estimate["mean"]) else 0.0  # else it is rounding
    return f"{rate(mean)} ± {spread:,.0f}" if spread >= 99.5 else f"{rate(mean)} ± {spread:.2g}"


def new_table(title: str, plain: bool, *columns: str) -> Table:
    """An empty table: rounded on a terminal, ASCII in a pipe; first column left, others right."""
    table = Table(
        title=Text(title, style="bold"),  # a name may hold brackets
        title_justify="left",
        title_style="bold",
        box=box.ASCII2 if plain else box.ROUNDED,
        pad_edge=False,
        padding=(0, 1),
    )
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 else "right", overflow="fold")
    return table


# --- sections ---------------------------------------------------------------------------------


def workload_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """What was asked: workload, slot load, latency model, bundle."""
    workload, bundle = summary["workload"], summary["bundle"]
    table = new_table("What was asked", plain, "", "")
    table.show_header = False
    table.columns[1].justify = "left"
    prompts, outputs = workload["prompt_tokens"], workload["output_tokens"]
    table.add_row("workload", Text(f"{workload['name']} ({workload['source']})"))
    requests = count(workload["num_requests"]) if workload["num_requests"] else "exact law"
    if workload.get("rate_per_s"):
        requests += f", {workload['rate_per_s']:.4g} per s for {duration(workload['duration_s'])}"
    table.add_row("requests", requests)
    for name, column in (("prompt tokens", prompts), ("output tokens", outputs)):
        table.add_row(
            name,
            f"mean {count(column['mean'], 1)}, p50 {count(column['p50'])}, "
            f"p90 {count(column['p90'])}, p99 {count(column['p99'])}, max {count(column['max'])}",
        )
    theta = count(summary["theta_tokens"], 1)
    if summary["theta_se"] is not None:
        theta += f" ± {summary['theta_se']:.3g} (one standard error)"
    table.add_row(
        "slot load",
        f"theta {theta}, nu {count(summary['nu_tokens'], 1)}, skew {summary['skew']:.3g}",
    )
    origin = bundle["calibration"] or "coefficients of the scenario"
    if bundle["device"]:
        origin += f" ({bundle['model']} on {bundle['device']})"
    table.add_row("latency model", Text(origin))
    m = bundle["microbatches"]
    in_flight = f", {m} microbatches in flight" if m > 1 else ""
    table.add_row(
        "bundle",
        f"B = {bundle['batch_per_worker']} slots a worker{in_flight}, {bundle['semantics']}, "
        f"{bundle['num_layers']} layer{'s' if bundle['num_layers'] > 1 else ''}",
    )
    if summary.get("simulation"):
        table.add_row("routing", f"free slots refilled by {summary['simulation']['routing']}")
    return table


def _answer(summary: Mapping[str, Any], plain: bool) -> Panel:
    best, layers = summary["recommendation"], summary["bundle"]["num_layers"]
    lines = [Text.assemble((f"r = {best['r']}", "bold green"), " ", headline(best))]
    lines.append(
        Text(
            f"{rate(best['throughput_per_instance'] / layers)} tokens/s per instance, "
            f"{duration(best['tpot_s'])} per output token, "
            f"cycle {duration(best['cycle_s'])} a layer"
        )
    )
    lines.append(
        Text(
            f"cycle {percent(best['barrier_overhead'])} longer than with equal loads; "
            f"idle: attention {percent(best['attention_idle'], 1)}, "
            f"FFN {percent(best['ffn_idle'], 1)}"
        )
    )
    lines.append(Text(how_sure(best)))
    lines += [Text(line) for line in (other_semantics(summary), best_routing(summary)) if line]
    if best["binding"]:
        lines.append(Text("held back by " + ", ".join(best["binding"]), style="yellow"))
    return Panel(
        Group(*lines),
        title="Attention workers per FFN server",
        title_align="left",
        box=box.ASCII2 if plain else box.ROUNDED,
        expand=False,
    )


def other_semantics(summary: Mapping[str, Any]) -> str:
    """What the best ratio would be if microbatches were served the other way."""
    other, layers = summary["other_semantics"], summary["bundle"]["num_layers"]
    if other["r"] is None:
        return (
            f"under {other['semantics']} with {other['microbatches']} microbatches this B "
            f"cannot meet {other['misses']} at any r"
        )
    return (
        f"under {other['semantics']} with {other['microbatches']} microbatches the best would be "
        f"r = {other['r']}: {rate(other['throughput_per_instance'] / layers)} tokens/s, "
        f"{duration(other['tpot_s'])} per output token"
    )


def best_routing(summary: Mapping[str, Any]) -> str:
    """What the best routing policy would gain, where one beats the baseline for certain."""
    rows = summary.get("stragglers", {}).get("routing", [])
    better = [row for row in rows if row["gain"] and row["gain"]["verdict"] == "a"]
    if not better:
        return ""
    best = max(better, key=lambda row: row["gain"]["mean"])
    gain = best["gain"]
    return (
        f"refilling free slots by {best['policy']} gains {100 * gain['mean']:.1f} ± "
        f"{100 * gain['half_width']:.1f} % throughput over random refill"
    )


def headline(best: Mapping[str, Any]) -> str:
    """Why the ratio in use is what it is: the rest of the sentence "r = ..."."""
    if best["is_given"]:
        if best["r"] == best["best_r"]:
            return f"was given, and is the best ratio for B = {best['batch_per_worker']}"
        lost = percent(best["regret"])
        return (
            f"was given and loses {lost} of throughput; the best for B = "
            f"{best['batch_per_worker']} is r = {best['best_r']}"
        )
    return f"is the best ratio by the {LEVEL_NAMES[best['level']]} level"


def how_sure(best: Mapping[str, Any]) -> str:
    """What a neighbour of the best ratio costs, and where sampling error may move it."""
    sides = [
        f"r {sign} 1 costs {percent(best[name])}"
        for sign, name in (("-", "regret_one_less"), ("+", "regret_one_more"))
        if best[name] is not None
    ]
    text = f"around the best r = {best['best_r']}: " + ", ".join(sides) if sides else ""
    missed = (
        f"; at + 2 se r = {best['best_r']} would miss max_tpot_s"
        if best.get("misses_limit_high")
        else ""
    )
    if best["r_low"] == best["r_high"]:
        what = "sampling error does not move it" if best["is_sampled"] else "the law is exact"
        return text + ("; " if text else "") + (missed.removeprefix("; ") or what)
    worst = max(best["regret_low"], best["regret_high"])
    return (
        text
        + ("; " if text else "")
        + f"with the sampling error of the trace (2 se) the best lies in {best['r_low']}.."
        + f"{best['r_high']}, "
        + (missed.removeprefix("; ") if missed else f"regret at most {percent(worst)}")
    )


def levels_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """The four levels of theory, each at its own best ratio."""
    table = new_table(
        "Theory at four levels", plain, "level", "best r", "real r", "cycle", "tokens/s", "regret"
    )
    for name, level in summary["levels"].items():
        table.add_row(
            LEVEL_NAMES[name],
            str(level["r"]),
            "no limit" if level["r_real"] is None else f"{level['r_real']:.2f}",
            duration(level["cycle_s"]),
            rate(level["tokens_per_s_per_instance"]),
            percent(level["regret"]),
        )
    table.caption = (
        "tokens/s: per instance, as the level itself predicts; regret: throughput lost by its r, "
        "measured by the exact level"
    )
    if summary["recommendation"]["binding"]:
        table.caption += ". Levels do not know the limits; the answer above does"
    table.caption_justify = "left"
    return table


def simulation_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """Theory beside the twin, one row a simulated ratio."""
    simulation, layers = summary["simulation"], summary["bundle"]["num_layers"]
    table = new_table(
        f"Theory against the simulated twin ({simulation['engine']} engine)",
        plain,
        "r",
        "theory",
        "twin, tokens/s",
        "theory/twin - 1",
        "A idle",
        "F idle",
        "barrier",
    )
    for point in simulation["points"]:
        is_chosen = point["r"] == summary["recommendation"]["r"]
        table.add_row(
            f"{point['r']}{' *' if is_chosen else ''}",
            rate(point["predicted_throughput_per_instance"] / layers),
            with_interval(point["throughput_per_instance"], 1.0 / layers),
            f"{_signed(point['difference'])} ± {100 * point['difference_half_width']:.2f} %",
            percent(point["attention_idle"]["mean"], 1),
            percent(point["ffn_idle"]["mean"], 1),
            percent(point["barrier_share"]["mean"], 1),
            style="bold" if is_chosen else "",
        )
    table.caption = _simulation_caption(simulation)
    table.caption_justify = "left"
    return table


def _signed(share: float) -> str:
    """A change in percent; what rounds to nothing has no minus."""
    return f"{round(100 * share, 2) + 0.0:+.2f}"


def _simulation_caption(simulation: Mapping[str, Any]) -> str:
    fewest = min(point["replications"] for point in simulation["points"])
    cycles = simulation["points"][0]["num_cycles"]
    same = simulation["not_worse_than_best"]
    text = (
        f"*: the ratio in use. ±: {100 * simulation['confidence']:.0f} % interval over "
        f"{fewest} or more independent replications of "
        f"{count(cycles)} cycles; idle and barrier (wait of the mean worker for the slowest) "
        f"are shares of a cycle"
    )
    if simulation["routing"] != "random":
        text += f". Theory assumes random refill, the twin refills by {simulation['routing']}"
    if simulation["start"] == "cold":
        text += ". Theory here is that of a cold start over these cycles"
    if len(simulation["points"]) > 1:
        text += f". Best simulated r: {simulation['best_r']}"
    if len(same) > 1:
        others = ", ".join(str(r) for r in same if r != simulation["best_r"])
        text += f"; cannot tell it apart from {others}"
    return text + "."


def stragglers_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """What each routing policy makes of the slowest worker."""
    stragglers, layers = summary["stragglers"], summary["bundle"]["num_layers"]
    table = new_table(
        f"Stragglers at r = {stragglers['r']}: who refills a free slot",
        plain,
        "routing",
        "largest / mean load - 1",
        "tokens/s per instance",
        "against " + stragglers["baseline"],
    )
    for row in stragglers["routing"]:
        gain = row["gain"]
        versus = (
            "-"
            if gain is None
            else f"{100 * gain['mean']:+.2f} ± {100 * gain['half_width']:.2f} %"
            + (" (cannot tell)" if gain["verdict"] == "cannot tell" else "")
        )
        table.add_row(
            row["policy"],
            f"{100 * row['overhead']['mean']:.2f} ± {100 * row['overhead']['half_width']:.2f} %",
            with_interval(row["throughput_per_instance"], 1.0 / layers),
            versus,
        )
    table.caption = (
        "largest / mean load - 1: largest over mean token load of the workers in a step; same "
        "requests for all policies"
    )
    table.caption_justify = "left"
    return table


def faults_table(summary: Mapping[str, Any], plain: bool) -> Table:
    """The ratio in use with and without the scenario's faults."""
    faults, layers = summary["faults"], summary["bundle"]["num_layers"]
    table = new_table(
        f"Faults at r = {faults['r']}", plain, "", "cycle a layer", "tokens/s per instance"
    )
    for name, row in (("healthy", faults["healthy"]), ("with faults", faults["faulty"])):
        table.add_row(
            name,
            duration(row["cycle_s"]["mean"]),
            with_interval(row["throughput_per_instance"], 1.0 / layers),
        )
    cost = faults["throughput_change"]
    table.add_row("change", "", f"{100 * cost['mean']:+.2f} ± {100 * cost['half_width']:.2f} %")
    table.caption = "; ".join(faults["events"])
    table.caption_justify = "left"
    return table


def open_loop_table(summary: Mapping[str, Any], plain: bool) -> Group:
    """Latencies of an open-loop run, and the facts beside them."""
    run = summary["open_loop"]
    num = run["replications"]
    table = new_table(
        f"Open loop at r = {run['r']}: {count(run['injected'])} requests in {num} "
        f"replication{'s' if num > 1 else ''}",
        plain,
        "",
        "mean",
        "±",
        "p50",
        "p90",
        "p99",
        "max",
    )
    for name, label in (
        ("queue_s", "queue"),
        ("ttft_s", "TTFT"),
        ("tpot_s", "TPOT"),
        ("itl_s", "ITL *"),
        ("e2e_s", "end to end"),
    ):
        row = run["latency"].get(name)
        if row:
            half = row["interval"]["half_width"] if row["interval"] else None
            table.add_row(
                label,
                duration(row["mean"], 3),
                duration(half, 3),
                *(duration(row[k], 3) for k in ("p50", "p90", "p99", "max")),
            )
    table.caption = (
        f"±: {100 * run['confidence']:.0f} % interval of the mean, "
        + ("over replications" if num > 1 else "by batch means")
        + ". Requests past the warm-up; *: all tokens of the run, warm-up included"
    )
    table.caption_justify = "left"
    facts = Table.grid(padding=(0, 2))
    for left, right in _open_loop_facts(run):
        facts.add_row(left, right)
    return Group(table, Padding(facts, (0, 0, 0, 1)))


def _open_loop_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("requests", _fates(run)),
        (
            "served",
            f"{_rate_of(run, 'requests_per_s')} requests/s, "
            f"{_rate_of(run, 'output_tokens_per_s')} output tokens/s; measured from "
            + ("the first arrival" if run["is_recorded"] else "the end of the warm-up")
            + (" to the horizon, " if run["beyond_horizon"] else " to the last arrival, ")
            + duration(run["duration_s"])
            + (" a replication" if run["replications"] > 1 else ""),
        ),
        (
            "load",
            f"{percent(run['slot_utilisation'], 1)} of slots busy on average; offered "
            f"{rate(run['offered_tokens_per_s'])} of {rate(run['capacity_tokens_per_s'])} "
            f"output tokens/s ({percent(run['offered_share'], 1)} of capacity)",
        ),
    ]
    if run.get("goodput"):
        good = run["goodput"]
        share = percent(good["share"], 1)
        if good["share_interval"]:
            share = f"{share[:-2]} ± {100 * good['share_interval']['half_width']:.1f} %"
        lost = (
            f" ({count(good['unfinished'])} unfinished ones do not)" if good["unfinished"] else ""
        )
        facts.append(
            (
                "goodput",
                f"{_rate_of(good, 'requests_per_s')} requests/s; {share} of the requests that "
                f"arrived meet {good['targets']}{lost}",
            )
        )
    if run.get("retries"):
        facts.append(("retries", count(run["retries"])))
    return facts


def _fates(run: Mapping[str, Any]) -> str:
    """Where the requests are at the end."""
    text = (
        f"{count(run['completed'])} completed, {count(run['running'])} running"
        + (f", {count(run['preparing'])} in prefill" if run["preparing"] else "")
        + f" and {count(run['queued'])} queued at the end"
    )
    if run["beyond_horizon"]:
        text += f"; {count(run['beyond_horizon'])} more would arrive after the horizon"
    return text


def _rate_of(found: Mapping[str, Any], name: str) -> str:
    """A rate, with its interval where there is one."""
    return (
        with_interval(found[f"{name}_interval"]) if found[f"{name}_interval"] else rate(found[name])
    )
