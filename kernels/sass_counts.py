"""Machine instructions of a kernel's inner loops, counted by the unit that executes them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"^\.text\.(\S+):$")
_LABEL = re.compile(r"^(\.L_\S+):$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*);")
_TARGET = re.compile(r"`\((\.L_[^)]+)\)")
_UNITS = {
    "shared memory": ("LDS", "STS", "LDSM", "ATOMS"),
    "global memory": ("LDG", "STG", "LD", "ST", "LDGSTS", "RED", "ATOM", "ATOMG"),
    "tensor cores": ("HMMA", "IMMA"),
    "multiply-add": ("IMAD", "FFMA", "FADD", "FMUL", "HADD2", "HFMA2", "HMUL2", "IDP"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "BAR", "WARPSYNC", "NOP", "RET", "CALL", "DEPBAR"),
}
_UNIT_BY_OPCODE = {opcode: unit for unit, opcodes in _UNITS.items() for opcode in opcodes}


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop: instructions of one turn.

    Attributes:
        opcodes: How many of each, without modifiers ("LDS.U16" and "LDS.128" are both "LDS").
        table_reads: 16-bit reads of shared memory, one a weight where tables lie there.
    """

    opcodes: Counter[str]
    table_reads: int

    def by_unit(self) -> dict[str, int]:
        """Instructions by executing unit; what is not listed runs on the integer units."""
        units: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            units[_UNIT_BY_OPCODE.get(opcode, "integer")] += count
        return dict(units)

    @property
    def tensor_ops(self) -> int:
        """Tensor-core instructions of one turn."""
        return self.opcodes["HMMA"] + self.opcodes["IMMA"]


def find_nvdisasm() -> Path | None:
    """The disassembler on PATH or in the nvidia-cuda-nvdisasm wheel; None without."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or ()) if spec else []:
        path = Path(root) / "cu13" / "bin" / "nvdisasm"
        if path.is_file():
            return path
    return None


def disassemble(cubin: bytes, nvdisasm: Path) -> str:
    """Text of `nvdisasm -c`.

    Raises:
        subprocess.CalledProcessError: The disassembler refuses the cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        call = [str(nvdisasm), "-c", str(path)]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout


def inner_loops(text: str) -> dict[str, list[Loop]]:
    """Innermost loops of every function in order of address: from a label to the jump back to it.

    Args:
        text: As `disassemble` gives it.
    """
    found: dict[str, list[Loop]] = {}
    for name, lines in _functions(text):
        found[name] = [_loop(lines[first:last]) for first, last in _innermost(lines)]
    return found


def _functions(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in text.splitlines():
        start = _FUNCTION.match(line)
        if start:
            if name:
                yield name, lines
            name, lines = start[1], []
        elif name:
            lines.append(line)
    if name:
        yield name, lines


def _innermost(lines: list[str]) -> list[tuple[int, int]]:
    label_at = {m[1]: i for i, line in enumerate(lines) if (m := _LABEL.match(line))}
    spans = []
    for i, line in enumerate(lines):
        m = _INSTRUCTION.match(line)
        target = _TARGET.search(line) if m and m[1] == "BRA" else None
        # a jump to itself ends every function and is no loop
        if target and label_at.get(target[1], i) < i - 1:
            spans.append((label_at[target[1]], i + 1))
    inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    return sorted(inner)


def _loop(lines: list[str]) -> Loop:
    opcodes: Counter[str] = Counter()
    table_reads = 0
    for line in lines:
        m = _INSTRUCTION.match(line)
        if m:
            opcodes[m[1].split(".")[0]] += 1
            table_reads += m[1].startswith("LDS.U16")
    return Loop(opcodes, table_reads)
