"""Synthetic traces: from two short texts (lengths, arrivals), or from ServeGen clients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.streams import stream
from traces import arrivals, length_laws
from traces.errors import TraceError
from traces.lengths import LengthPairs
from traces.readers.rules import LARGEST_TOKENS
from traces.request import Trace
from traces.servegen import generate_servegen
from traces.workloads import BUNDLED, bundled_arrivals, bundled_lengths

LAWS: Mapping[str, Callable[..., LengthPairs]] = {
    "fixed": length_laws.fixed,
    "two_point": length_laws.two_point,
    "uniform": length_laws.uniform,
    "geometric": length_laws.geometric,
    "lognormal": length_laws.lognormal,
    "pareto": length_laws.pareto,
}
PROCESSES: Mapping[str, Callable[..., NDArray[np.float64]]] = {
    "poisson": arrivals.poisson,
    "gamma": arrivals.gamma,
    "on_off": arrivals.on_off,
}
LATEST_ARRIVAL_S = 1e9  # 31 years
_GIVEN = ("rng", "num_requests")  # by the caller, not by the text


class GenerationError(ValueError):
    """A length law or an arrival process is not one; one line that says what is allowed."""


def generate_trace(lengths_text: str, arrivals_text: str, *, num_requests: int, seed: int) -> Trace:
    """Independent requests with the lengths and arrivals that the texts describe.

    Args:
        lengths_text: A bundled workload's name, or ``law:key=value,...``.
        arrivals_text: A bundled workload's name (perhaps ``name:rate_scale=2``), or
            ``process:key=value,...``.
        num_requests: How many, >= 1.
        seed: Of the streams ``lengths`` and ``arrivals``.

    Raises:
        GenerationError: If a text names what does not exist, or a number breaks its rule.
    """
    law_name, law_values = _parsed("lengths", lengths_text)
    process_name, process_values = _parsed("arrivals", arrivals_text)
    try:
        law = _law(law_name, law_values)
        prompts, outputs = law.sample(stream(seed, "lengths"), num_requests)
        arrival_s = _arrivals(process_name, process_values, seed, num_requests)
    except GenerationError:
        raise
    except (ValueError, OverflowError) as error:
        raise GenerationError(f"{lengths_text}, {arrivals_text}: {error}") from error
    _require_readable(lengths_text, prompts, outputs)
    latest_s = float(arrival_s[-1] - arrival_s[0])
    if not latest_s <= LATEST_ARRIVAL_S:
        raise GenerationError(
            f"arrivals: {arrivals_text} reaches {latest_s:g} s; at most {LATEST_ARRIVAL_S:g} s"
        )
    return Trace(
        name="generated",
        source=f"lengths {lengths_text}, arrivals {arrivals_text}, seed {seed}",
        format="generated",
        arrival_s=arrival_s - arrival_s[0],
        prompt_tokens=np.maximum(prompts, 1),
        output_tokens=outputs,
    )


def _require_readable(text: str, *columns: NDArray[np.int64]) -> None:
    """What is written must be read back: the readers' limit of a token count."""
    largest = max(int(column.max()) for column in columns)
    if largest > LARGEST_TOKENS:
        raise GenerationError(
            f"lengths: {text} gives {largest:,} tokens; at most {LARGEST_TOKENS:,}"
        )


def servegen_trace(
    source: Path,
    *,
    seed: int,
    start_s: float,
    duration_s: float,
    rate_scale: float,
    clients: Sequence[int] | None,
) -> Trace:
    """One sample of ServeGen clients, from the stream ``servegen`` of a seed.

    Raises:
        TraceError: If the files break their format or do not cover the span.
        GenerationError: If a number breaks its rule.
    """
    try:
        return generate_servegen(
            source,
            stream(seed, "servegen"),
            start_s=start_s,
            duration_s=duration_s,
            rate_scale=rate_scale,
            clients=clients,
        )
    except TraceError:
        raise
    except ValueError as error:
        raise GenerationError(str(error)) from error


def _law(name: str, values: Mapping[str, float]) -> LengthPairs:
    if name in BUNDLED:
        _check_keys("lengths", name, values, {}, set())
        return bundled_lengths(name)
    function = _known("lengths", name, LAWS)
    _check_keys("lengths", name, values, *_parameters(function))
    law: LengthPairs = function(**values)
    return law


def _arrivals(
    name: str, values: Mapping[str, float], seed: int, num_requests: int
) -> NDArray[np.float64]:
    rng = stream(seed, "arrivals")
    if name in BUNDLED:
        _check_keys("arrivals", name, values, {"rate_scale": None}, set())
        return bundled_arrivals(name, rng, num_requests=num_requests, **values)
    function = _known("arrivals", name, PROCESSES)
    _check_keys("arrivals", name, values, *_parameters(function))
    arrival_s: NDArray[np.float64] = function(rng, num_requests=num_requests, **values)
    return arrival_s


def _parsed(field: str, text: str) -> tuple[str, dict[str, float]]:
    """``name:key=value,key=value`` taken apart; whole numbers become int."""
    name, _, rest = text.partition(":")
    values: dict[str, float] = {}
    for part in rest.split(",") if rest else []:
        key, sign, number = (piece.strip() for piece in part.partition("="))
        if not (key and sign):
            raise GenerationError(f"{field}: must be name:key=value,..., found {part!r}")
        try:
            value = float(number)
            values[key] = int(value) if value.is_integer() else value
        except (ValueError, OverflowError):
            raise GenerationError(f"{field}: {key} must be a number, found {number!r}") from None
    return name.strip(), values


def _known(field: str, name: str, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if name not in table:
        names = ", ".join((*table, *BUNDLED))
        raise GenerationError(f"{field}: must be one of {names}, found {name!r}")
    return table[name]


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, Any], set[str]]:
    """Parameters of a law that a text may give, and those among them that it must give."""
    found = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in _GIVEN
    }
    needed = {n for n, parameter in found.items() if parameter.default is inspect.Parameter.empty}
    return found, needed


def _check_keys(
    field: str, name: str, values: Mapping[str, float], allowed: Mapping[str, Any], needed: set[str]
) -> None:
    unknown, missing = [k for k in values if k not in allowed], needed - values.keys()
    takes = ", ".join(allowed) or "no values"
    if unknown:
        raise GenerationError(f"{field}: {name} takes {takes}; found {unknown[0]!r}")
    if missing:
        raise GenerationError(f"{field}: {name} takes {takes}; missing {min(missing)!r}")
