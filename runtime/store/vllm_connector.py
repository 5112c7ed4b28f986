"""The prefix store as a KV connector of vLLM.

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "PrefixStoreConnector",
        "kv_connector_module_path": "runtime.store.vllm_connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": "/run/ptstore.sock"}}'

vLLM makes one connector in its scheduler and one in each worker. This file is the seam: what vLLM
calls, in its types; the halves themselves know no vLLM. Loads are asynchronous, so a request that
waits for its blocks holds up no other; a block that does not come is reported by its page and
computed.

Source: ``KVConnectorBase_V1`` of vLLM 0.32.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from policies.prefix.keys import Namespace
from runtime.store.errors import StoreSetupError
from runtime.store.kv_blocks import KvBlocks
from runtime.store.tensor_staging import HostDevice, StagingPool, TorchDevice
from runtime.store.vllm_counts import Counts
from runtime.store.vllm_guard import GuardedStore
from runtime.store.vllm_identity import check_supported, model_identity
from runtime.store.vllm_open import open_for_engine
from runtime.store.vllm_orders import RankIdentity, StepOrders
from runtime.store.vllm_rank import rank_identity
from runtime.store.vllm_scheduler import StoreScheduler
from runtime.store.vllm_settings import ConnectorSettings
from runtime.store.vllm_stats import StoreConnectorStats, StorePromMetrics
from runtime.store.vllm_worker import CHUNKS, StoreWorker

logger = logging.getLogger("vllm.ptstore")


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, on their way from the scheduler to the workers."""

    orders: StepOrders


@dataclasses.dataclass
class RankMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one worker holds, on its way to the scheduler."""

    identity: RankIdentity


class PrefixStoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads stored prefixes into vLLM's cache and stores what vLLM computes.

    Raises:
        StoreSetupError: On construction, for settings or a model that cannot be stored whole.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.from_extra(transfer.kv_connector_extra_config)
        self._page_tokens = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._pages_per_block = self._settings.pages_per_block(self._page_tokens)
        self._counts = Counts()
        self._worker: StoreWorker | None = None
        self._scheduler: StoreScheduler | None = None
        self._identity: RankIdentity | None = None
        self._store = self._guarded(None)
        if role == KVConnectorRole.SCHEDULER:
            self._model, self._revision = model_identity(vllm_config, self._settings.revision)
            self._scheduler = StoreScheduler(
                self._settings,
                self._store,
                self._counts,
                page_tokens=self._page_tokens,
                namespace=self._namespace,
                extra_keys=_extra_keys,
                pages_of=self._pages_of,
                may_load=transfer.is_kv_consumer,
                may_save=transfer.is_kv_producer,
            )

    # --- worker ------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the pages are and how they are packed; called before any request."""
        num_pages = self._kv_cache_config.num_blocks
        blocks = KvBlocks(kv_caches, num_pages, self._pages_per_block)
        self._identity = rank_identity(
            self._vllm_config, self._kv_cache_config, blocks, kv_caches, self._page_tokens
        )
        self._store = self._guarded(blocks.block_bytes)
        device: Any = HostDevice() if blocks.is_host else TorchDevice(blocks.device)
        capacity = max(self._settings.staging_bytes, 2 * CHUNKS * blocks.block_bytes)
        self._worker = StoreWorker(
            self._settings,
            self._store,
            self._counts,
            blocks=blocks,
            staging=StagingPool(device, capacity),
            identity=self._identity,
        )
        is_open = self._store.open()
        logger.info(
            "prefix store %s; %d layers, blocks of %d tokens and %d bytes",
            "open" if is_open else "absent, requests are computed without it",
            len(blocks.layers),
            self._page_tokens * self._pages_per_block,
            blocks.block_bytes,
        )

    def get_handshake_metadata(self) -> RankMetadata | None:
        """What this worker holds; the scheduler names blocks by it."""
        return None if self._identity is None else RankMetadata(self._identity)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads; returns at once."""
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only after its load ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: a block is all layers and is copied when the step ends."""

    def wait_for_save(self) -> None:
        """Copy the step's full blocks out of their pages; returns before they are stored."""
        if self._worker is not None:
            self._worker.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose last save was copied out, and requests whose load ended."""
        if self._worker is None:
            return None, None
        is_idle = self.has_connector_metadata() and self._orders().is_idle
        sent, received = self._worker.poll(finished_req_ids, is_idle=is_idle)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that a load that just ended did not fill."""
        return set() if self._worker is None else self._worker.take_failed_pages()

    # --- scheduler ---------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn what each worker holds, by pipeline and tensor rank."""
        identities = [
            metadata[rank].identity
            for rank in sorted(metadata)
            if isinstance(metadata[rank], RankMetadata)
        ]
        expected = self._vllm_config.parallel_config.world_size
        if len(identities) != expected:
            raise StoreSetupError(
                f"{len(identities)} of {expected} workers told the prefix store what they hold"
            )
        if self._scheduler is not None:
            self._scheduler.set_identities(identities)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Stored tokens beyond vLLM's own; None while the store is asked."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of so many tokens with the next step."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's orders."""
        if self._scheduler is None:
            return StepMetadata(StepOrders())
        scheduled = scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = {
            new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs
        }
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: count + scheduled.get(name, 0) for name, count in computed.items()}
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        return StepMetadata(self._scheduler.step(ends, is_idle=is_idle))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads ended, and how."""
        if self._scheduler is not None:
            self._scheduler.received(
                connector_output.finished_recving or (), connector_output.invalid_block_ids or ()
            )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM keeps the pages until the last full blocks were copied out."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.finished(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        """None: other engines ask the store itself, which knows what it still holds."""
        return ()

    def reset_cache(self) -> bool:
        """Find nothing that was stored so far, such as after new weights were loaded in place."""
        if self._scheduler is not None:
            self._revision = f"{self._revision}+reset-{secrets.token_hex(16)}"
            self._scheduler.forget()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a block that was not stored is computed again by whoever needs it."""
        return False

    # --- both --------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Store what was copied out, and let the store go."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._store.close()

    def get_kv_connector_stats(self) -> StoreConnectorStats | None:
        """What happened since the last call."""
        amounts = self._counts.take()
        return StoreConnectorStats(data=dict(amounts)) if amounts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> StoreConnectorStats | None:
        """The statistics of this connector from their plain form."""
        return StoreConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StorePromMetrics:
        """The Prometheus series of this connector."""
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def _guarded(self, block_bytes: int | None) -> GuardedStore:
        return GuardedStore(
            partial(open_for_engine, self._settings, block_bytes),
            self._counts,
            retry_s=self._settings.retry_s,
        )

    def _pages_of(self, request_id: str) -> list[int]:
        manager = self._kv_cache_manager
        assert manager is not None
        pages: list[int] = manager.get_block_ids(request_id)[0]
        return pages

    def _namespace(self, identity: RankIdentity, adapter: str) -> Namespace:
        cache_dtype = str(self._vllm_config.cache_config.cache_dtype)
        model_dtype = str(self._vllm_config.model_config.dtype).removeprefix("torch.")
        return Namespace(
            model=self._model,
            revision=self._revision,
            dtype=model_dtype if cache_dtype == "auto" else cache_dtype,
            layout=identity.layout,
            layers=identity.layers,
            kv_heads=identity.kv_heads,
            block=self._page_tokens * self._pages_per_block,
            adapter=adapter,
        )


def _extra_keys(request: Any, start: int, end: int, media: int) -> tuple[Iterable[Any] | None, int]:
    """What vLLM's own prefix cache takes for shaping a block besides its tokens."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extra: tuple[Iterable[Any] | None, int] = generate_block_hash_extra_keys(
        request, start, end, media
    )
    return extra
