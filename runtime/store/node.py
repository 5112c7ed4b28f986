"""One node of the store: everything behind the library, the unix socket and the peers' port."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from policies.catalog import OWNERS
from policies.prefix.directory import Directory
from policies.prefix.store_log import LoggedStore
from policies.prefix.store_orders import NewBlock
from policies.prefix.store_policy import StorePolicy
from policies.prefix.store_settings import StoreSettings
from runtime.store.arena import SharedArena, arena_path, sweep_arenas
from runtime.store.background import Background
from runtime.store.blocks import BlockInfo, checksum
from runtime.store.calls import Calls
from runtime.store.config import StoreConfig
from runtime.store.counters import Counters
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.flusher import MOST_BLOCKS, Flusher
from runtime.store.forks import keep_lock, release_lock
from runtime.store.incarnation import next_incarnation
from runtime.store.leases import Holder
from runtime.store.node_load import FetchMany, Loader, Offer
from runtime.store.node_memory import NodeMemory, Room
from runtime.store.node_put import Reservation, Writer
from runtime.store.node_sources import worth_loading
from runtime.store.node_state import NodeState
from runtime.store.nominal_costs import nominal_costs
from runtime.store.owner_sender import OwnerSender, RegionToSend, SendRegion
from runtime.store.peer_messages import Announcement, Removal
from runtime.store.ssd import SsdTier
from traces.decisions import DecisionLog

HOUSEKEEPING_S = 0.5
COMPACTION_S = 10.0
OnChange = Callable[[Sequence[Announcement], Sequence[Removal]], None]

_log = structlog.get_logger("store")


class StoreNode:
    """Blocks of one node, for any number of readers and writers.

    Attributes:
        config: As set up.
        state: Shared by the parts.
        arena: The shared memory.
        calls: What runs; after ``close`` every verb raises ``StoreUnavailableError``, and what only
            gives something back does nothing.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Open the node's folder, take over what is there, and be ready.

        Raises:
            StoreSetupError: If the folder, memory or SSD cannot be used, or are used by another.
        """
        self.config = config
        self._lock_file = _lock_folder(config.folder)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(release_lock, self._lock_file)
        try:
            self._open()
        except BaseException:
            self._cleanup.close()
            raise

    def _open(self) -> None:
        config = self.config
        counters = Counters()
        incarnation = next_incarnation(config.folder / "incarnation")
        num_slots = config.dram_bytes // config.block_bytes
        path = arena_path(config.folder)
        sweep_arenas()
        self.arena = SharedArena.create(
            path, slot_bytes=config.block_bytes, num_slots=num_slots, folder=config.folder
        )
        self._cleanup.callback(self._close_arena)
        ssd = None
        if config.ssd_bytes > 0:
            ssd = SsdTier.open(
                config.folder / "ssd",
                capacity_bytes=config.ssd_bytes,
                segment_bytes=_segment_bytes(config),
            )
            self._cleanup.callback(ssd.close)
        settings = StoreSettings(
            memory_bytes=config.policy_memory_bytes,
            ssd_bytes=0 if ssd is None else _ssd_room(ssd, config.block_bytes),
            eviction=config.eviction,
            ssd_eviction=config.ssd_eviction,
            replicas=config.replicas,
            replica_share=config.replica_share,
            flush=config.flush,
            num_nodes=2 if self._is_pooled else 1,
            quota_bytes=dict(config.quota_bytes.items()),
        )
        costs = config.costs or nominal_costs(config.block_bytes)
        self.decisions = DecisionLog(max_calls=config.log_calls)
        policy = (
            LoggedStore(settings, costs, self.decisions)
            if config.log_calls
            else StorePolicy(settings, costs)
        )
        memory = NodeMemory(
            self.arena, policy, counters, lambda key: self.state.gone(key, "memory")
        )
        self.state = NodeState(
            config=config,
            incarnation=incarnation,
            policy=policy,
            memory=memory,
            ssd=ssd,
            directory=Directory(),
            owner_rule=OWNERS[config.owner_rule](),
            counters=counters,
            weights={config.node: 1.0},
            on_change=lambda added, removed: self._on_change(added, removed),
        )
        self._on_change: OnChange = lambda added, removed: None
        self.pool_counters: Callable[[], Mapping[str, int]] = dict
        unsaved = self._recover()
        self._holders = itertools.count(1)
        self._executor = ThreadPoolExecutor(8, thread_name_prefix="store-fetch")
        self._cleanup.callback(self._executor.shutdown)
        self._flusher = Background(
            "store-flush",
            Flusher(self.state).write,
            most_jobs=MOST_BLOCKS,
            most_waiting=num_slots + MOST_BLOCKS,  # what waits longer has been evicted since
            on_error=self._failed,
            on_drop=lambda count: counters.add("flushes_dropped", count),
        )
        self.queue_flush(unsaved)
        self._sender: Background[RegionToSend] | None = None
        self._loader = Loader(self.state, self._executor, None, self.queue_flush)
        self._writer = Writer(self.state, self.queue_flush, self._queue_send)
        self.calls = Calls()
        self._is_closing = threading.Event()
        self._housekeeper = threading.Thread(
            target=self._keep_house, name="store-house", daemon=True
        )
        self._housekeeper.start()

    @property
    def _is_pooled(self) -> bool:
        return self.config.is_pooled

    def _close_arena(self) -> None:
        self.arena.close(is_removed=not self.config.is_arena_kept)

    def _recover(self) -> list[bytes]:
        """Take over what is there; own blocks that an earlier start had not yet written to SSD."""
        state = self.state
        now = state.now()
        with state.lock:
            rooms = state.memory.recover(now=now) if self.arena.is_adopted else []
            state.counters.add("blocks_recovered_in_memory", len(rooms))
            for is_owned in (True, False):
                infos = [room.info for room in rooms if room.is_owned == is_owned]
                state.hold(infos, "memory", is_owned=is_owned)
            if state.ssd is None:
                return []
            entries = sorted(state.ssd.entries(), key=lambda info: (info.depth, info.key))
            kept = state.policy.recover([self._on_ssd(i) for i in entries], "ssd", now=now)
            state.counters.add("blocks_recovered_on_ssd", kept)
            state.hold(entries[:kept], "ssd", is_owned=True)
            if kept < len(entries):
                state.ssd.remove([info.key for info in entries[kept:]])
            if state.config.flush != "on_commit":
                return []
            owned = (room.info.key for room in rooms if room.is_owned)
            return [key for key in owned if not state.policy.on_ssd(key)]

    def _on_ssd(self, info: BlockInfo) -> NewBlock:
        return NewBlock(
            key=info.key,
            parent=info.parent or None,
            depth=info.depth,
            size_bytes=self.config.block_bytes,
            tenant=info.tenant or None,
        )

    # --- the pool --------------------------------------------------------------------------

    def join(self, fetch: FetchMany, send: SendRegion, on_change: OnChange) -> None:
        """Become part of a pool.

        Args:
            fetch: Brings blocks from other nodes.
            send: Sends a region to its owner.
            on_change: Announces copies held and given up.
        """
        self._loader = Loader(self.state, self._executor, fetch, self.queue_flush)
        sender = OwnerSender(self.state, send, self.queue_flush)
        self._sender = Background(
            "store-send",
            sender.work,
            most_jobs=8,
            most_waiting=self.arena.num_slots,  # each holds a slot: never more
            on_error=self._failed,
        )
        self._on_change = on_change

    def queue_flush(self, keys: Sequence[bytes]) -> None:
        """Write blocks to SSD when it is convenient."""
        self._flusher.add(keys)

    def _queue_send(self, owner: str, rooms: Sequence[Room]) -> None:
        assert self._sender is not None, "a region belongs to another node, but there is no pool"
        self._sender.add([RegionToSend(owner, tuple(rooms))])

    def _failed(self, error: BaseException) -> None:
        self.state.counters.add("background_errors")
        _log.error("background work failed", error=type(error).__name__, detail=str(error)[:200])

    # --- verbs -----------------------------------------------------------------------------

    def new_holder(self) -> Holder:
        """A number for a new reader or writer, whose leases and reservations end together."""
        return next(self._holders)

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks the pool holds and a load would bring: not those that are
        cheaper computed.
        """
        state = self.state
        with self.calls.running(), state.lock:
            if state.config.costs is None:
                return state.leading(keys)
            return worth_loading(state, keys, state.config.costs).wanted

    def load(
        self,
        keys: Sequence[bytes],
        *,
        holder: Holder,
        deadline: Deadline,
        category: int = 0,
        is_checked: bool = True,
        tenant: bytes = b"",
    ) -> Offer:
        """Hold the valid leading blocks for a reader; never raises for what is missing."""
        with self.calls.running():
            return self._loader.load(
                keys,
                holder=holder,
                deadline=deadline,
                category=category,
                is_checked=is_checked,
                tenant=tenant,
            )

    def doubt(self, key: bytes) -> None:
        """A block in memory did not look right to a reader: drop it if it is broken."""
        state = self.state
        with self.calls.ending() as is_there, state.lock:
            room = state.memory.get(key) if is_there else None
            if room is not None and checksum(state.memory.view(room)) != room.info.crc:
                state.forget_broken(room)

    def release(self, lease_id: int, holder: Holder) -> bool:
        """The reader is done; False if the lease had ended before."""
        is_known = False
        with self.calls.ending() as is_there, self.state.lock:
            if is_there:
                is_known = self.state.leases.close(lease_id, holder)
                self.state.tell()
        return is_known

    def reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        *,
        first: int,
        tenant: bytes,
        holder: Holder,
        is_durable: bool = False,
    ) -> Reservation:
        """Room for the new end of a chain; durable blocks are owned by the node that writes."""
        with self.calls.running():
            return self._writer.reserve(
                keys, lengths, first=first, tenant=tenant, holder=holder, is_here=is_durable
            )

    def commit(
        self,
        reservation_id: int,
        checksums: Sequence[int],
        *,
        holder: Holder,
        deadline: Deadline,
        is_durable: bool = False,
    ) -> int:
        """Written blocks become visible; how many leading ones are stored (durably, if asked)."""
        with self.calls.running():
            rooms = self._writer.commit(reservation_id, checksums, holder)
            if not is_durable or not rooms:
                return len(rooms)
            keys = [room.info.key for room in rooms]
            self._flusher.wait_for(self._flusher.add(keys), deadline)
            with self.state.lock:
                durable = [self.state.policy.on_ssd(key) for key in keys]
            return durable.index(False) if False in durable else len(durable)

    def abort(self, reservation_id: int, holder: Holder) -> None:
        """Nothing will be written to that room."""
        with self.calls.ending() as is_there:
            if is_there:
                self._writer.abort(reservation_id, holder)

    def leave(self, holder: Holder) -> None:
        """A reader or writer went away: its leases and reservations end."""
        with self.calls.ending() as is_there, self.state.lock:
            if not is_there:
                return
            self.state.counters.add("leases_left_behind", self.state.leases.close_all(holder))
            self.state.counters.add("reservations_left_behind", self._writer.abort_all(holder))

    def receive(self, infos: Sequence[BlockInfo], *, is_owned: bool, holder: Holder) -> Reservation:
        """Room for a region that another node sends."""
        with self.calls.running():
            return self._writer.receive(infos, is_owned=is_owned, holder=holder)

    def flush(self, deadline: Deadline) -> bool:
        """Wait until what was stored up to now is sent to its owners and on SSD."""
        with self.calls.running():
            sender, flusher = self._sender, self._flusher
            if sender is not None and not sender.wait_for(sender.num_added, deadline):
                return False
            return flusher.wait_for(flusher.num_added, deadline)

    def gauges(self) -> Mapping[str, float]:
        """What is held at this moment."""
        state = self.state
        with state.lock:
            return {
                "memory_bytes": state.policy.settings.memory_bytes,
                "memory_used_bytes": state.policy.memory_used_bytes,
                "memory_blocks": len(state.memory),
                "free_slots": state.memory.num_free_slots,
                "slots": self.arena.num_slots,
                "ssd_bytes": self.config.ssd_bytes,
                "ssd_used_bytes": 0 if state.ssd is None else state.ssd.used_bytes,
                "directory_blocks": len(state.directory),
                "pinned_blocks": len(state.leases),
                "leases": state.leases.num_leases,
                "reservations": self._writer.num_open,
                "overdue_slots": self._writer.num_overdue_blocks,
                "flushes_waiting": self._flusher.num_waiting,
                "sends_waiting": 0 if self._sender is None else self._sender.num_waiting,
                "live_nodes": len(state.weights),
            }

    def close(self, deadline: Deadline | None = None) -> None:
        """Write what waits for SSD, within the deadline (10 s), and let go of everything.

        Calls that run have half of that time to end; further ones, of close too, do nothing.
        """
        deadline = deadline or Deadline.after(10.0)
        if not self.calls.close():
            return
        self._is_closing.set()
        if not self.calls.finish(Deadline.after(deadline.left_s() / 2)):
            _log.warning("closed while calls were running")
        self._housekeeper.join(max(0.1, deadline.left_s()))
        if self._sender is not None:
            self._sender.stop(deadline)
        self._flusher.stop(deadline)
        self._cleanup.close()

    def _keep_house(self) -> None:
        due = COMPACTION_S
        while not self._is_closing.wait(HOUSEKEEPING_S):
            try:
                self._writer.expire()
                with self.state.lock:
                    self.state.forget_strangers(now=self.state.now())
                if self.state.ssd is not None and self.state.now() >= due:
                    self.state.ssd.compact(Deadline.after(COMPACTION_S))
                    due = self.state.now() + COMPACTION_S
            except Exception as error:
                self._failed(error)


def _segment_bytes(config: StoreConfig) -> int:
    """As asked for, smaller on a small SSD: room for at least 16 segments of a few blocks each."""
    smallest = 4 * SsdTier.record_bytes(config.block_bytes)
    return max(smallest, min(config.segment_bytes, config.ssd_bytes // 16))


def _ssd_room(ssd: SsdTier, block_bytes: int) -> int:
    """Bytes of blocks that fit, headers and not yet compacted records beside them."""
    return ssd.live_limit_bytes // ssd.record_bytes(block_bytes) * block_bytes


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreSetupError(
            f"{folder}: {error.strerror}: a store needs a folder it may write to"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise StoreSetupError(
            f"{folder}: another process serves this store; connect to it, or use another folder"
        ) from error
    return keep_lock(file)


@contextlib.contextmanager
def opened(config: StoreConfig) -> Iterator[StoreNode]:
    """A node for the length of a block."""
    node = StoreNode(config)
    try:
        yield node
    finally:
        node.close()
