"""Seconds that the router reckons with: the twin's cost model with the numbers of this model.

Sizes are those of the checkpoint. The speed is nominal at first and then measured: of every answer
the engine says how long its prompt took, and the policy is told by how much that differs from its
costs. Where nothing is loaded from other machines only ratios matter, and those are right before
anything is measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from models.hf_config import HfConfigError, read_hf_config
from models.kv_bytes import kv_token_bytes
from models.llm_parameters import count_parameters
from models.llm_shape import AttentionShape
from models.prefix_costs import MISTRAL_7B_ON_A100, PrefillCost, PrefixCosts, TierSpeed
from runtime.engine.frames import EngineInfo

CPU_FLOPS_PER_S: Final = 1e11
CPU_BYTES_PER_S: Final = 2e10
GPU_FLOPS_PER_S: Final = MISTRAL_7B_ON_A100.flops_per_s * MISTRAL_7B_ON_A100.mfu
GPU_BYTES_PER_S: Final = MISTRAL_7B_ON_A100.memory_bytes_per_s
STORED_BYTES: Final = {"float32": 4}  # of a number; 2 for all other types
NOMINAL_TOKEN_BYTES: Final = 131_072


class RoutingCosts(NamedTuple):
    """What ``RequestRouting`` is built from."""

    prefill: PrefillCost
    costs: PrefixCosts
    block_bytes: int


def routing_costs(info: EngineInfo) -> RoutingCosts:
    """Costs of a model on its device; of a nominal one where its configuration is unknown."""
    is_cpu = info.device == "cpu"
    value_bytes = STORED_BYTES.get(info.dtype, 2)
    flops_per_s = CPU_FLOPS_PER_S if is_cpu else GPU_FLOPS_PER_S
    bytes_per_s = CPU_BYTES_PER_S if is_cpu else GPU_BYTES_PER_S
    try:
        shape = read_hf_config(info.model)
    except HfConfigError:
        prefill = MISTRAL_7B_ON_A100
        token_bytes = NOMINAL_TOKEN_BYTES
    else:
        counts = count_parameters(shape)
        attention = shape.layers[0].attention
        heads, head_dim = 0, 0
        if isinstance(attention, AttentionShape):
            heads, head_dim = attention.num_heads, attention.head_dim
        prefill = PrefillCost(
            parameters=counts.active,
            layers=len(shape.layers),
            heads=heads,
            head_dim=head_dim,
            weight_bytes=counts.active * value_bytes,
            flops_per_s=flops_per_s,
            mfu=1.0,
            memory_bytes_per_s=bytes_per_s,
        )
        token_bytes = kv_token_bytes(shape, value_bytes=value_bytes).inside
    costs = PrefixCosts(
        prefill=prefill,
        block_tokens=info.block_tokens,
        local=TierSpeed(bytes_per_s=5e9 if is_cpu else 14e9),
        remote=TierSpeed(bytes_per_s=3e9, request_s=60e-6),
        ssd=TierSpeed(bytes_per_s=3e9, request_s=100e-6),
    )
    return RoutingCosts(prefill, costs, max(1, token_bytes * info.block_tokens))


class PrefillSpeed:
    """Measured seconds of prefill over reckoned ones, older answers counting for less.

    A ratio of sums, so that long prompts count by their length and short ones add no noise.
    """

    KEPT: Final = 0.98  # of the sums, per answer: the last fifty or so count
    LEAST_CHANGE: Final = 0.2  # relative, that is worth telling the policy
    LEAST_ANSWERS: Final = 8

    def __init__(self, prefill: PrefillCost) -> None:
        self._prefill = prefill
        self._measured_s = self._reckoned_s = 0.0
        self._answers = 0
        self._told = 1.0

    def answer(self, prompt_tokens: int, cached_tokens: int, prefill_s: float) -> float | None:
        """Take in what an answer took; a factor when the policy should be told another one."""
        reckoned_s = self._prefill.seconds(prompt_tokens - cached_tokens, cached_tokens)
        if reckoned_s <= 0.0 or prefill_s <= 0.0:
            return None
        self._measured_s = self.KEPT * self._measured_s + prefill_s
        self._reckoned_s = self.KEPT * self._reckoned_s + reckoned_s
        self._answers += 1
        found = self._measured_s / self._reckoned_s
        is_news = abs(found - self._told) > self.LEAST_CHANGE * self._told
        if self._answers < self.LEAST_ANSWERS or not is_news:
            return None
        self._told = found
        return found
