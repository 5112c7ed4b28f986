"""Kernel source to a shared library for this processor, by the system's C++ compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from kernels.cuda_emulation.build_cache import cached_file, content_key
from kernels.cuda_emulation.source_text import INCLUDE

_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_KERNEL = re.compile(
    rf'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*{_PARENTHESES}\s*)?void\s+'
    rf"(?:__launch_bounds__\s*{_PARENTHESES}\s*)?(\w+)\s*\("
)
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s+)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)


class EmulationError(RuntimeError):
    """The kernel did something that is an error or undefined on a GPU, or was called wrongly."""


@cache
def compiler() -> str | None:
    """Path of the C++ compiler; None where there is none (tests skip then)."""
    return shutil.which("g++") or shutil.which("c++")


def available() -> bool:
    """Whether kernels can be emulated here."""
    return compiler() is not None


def kernel_names(source: str) -> list[str]:
    """Names of the `extern "C" __global__` functions; those that a macro makes are not seen."""
    return _KERNEL.findall(_DEFINE.sub("", _COMMENT.sub(" ", source)))


def _host_source(source: str, name_expressions: tuple[str, ...]) -> str:
    body = _DYNAMIC_SHARED.sub(r"CUEMU_DYN_SHARED(\1, \2);", source)
    exports = [f"CUEMU_EXPORT({name}, {name})" for name in kernel_names(source)]
    exports += [f"CUEMU_EXPORT(expr{i}, {e})" for i, e in enumerate(name_expressions)]
    return "\n".join(['#include "cuemu.h"', '#line 1 "kernel.cu"', body, *exports, ""])


def _flags(options: tuple[str, ...], ubsan: bool) -> list[str]:
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    flags += ["-w", "-ftrivial-auto-var-init=pattern", "-fvisibility=hidden"]
    if platform.machine() == "x86_64":
        flags.append("-march=x86-64-v3")
    if ubsan:
        flags += ["-fsanitize=undefined", "-fno-sanitize=vptr"]
        flags.append("-fsanitize-undefined-trap-on-error")
    return flags + [option for option in options if option.startswith(("-D", "-I", "-U"))]


@cache
def _header_texts() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(INCLUDE.glob("*.h")))


def build_library(
    source: str, options: tuple[str, ...], name_expressions: tuple[str, ...], ubsan: bool
) -> Path:
    """Path of the shared library with one launcher per kernel, from the cache when unchanged.

    Args:
        source: One text, as `read_source` gives it.
        options: -D, -I and -U are passed on, everything else means something to nvcc alone.
        name_expressions: Template instances to export, such as "block_max<float, 64>".
        ubsan: Trap on misaligned vector access and other undefined behaviour.

    Raises:
        EmulationError: There is no compiler, or the source does not compile.
    """
    command = compiler()
    if command is None:
        raise EmulationError("no C++ compiler: install g++ 12 or newer to emulate kernels")
    text = _host_source(source, name_expressions)
    flags = _flags(options, ubsan)

    def build(library: Path) -> None:
        unit = library.with_suffix(".cpp")
        unit.write_text(text)
        call = [command, *flags, f"-I{INCLUDE}", str(unit), "-o", str(library)]
        english = {**os.environ, "LC_ALL": "C"}  # messages without typographic quotes
        done = subprocess.run(call, capture_output=True, text=True, check=False, env=english)
        if done.returncode:
            raise EmulationError("host compile failed:\n" + _first_errors(done.stderr))

    return cached_file(content_key([*_header_texts(), text, command, *flags]), ".so", build)


def _first_errors(log: str, limit: int = 12) -> str:
    lines = [line for line in log.splitlines() if "error:" in line]
    return "\n".join(lines[:limit] or log.splitlines()[:limit])
