"""The cluster of a scenario in numbers: model, device, tiers, links."""

from __future__ import annotations

from dataclasses import dataclass

from models.kv_bytes import kv_token_bytes
from models.llm_catalog import load_llm
from models.llm_parameters import count_parameters
from models.llm_shape import AttentionShape
from models.prefix_costs import PrefillCost, PrefixCosts, TierSpeed
from models.prefix_settings import ClusterLinks, PrefixScenario, RoutingName
from models.strict_tables import ScenarioError
from policies.catalog import OWNERS
from policies.prefix.owners import OwnerRule

WEIGHT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What every system of an experiment runs on.

    Attributes:
        model: Its name.
        prefill: Seconds of computing prompts on one GPU.
        token_bytes: Bytes of keys and values of a token, all layers.
        nodes, gpus_per_node: Numbers of them.
        cache_tokens: Tokens that a GPU's prefix cache holds.
        links: Speeds.
        routing: Which GPU gets a request.
        owners: Which node keeps a region.
    """

    model: str
    prefill: PrefillCost
    token_bytes: int
    nodes: int
    gpus_per_node: int
    cache_tokens: int
    links: ClusterLinks
    routing: RoutingName
    owners: OwnerRule

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def costs(
        self, block_tokens: int, *, lookup_s: float = 0.0, overlap: float = 0.0
    ) -> PrefixCosts:
        """What blocks cost with nothing else on the links.

        Of the network's part only ``1 - overlap`` shows, as far as the copy to the device, which
        runs beside it, lasts that long.
        """
        links = self.links
        net_s, copy_s = 1.0 / links.client_bytes_per_s, 1.0 / links.host_to_device_bytes_per_s
        shown_s = max((1.0 - overlap) * net_s, net_s - copy_s if overlap > 0.0 else 0.0)
        return PrefixCosts(
            prefill=self.prefill,
            block_tokens=block_tokens,
            local=TierSpeed(bytes_per_s=links.host_to_device_bytes_per_s),
            remote=TierSpeed(
                bytes_per_s=1.0 / shown_s if shown_s > 0.0 else 1e18, request_s=links.rpc_s
            ),
            ssd=TierSpeed(bytes_per_s=links.ssd_bytes_per_s),
            lookup_s=lookup_s,
        )


def build_deployment(scenario: PrefixScenario) -> Deployment:
    """The deployment of a scenario.

    Raises:
        ScenarioError: If the model's attention is of another kind, or weights do not fit the GPU.
        HfConfigError: If the model is not known or its configuration cannot be used.
    """
    shape = load_llm(scenario.llm.model)
    attention = [layer.attention for layer in shape.layers]
    first = attention[0]
    if not all(isinstance(one, AttentionShape) for one in attention) or not isinstance(
        first, AttentionShape
    ):
        raise ScenarioError(
            f"[llm] model: {shape.name} has latent attention; grouped-query attention in every "
            "layer is needed here"
        )
    gpu = scenario.gpu
    counts = count_parameters(shape)
    # every layer keeps all tokens: a window, where the model has one, is not used here
    token_bytes = kv_token_bytes(shape, value_bytes=scenario.llm.kv_value_bytes).inside
    weight_bytes = WEIGHT_BYTES * counts.total
    free_bytes = gpu.memory_bytes * gpu.memory_share - weight_bytes - gpu.activation_bytes
    cache_tokens = gpu.cache_tokens
    if cache_tokens is None:
        cache_tokens = int(free_bytes // token_bytes)
        if cache_tokens < 1:
            raise ScenarioError(
                f"[gpu] memory_bytes: {weight_bytes / 1e9:.1f} GB of weights and "
                f"{gpu.activation_bytes / 1e9:.1f} GB of activations leave no room for a cache; "
                "give a larger memory or [gpu] cache_tokens"
            )
    return Deployment(
        model=shape.name,
        prefill=PrefillCost(
            parameters=counts.active,
            layers=len(shape.layers),
            heads=first.num_heads,
            head_dim=first.head_dim,
            weight_bytes=weight_bytes,
            flops_per_s=gpu.flops_per_s,
            mfu=gpu.mfu,
            memory_bytes_per_s=gpu.memory_bytes_per_s,
            forward_s=gpu.forward_s,
        ),
        token_bytes=token_bytes,
        nodes=scenario.cluster.nodes,
        gpus_per_node=scenario.cluster.gpus_per_node,
        cache_tokens=cache_tokens,
        links=scenario.links,
        routing=scenario.prefix.routing,
        owners=OWNERS[scenario.prefix.owners](),
    )
