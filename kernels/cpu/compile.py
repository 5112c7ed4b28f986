"""The C++ source made into a shared library, once per source, compiler, flags and processor.

The library lies in ``$XDG_CACHE_HOME/serving-twin`` (default ``~/.cache/serving-twin``) under a
name that is a hash of all it depends on, and gets there by a rename, so nobody ever sees half a
file; of processes that start at the same time one compiles and the others wait. It ends with a
checksum of itself, because loading a file that a full disk or an interrupted copy cut short would
end the process. Instruction sets beyond the machine's baseline are switched on per function, so a
home directory shared with an older processor does no harm; the processor's features are part of the
name all the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
MAIN_SOURCE = "api.cpp"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # no product fused here and not there: sums must not depend on the tile
)
COMPILERS = ("g++", "clang++", "c++")
COMPILE_TIMEOUT_S = 900
LOCK_NAME = "cpu-kernels.lock"
CHECKSUM_BYTES = hashlib.sha256().digest_size


class CompileError(RuntimeError):
    """No library could be made; the message is one line that says why."""


def cache_directory() -> Path:
    """Where libraries are kept between processes."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "serving-twin"


def find_compiler() -> str:
    """Path of ``$CXX``, else of the first of g++, clang++, c++ on ``$PATH``.

    Raises:
        CompileError: If there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    looked_for = f"CXX={wanted}" if wanted else ", ".join(COMPILERS)
    raise CompileError(f"no C++ compiler found ({looked_for})")


def processor_features() -> str:
    """The instruction sets of this processor, as the operating system names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return " ".join(sorted(flags[0].split(":", 1)[1].split())) if flags else ""


def compiled_library() -> Path:
    """Path of the library, compiled now if the cache has none that is whole.

    Raises:
        CompileError: If there is no compiler, it fails, or its output cannot be kept.
    """
    compiler = find_compiler()
    directory = cache_directory()
    path = directory / f"cpu-kernels-{_key(compiler)}.so"
    try:
        if path.exists() and _is_whole(path):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        with _compiling(directory):
            if not (path.exists() and _is_whole(path)):  # made by who had the turn before
                _compile(compiler, path)
    except OSError as error:
        raise CompileError(f"{directory}: {error.strerror or error}") from error
    return path


@contextmanager
def _compiling(directory: Path) -> Iterator[None]:
    """One process at a time compiles; what a killed one left behind is cleared away."""
    with (directory / LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in directory.glob("cpu-kernels-*.part"):
            left.unlink(missing_ok=True)
        yield


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCE.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = _run([compiler, "--version"]).splitlines()[:1]
    parts = (*FLAGS, compiler, *version, platform.machine(), sys.platform, processor_features())
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        _run([compiler, *FLAGS, "-o", name, str(SOURCE / MAIN_SOURCE)])
        with partial.open("r+b") as file:
            file.write(_checksum(file.read()))  # loaders do not look behind a library's own end
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_whole(path: Path) -> bool:
    data = path.read_bytes()
    return _checksum(data[:-CHECKSUM_BYTES]) == data[-CHECKSUM_BYTES:]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise CompileError(f"{command[0]} ended with {done.returncode}: {said[0]}")
    return done.stdout
