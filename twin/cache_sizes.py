"""Sizes of a cache as a user writes them: a share of the different blocks, blocks, or bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from models.strict_tables import ScenarioError

DEFAULT_SIZES = ("1%", "2%", "5%", "10%", "20%", "50%", "100%")
UNIT_BYTES = {
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)},
}
MOST_BLOCKS = 2**53

_FORM = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|[A-Za-z]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """One point of a curve.

    Attributes:
        asked: What the user wrote, in one form: ``2%``, ``10,000 blocks``, ``64 GiB``.
        blocks: Capacity in blocks, >= 1.
    """

    asked: str
    blocks: int


def resolve_sizes(
    texts: Sequence[str], *, num_distinct: int, block_bytes: int
) -> tuple[CacheSize, ...]:
    """The sizes in blocks, smallest first; of several of equally many blocks the first is kept.

    Args:
        texts: ``2%`` of the different blocks, rounded and at least one; ``10000`` blocks; or
            ``64GiB`` (KiB..TiB, kB..TB), rounded down to whole blocks.
        num_distinct: Different blocks of the workload, >= 1.
        block_bytes: Bytes of a block, >= 1.

    Raises:
        ScenarioError: If a text is no size, or one out of range.
    """
    found: dict[int, CacheSize] = {}
    for text in texts:
        size = _resolve(text, num_distinct, block_bytes)
        found.setdefault(size.blocks, size)
    return tuple(found[blocks] for blocks in sorted(found))


def _resolve(text: str, num_distinct: int, block_bytes: int) -> CacheSize:
    form = _FORM.fullmatch(text.strip())
    unit = form.group(2).lower() if form else ""
    if form is None or (unit not in ("", "%") and unit not in UNIT_BYTES):
        raise ScenarioError(
            "--size: must be a share of the different blocks (2%), blocks (10000) or memory "
            f"(64GiB; KiB to TiB, kB to TB), found {text!r}"
        )
    number = float(form.group(1))
    if unit == "%":
        if not 0.0 < number <= 100.0:
            raise ScenarioError(f"--size: a share must be > 0 % and <= 100 %, found {text!r}")
        return CacheSize(f"{number:g}%", max(1, round(number / 100.0 * num_distinct)))
    if unit == "":
        blocks = int(number) if number <= MOST_BLOCKS else 0
        if blocks < 1 or blocks != number:
            raise ScenarioError(
                f"--size: blocks must be a whole number within 1..{MOST_BLOCKS:,}, found {text!r}"
            )
        return CacheSize(f"{blocks:,} block{'s' if blocks > 1 else ''}", blocks)
    blocks = int(number * UNIT_BYTES[unit] // block_bytes)
    if not 1 <= blocks <= MOST_BLOCKS:
        raise ScenarioError(
            f"--size: memory must hold 1..{MOST_BLOCKS:,} blocks of {block_bytes:,} bytes, "
            f"found {text!r}"
        )
    return CacheSize(f"{number:g} {form.group(2)}", blocks)
