"""One pass of calibration text through a model, its expert layers watched.

The experts modules are watched with hooks, so the pass works for every model that calls them with
(hidden_states, top_k_index, top_k_weights), whatever its attention or router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from runtime.calibration_experts import ExpertsLayer
from runtime.calibration_sums import LayerSums, Weighting

Labels = Literal["text", "model"]
Progress = Callable[[int], None]


@contextmanager
def watched(
    layers: Sequence[ExpertsLayer],
    seen: Callable[
        [int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None
    ],
    *,
    gradients: bool,
) -> Iterator[None]:
    """Call ``seen(i, inputs, expert_index, gate_weight, output, output_gradient)`` for every layer.

    With gradients it is called in the backward pass, else in the forward pass with None.
    Hooks are removed at the end, whatever happens.
    """
    handles = []

    def hook(i: int) -> Callable[..., None]:
        def forward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            names = ("hidden_states", "top_k_index", "top_k_weights")
            given = (*args, *(kwargs[name] for name in names[len(args) :]))
            inputs, index, gate = (tensor.detach() for tensor in given[:3])
            inputs = inputs.reshape(-1, inputs.shape[-1])
            index, gate = (t.reshape(-1, t.shape[-1]) for t in (index, gate))
            out = output.detach().reshape(inputs.shape)
            if gradients:
                output.register_hook(
                    lambda g: seen(i, inputs, index, gate, out, g.detach().reshape(inputs.shape))
                )
            else:
                seen(i, inputs, index, gate, out, None)

        return forward

    try:
        for i, experts in enumerate(layers):
            handles.append(experts.module.register_forward_hook(hook(i), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def summed_loss(
    logits: torch.Tensor, tokens: torch.Tensor, labels: Labels, generator: torch.Generator
) -> torch.Tensor:
    """Negative log-likelihood in nats, summed over all next tokens.

    Args:
        logits: [B, T, V].
        tokens: [B, T] the text.
        labels: ``text``: the text's own next tokens (empirical Fisher information); ``model``:
            tokens drawn from the model (Fisher information, the Gauss-Newton curvature).
        generator: For the drawn tokens.
    """
    flat = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    target = tokens[:, 1:].reshape(-1)
    if labels == "model":
        probabilities = torch.softmax(flat.detach(), dim=-1)
        target = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return torch.nn.functional.cross_entropy(flat, target, reduction="sum")


def accumulate(
    model: Any,
    layers: Sequence[ExpertsLayer],
    sequences: torch.Tensor,
    *,
    weighting: Weighting = "gradient",
    layer_gradients: bool = True,
    labels: Labels = "text",
    max_full_columns: int = 8192,
    batch_sequences: int = 4,
    seed: int = 0,
    progress: Progress = lambda tokens: None,
) -> tuple[LayerSums, ...]:
    """Sums of some layers over calibration text, in one pass.

    Args:
        model: A transformers causal language model; left in evaluation mode.
        layers: The layers to watch.
        sequences: [n, T] token ids.
        weighting: How tokens count, see ``LayerSums``.
        layer_gradients: Take the layer scale from gradients; False with ``gate`` saves the
            backward pass and takes 1/E||y||^2.
        labels: Which next tokens the loss is of.
        max_full_columns: Blocks with more columns keep the diagonal only.
        batch_sequences: Sequences at a time.
        seed: Seed of drawn labels.
        progress: Told the number of tokens after every batch.

    Returns:
        One LayerSums per layer.
    """
    sums = tuple(
        LayerSums(x, weighting=weighting, max_full_columns=max_full_columns) for x in layers
    )
    generator = torch.Generator().manual_seed(seed)
    gradients = layer_gradients or weighting == "gradient"
    model.eval()
    required = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: output.requires_grad_(gradients)
    )
    try:
        with (
            watched(layers, lambda i, *batch: sums[i].add(*batch), gradients=gradients),
            torch.set_grad_enabled(gradients),
        ):
            for start in range(0, len(sequences), batch_sequences):
                tokens = sequences[start : start + batch_sequences]
                logits = model(input_ids=tokens, use_cache=False).logits
                if gradients:
                    summed_loss(logits, tokens, labels, generator).backward()  # type: ignore[no-untyped-call]
                progress(tokens.numel())
    finally:
        embedding.remove()
        for parameter, value in zip(model.parameters(), required, strict=True):
            parameter.requires_grad_(value)
    return sums
