"""What a replay is asked: a scenario's workload, targets and seed, or a trace alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from models.scenario import Slo
from models.scenario_file import (
    apply_overrides,
    beside,
    parse_paged_weight,
    read_toml,
    scenario_tables,
    with_absolute_files,
)
from models.strict_tables import ScenarioError, build_table, require_not_negative, require_shallow
from models.workload_settings import Workload
from runtime.replay_requests import ReplayError

KEPT_WITH_A_TRACE: Final = (
    "arrivals",
    "num_requests",
    "skip_bad_rows",
    "format",
    "columns",
    "time_unit",
    "servegen",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySeed:
    """The ``[run]`` of a question without a scenario.

    Attributes:
        seed: Of arrivals, prompts and sampling.
    """

    seed: int = 1

    def __post_init__(self) -> None:
        require_not_negative("run", seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuestion:
    """Tables that a replay without a scenario knows."""

    workload: Workload
    slo: Slo = field(default_factory=Slo)
    run: ReplaySeed = field(default_factory=ReplaySeed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayQuestion:
    """What is replayed, and how it is judged.

    Attributes:
        workload, slo, seed: Of the scenario or the command line.
        tables: The whole scenario, plain, its files by absolute paths.
    """

    workload: Workload
    slo: Slo
    seed: int
    tables: dict[str, Any]


def replay_question(
    trace: str | None, scenario: Path | None, overrides: Sequence[str], seed: int | None = None
) -> ReplayQuestion:
    """The question of a command line: file, then trace, then ``--set``, then ``--seed``.

    Raises:
        ReplayError: If there is neither a trace nor a scenario.
        ScenarioError: If the scenario breaks a rule.
    """
    if trace is None and scenario is None:
        raise ReplayError("TRACE: give a trace (a bundled name or a file), or --scenario FILE")
    tables: dict[str, Any] = {}
    if scenario is not None:
        tables = beside(read_toml(scenario), scenario.parent)
    if trace is not None:
        workload = tables.get("workload", {})
        kept = {k: v for k, v in workload.items() if k in KEPT_WITH_A_TRACE}
        tables["workload"] = {**kept, "trace": trace}
    tables = apply_overrides(tables, overrides)
    if seed is not None:
        tables = apply_overrides(tables, [f"run.seed={seed}"])
    asked: Any
    if scenario is not None:
        asked = parse_paged_weight(tables, where=str(scenario))
    else:
        try:
            require_shallow(tables)
            asked = cast(TraceQuestion, build_table(TraceQuestion, tables, ""))
        except ScenarioError as error:
            raise ScenarioError(f"command line: {error}") from None
    return ReplayQuestion(
        workload=asked.workload,
        slo=asked.slo,
        seed=asked.run.seed,
        tables=with_absolute_files(scenario_tables(asked)),
    )
