"""Which experts a token is sent to, and with what weight."""

from __future__ import annotations

import torch

from runtime.model.norms import RmsNorm
from runtime.model.spec import ModelSpec, MoeSpec
from runtime.model.weights import Weights


class Router:
    """Softmax over all experts, then the largest of them.

    Args:
        model: Its sizes.
        moe: Of the layer.
        weights: Of the layer.
    """

    def __init__(self, model: ModelSpec, moe: MoeSpec, weights: Weights) -> None:
        self._moe = moe
        self._norm: RmsNorm | None = None
        self._expert_scale: torch.Tensor | None = None
        name = "mlp.gate"
        if moe.norms_router_input:
            name = "router.proj"
            scale = weights.vector("router.scale", model.hidden) * model.hidden**-0.5
            self._norm = RmsNorm(scale, model.norm_epsilon)
            self._expert_scale = weights.vector("router.per_expert_scale", moe.experts)
        self._scores = weights.linear([name], [moe.experts], model.hidden)

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and gate weights.

        A token whose numbers are no longer finite gets experts that exist, and weights that are
        not a number.

        Args:
            hidden: [T, H] float32.

        Returns:
            [T, k] int64 within 0..experts - 1, and [T, k] float32.
        """
        if self._norm is not None:
            hidden = self._norm(hidden)
        return choose_experts(self._scores(hidden), self._moe, self._expert_scale)


def choose_experts(
    scores: torch.Tensor, moe: MoeSpec, expert_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and gate weights from the router's scores [T, experts]; see ``Router``."""
    weights, chosen = torch.topk(torch.softmax(scores, dim=-1), moe.experts_per_token, dim=-1)
    chosen = chosen.clamp_(0, moe.experts - 1)  # no device promises it for rows of NaN
    if moe.renormalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale[chosen]
    return chosen, weights
