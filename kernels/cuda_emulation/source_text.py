"""A kernel source and its own headers as one text, so that one hash covers what is compiled."""

from __future__ import annotations

import re
from pathlib import Path

INCLUDE = Path(__file__).resolve().parent / "include"
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.MULTILINE)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once.*$", re.MULTILINE)


def read_source(path: Path) -> str:
    """The file with every `#include "..."` that lies beside it written out once.

    The headers of the emulation (such as ptx_compat.h) stay includes: each compiler has its own.
    `#line` directives keep file names and line numbers of error messages true.

    Raises:
        FileNotFoundError: The file, or a local header that is not one of the emulation's either.
    """
    return _expand(path.resolve(), seen=set())


def _expand(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    text = _PRAGMA_ONCE.sub("", path.read_text())

    def replace(match: re.Match[str]) -> str:
        header = (path.parent / match[1]).resolve()
        next_line = text.count("\n", 0, match.start()) + 2
        if header.is_file():
            inner = "" if header in seen else _expand(header, seen)
            return f'{inner}\n#line {next_line} "{path.name}"'
        if (INCLUDE / match[1]).is_file():
            return match[0]
        raise FileNotFoundError(f"{path}: includes {match[1]!r}, which is not beside it")

    return f'#line 1 "{path.name}"\n' + _LOCAL_INCLUDE.sub(replace, text)
