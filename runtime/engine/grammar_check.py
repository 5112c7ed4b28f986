"""Compiles one grammar in a process of its own, so one that would never end can be ended.

llguidance budgets its lexer and parser, but not the intersection of string restrictions in a JSON
schema: 30 patterns under one ``allOf`` take for ever, in native code that no thread can stop. This
file runs by its path and imports nothing of ours, so a check costs about a tenth of a second.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

MAX_CHECK_CPU_S = 2
"""Processor seconds for one grammar."""

_MAX_MEMORY_BYTES = 4 << 30
_MAX_WALL_S = 30.0
_RESTRICTIONS = ("pattern", "format", "minLength", "maxLength", "multipleOf")
_HARMLESS_RESTRICTIONS = 4
_HARMLESS_BYTES = 8192


def may_be_costly(text: str, schema: object) -> bool:
    """Whether a JSON schema is long, or restricts strings so often that they could pile up.

    Args:
        text: The schema's text.
        schema: The same, parsed.
    """
    if len(text) > _HARMLESS_BYTES:
        return True
    num_restrictions = 0
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            num_restrictions += sum(name in node for name in _RESTRICTIONS)
            patterns = node.get("patternProperties")
            num_restrictions += len(patterns) if isinstance(patterns, dict) else 0
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return num_restrictions > _HARMLESS_RESTRICTIONS


def compiles_in_time(source: str) -> bool:
    """Whether llguidance is done with the grammar, valid or not, within the limits.

    Args:
        source: The grammar in llguidance's own form.

    Raises:
        RuntimeError: If the process for the check does not work.
    """
    # -P: the modules beside this file are not to be found by their bare names.
    command = [sys.executable, "-P", str(Path(__file__).resolve())]
    try:
        done = subprocess.run(
            command,
            input=source.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode > 0:
        last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"the check of a grammar could not run: {last_line}")
    return done.returncode == 0  # below 0: a signal, of a limit


def _check() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CHECK_CPU_S, MAX_CHECK_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher

    LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())


if __name__ == "__main__":
    _check()
