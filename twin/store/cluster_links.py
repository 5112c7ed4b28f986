"""The links of a cluster, and the paths that blocks take over them."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from models.prefix_settings import ClusterLinks
from twin.store.fair_links import FairLinks, Link

KINDS = ("network in", "network out", "to device", "from device", "SSD")


class ClusterNetwork:
    """Adapters of nodes, the processes of GPUs behind them, copy engines and SSDs.

    A remote read holds the sender's adapter, the receiver's adapter and the reading process at
    once; where transfers meet they share max-min fair. A copy between host and device and an SSD
    are links of their own, crossed one after the other.
    """

    def __init__(
        self,
        env: simpy.Environment,
        nodes: Sequence[str],
        gpus_per_node: int,
        links: ClusterLinks,
    ) -> None:
        """Lay out the links of these nodes."""
        self._fair = FairLinks(env)
        self._gpus_per_node, self._nodes = gpus_per_node, tuple(nodes)
        num_gpus = gpus_per_node * len(self._nodes)
        nic, client = links.nic_bytes_per_s, links.client_bytes_per_s
        self._in = {node: Link(f"{node} in", nic) for node in nodes}
        self._out = {node: Link(f"{node} out", nic) for node in nodes}
        self._ssd = {node: Link(f"{node} SSD", links.ssd_bytes_per_s) for node in nodes}
        self._client_in = [Link(f"gpu {g} network in", client) for g in range(num_gpus)]
        self._client_out = [Link(f"gpu {g} network out", client) for g in range(num_gpus)]
        copy = links.host_to_device_bytes_per_s
        self._to_device = [Link(f"gpu {g} to device", copy) for g in range(num_gpus)]
        self._from_device = [Link(f"gpu {g} from device", copy) for g in range(num_gpus)]

    def between(self, owner: str, gpu: int, size_bytes: float) -> simpy.Event:
        """From another node's memory to the memory of a GPU's node."""
        node = self._nodes[gpu // self._gpus_per_node]
        path = (self._out[owner], self._in[node], self._client_in[gpu])
        return self._fair.transfer(path, size_bytes)

    def out_of(self, gpu: int, owner: str, size_bytes: float) -> simpy.Event:
        """From a GPU's node to another node's memory."""
        node = self._nodes[gpu // self._gpus_per_node]
        path = (self._client_out[gpu], self._out[node], self._in[owner])
        return self._fair.transfer(path, size_bytes)

    def to_device(self, gpu: int, size_bytes: float) -> simpy.Event:
        """Host memory to GPU."""
        return self._fair.transfer((self._to_device[gpu],), size_bytes)

    def from_device(self, gpu: int, size_bytes: float) -> simpy.Event:
        """GPU to host memory."""
        return self._fair.transfer((self._from_device[gpu],), size_bytes)

    def on_ssd(self, node: str, size_bytes: float) -> simpy.Event:
        """Read from or written to a node's SSD."""
        return self._fair.transfer((self._ssd[node],), size_bytes)

    def by_kind(self) -> dict[str, list[Link]]:
        """Kind -> its links; those of single GPUs' network shares are part of their node's."""
        return {
            "network in": list(self._in.values()),
            "network out": list(self._out.values()),
            "to device": self._to_device,
            "from device": self._from_device,
            "SSD": list(self._ssd.values()),
        }
