"""The prefix store as the engine's prefix cache: look blocks up, load them into pages, save pages.

A store block is one KV block: ``layout.block_tokens`` tokens in all layers, the block's pages one
after the other in the order of ``KvCache.block_pages``, each whole.

The engine's thread calls everything here. Copies are made by two threads of its own, and what they
have done is told when the engine asks (``poll_loads``, ``poll_saves``). Every call and every copy
has a deadline, and pages that are being copied are held in the arena, so a store that is killed,
slow, full or gone costs recomputation: never a wrong token, a page lost or a sequence that waits
for ever.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from policies.prefix.keys import Namespace
from runtime.engine.prefix_counts import COUNTS, PrefixCounts, flat_stats
from runtime.engine.prefix_guard import StoreGuard
from runtime.engine.prefix_keys import PrefixKeys
from runtime.engine.prefix_pages import block_copies
from runtime.engine.prefix_thread import CopyThread
from runtime.engine.prefix_transfers import BlockLoad, BlockSave, PageTable, Transfer
from runtime.model.kv_cache import LEFT_BEHIND, KvCache
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError, StoreSetupError
from runtime.store.messages import MAX_BLOCKS
from runtime.store.prefix_store import PrefixStore

logger = logging.getLogger(__name__)

LATE_GRACE_S = 0.1  # for a store that keeps its deadlines, to end a transfer itself
STATS_EVERY_S = 1.0
STATS_DEADLINE_S = 0.5
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLimits:
    """How long the engine waits, and what saves may hold.

    Attributes:
        lookup_s: Seconds that a lookup may take of the engine's thread.
        load_s: Seconds from the order of a load until its sequence goes on without.
        save_s: Seconds from the order of a save until it is given up.
        saving_bytes: Bytes of pages that saves under way hold; one block may always be saved.
    """

    lookup_s: float = 0.02
    load_s: float = 2.0
    save_s: float = 5.0
    saving_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name in ("lookup_s", "load_s", "save_s", "saving_bytes"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise StoreSetupError(f"{name}: must be > 0 and finite, found {value}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended.

    Attributes:
        sequence: Its number.
        first_block: Position of the first block that was ordered.
        blocks: So many from there on are in their pages; the rest is to be computed.
        reason: Why not all: ``missing``, ``broken``, ``late``, ``unavailable``, ``paused``; empty
            if all.
    """

    sequence: int
    first_block: int
    blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A save has ended.

    Attributes:
        sequence: Its number.
        first_block: Position of the first block that was taken.
        blocks: So many from there on are in the store.
        stored: So many of them were not there before.
        reason: Why not all: those of ``Put``, ``paused``, ``cancelled``; empty if all.
    """

    sequence: int
    first_block: int
    blocks: int
    stored: int
    reason: str


class PrefixBlocks:
    """Prefixes of sequences in a store. Of the engine's thread."""

    def __init__(
        self,
        store: PrefixStore,
        cache: KvCache,
        namespace: Namespace,
        *,
        limits: PrefixLimits | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        """Use a store as the prefix cache.

        Args:
            store: Open; closed with this.
            cache: Of the engine.
            namespace: Of its blocks (``model_namespace``).
            limits: Of time and pages.
            on_done: Called on another thread when a load or save has ended, to wake the engine.

        Raises:
            StoreSetupError: If the store takes no blocks of that size, or the namespace has
                another block.
        """
        layout = cache.layout
        self.block_bytes = layout.block_pages * layout.page_bytes
        if self.block_bytes > store.block_bytes:
            raise StoreSetupError(
                f"a KV block has {self.block_bytes:,} bytes and the store takes at most "
                f"{store.block_bytes:,}: serve it with --block-bytes {self.block_bytes}"
            )
        if namespace.block != layout.block_tokens:
            raise StoreSetupError(
                f"namespace block: must be {layout.block_tokens}, found {namespace.block}"
            )
        self._store, self._cache = store, cache
        self._namespace = self._first_namespace = namespace
        self._limits = limits or PrefixLimits()
        self._counts = PrefixCounts()
        self._guard = StoreGuard(store, self._counts)
        self._most_saving = max(1, self._limits.saving_bytes // self.block_bytes)
        self._loads: dict[int, BlockLoad] = {}
        self._saves: list[BlockSave] = []
        self._stats: dict[str, float] = {}
        self._stats_due_s, self._is_asking = 0.0, False
        # Each thread has buffers and a stream of its own, where the arena is on a device.
        self._load_copies, self._save_copies, self._own_copies = (
            block_copies(cache.arena) for _ in range(3)
        )
        self._loader = CopyThread("prefix-load", on_done)
        self._saver = CopyThread("prefix-save", on_done)

    # --- keys ------------------------------------------------------------------------------

    def keys(self, salt: str = "") -> PrefixKeys:
        """An empty chain for a new sequence of a tenant."""
        return PrefixKeys(self._namespace, salt)

    def reset(self) -> None:
        """Forget all prefixes: chains made from now on share no block with those before.

        The blocks stay in the store, unreachable, until they are evicted; chains made before go on
        finding them. It holds for this engine until it ends: others of the same store, and the next
        one, use the blocks from before.
        """
        nonce = os.urandom(8).hex()
        layout = f"{self._first_namespace.layout}|reset={nonce}"
        self._namespace = replace(self._first_namespace, layout=layout)
        self._counts.add("resets")

    # --- reading ---------------------------------------------------------------------------

    def lookup(self, keys: PrefixKeys) -> int:
        """Leading blocks that the store has; a load may still find fewer. Never raises.

        Takes at most ``limits.lookup_s``; a store that does not answer is not asked again for a
        while.
        """
        count = min(len(keys), MAX_BLOCKS)
        if not count:
            return 0
        start_s, found = time.monotonic(), 0
        with self._guard.call("look up") as store:
            if store is not None:
                found = store.lookup(keys.leading(count), deadline_s=self._limits.lookup_s)
        self._counts.add("lookups")
        self._counts.add("lookup_blocks", count)
        self._counts.add("lookup_hit_blocks", found)
        self._counts.add("lookup_seconds", time.monotonic() - start_s)
        return found

    def start_load(
        self,
        sequence: int,
        keys: PrefixKeys,
        first_block: int,
        stop_block: int,
        *,
        category: int = 0,
    ) -> None:
        """Load blocks into the pages of a sequence; ``poll_loads`` tells how many came.

        Args:
            sequence: Has grown to these blocks; it computes nothing until the load has ended.
            keys: Of the sequence.
            first_block, stop_block: The blocks.
            category: Kind of request, where known, 0 to 2**31 - 1, for the store's eviction.

        Raises:
            ValueError: If a load of the sequence is under way or there is nothing to load.
            IndexError: If the sequence has no such blocks, or they have no keys.
        """
        if sequence in self._loads:
            raise ValueError(f"sequence {sequence} is being loaded already")
        if not 0 <= first_block < stop_block:
            raise ValueError(f"sequence {sequence}: no blocks from {first_block} to {stop_block}")
        chain = keys.leading(stop_block)
        load = BlockLoad(
            sequence,
            chain,
            first_block,
            pages=self._pages(sequence, first_block, stop_block),
            hold=self._cache.hold(sequence, first_block, stop_block),
            tenant=keys.tenant,
            deadline_s=self._limits.load_s,
            category=category,
        )
        self._loads[sequence] = load
        self._counts.add("loads")
        self._load_copies.order()
        self._loader.add(lambda: load.run(self._guard, self._load_copies))

    def poll_loads(self) -> list[Loaded]:
        """Loads that have ended since the last call, in the order they were started."""
        ended = []
        for sequence, load in list(self._loads.items()):
            if load.is_late(LATE_GRACE_S):
                load.give_up("late")
                if load.is_given_up:
                    self._guard.fail("load", "out of time")
            elif not load.is_over:
                continue
            del self._loads[sequence]
            self._end_load(load)
            ended.append(Loaded(sequence, load.first, load.done, load.reason))
        return ended

    def cancel_load(self, sequence: int) -> None:
        """Give up the load of a sequence, if there is one: none of its pages is written any more.

        Waits for the copy of one block at most.
        """
        load = self._loads.pop(sequence, None)
        if load is not None:
            load.give_up("cancelled")
            self._counts.add("loads_cancelled")
            self._end_load(load)

    @property
    def num_loading(self) -> int:
        """Sequences being loaded."""
        return len(self._loads)

    # --- writing ---------------------------------------------------------------------------

    def start_save(self, sequence: int, keys: PrefixKeys, first_block: int, stop_block: int) -> int:
        """Save full blocks of a sequence, whose pages stay held meanwhile.

        What the store has is not written again. Blocks that a window has left behind are not
        saved; leading ones are passed over, for they may be in the store. The keys of the whole
        chain are sent with every save, so a few larger saves are cheaper than many small ones.

        Args:
            sequence: Its number.
            keys: Of the sequence.
            first_block, stop_block: The blocks; their tokens are computed.

        Returns:
            Blocks from ``first_block`` on that are dealt with: fewer than ordered if too many saves
            are under way, none while the store is left alone. The rest is not saved unless it is
            ordered again. What a save that was begun did not store, ``poll_saves`` tells.

        Raises:
            IndexError: If the sequence has no such blocks, or they have no keys.
        """
        asked = stop_block - first_block
        if asked <= 0:
            return 0
        if self._guard.is_paused:
            self._counts.add("unsaved_paused", asked)
            return 0
        pages = self._pages(sequence, first_block, min(stop_block, MAX_BLOCKS))
        self._counts.add("unsaved_too_deep", asked - len(pages))
        skipped, count = _whole_run(pages)
        room = max(0, self._most_saving - self.saving_blocks)
        taken = min(count, room)
        self._counts.add("unsaved_backpressure", count - taken)
        if taken:
            self._start_save(sequence, keys, first_block + skipped, pages[skipped:][:taken])
        if taken < count:
            return skipped + taken
        self._counts.add("unsaved_left_behind", len(pages) - count)
        return asked

    def save_now(
        self, sequence: int, keys: PrefixKeys, first_block: int, stop_block: int, *, within_s: float
    ) -> int:
        """Save blocks before returning, such as those of a sequence that is to give its pages up.

        Saves of the same sequence that are under way are waited for.

        Args:
            sequence: Its number.
            keys: Of the sequence.
            first_block, stop_block: The blocks.
            within_s: Seconds for all of it.

        Returns:
            Blocks from ``first_block`` on that are in the store now.

        Raises:
            IndexError: If the sequence has no such blocks, or they have no keys.
        """
        deadline = Deadline.after(within_s)
        pages = self._pages(sequence, first_block, min(stop_block, MAX_BLOCKS))
        skipped, count = _whole_run(pages)
        self._counts.add("unsaved_left_behind", len(pages) - count)
        if not count:
            return 0
        mine = [save for save in self._saves if save.sequence == sequence]
        self._saver.wait_for(lambda: all(save.is_over for save in mine), deadline)
        first = first_block + skipped
        save = BlockSave(
            sequence,
            keys.leading(first + count),
            first,
            pages=pages[skipped:][:count],
            hold=None,
            tenant=keys.tenant,
            deadline_s=deadline.left_s(),
        )
        self._counts.add("saves")
        self._own_copies.order()
        save.run(self._guard, self._own_copies)
        self._count_save(save)
        return save.done + (skipped if save.done else 0)

    def poll_saves(self) -> list[Saved]:
        """Saves that have ended since the last call, in order; their pages are held no more."""
        ended, going_on = [], []
        for save in self._saves:
            if save.is_late(LATE_GRACE_S):
                save.give_up("late")
                if save.reason == "late":
                    self._guard.fail("save", "out of time")
            if save.is_over or save.is_given_up:
                _end_hold(save)
                self._count_save(save)
                ended.append(Saved(save.sequence, save.first, save.done, save.stored, save.reason))
            else:
                going_on.append(save)
        self._saves = going_on
        return ended

    def cancel_saves(self) -> int:
        """Give up all saves under way, so that their pages are free at once.

        Waits for the copy of one block at most. ``poll_saves`` tells of them.

        Returns:
            Pages that were held by them.
        """
        pages = 0
        for save in self._saves:
            if not save.is_over:
                save.give_up("cancelled")
                pages += save.pages.size
            _end_hold(save)
        return pages

    @property
    def saving_blocks(self) -> int:
        """Blocks whose pages are held by saves."""
        return sum(save.blocks for save in self._saves if not save.is_given_up)

    # --- the rest --------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Sums since the start, what is under way, and the store's own numbers (``store_``).

        The latter are asked for in the background, once a second at most, and are those of the time
        before.
        """
        now_s = time.monotonic()
        if now_s >= self._stats_due_s and not self._is_asking and not self._guard.is_paused:
            self._stats_due_s, self._is_asking = now_s + STATS_EVERY_S, True
            self._saver.add(self._ask_stats)
        return {
            **self._counts.all(),
            "loading": float(self.num_loading),
            "saving_blocks": float(self.saving_blocks),
            **self._stats,
        }

    def drain(self, within_s: float) -> bool:
        """Wait for saves under way, as before the end; False if time ran out."""
        saves = list(self._saves)
        return self._saver.wait_for(
            lambda: all(save.is_over for save in saves), Deadline.after(within_s)
        )

    def close(self) -> None:
        """Give up what is under way, end both threads and close the store. Ends all holds."""
        for sequence in list(self._loads):
            self.cancel_load(sequence)
        self.cancel_saves()
        self.poll_saves()
        deadline = Deadline.after(CLOSE_S)
        are_over = [thread.close(deadline) for thread in (self._loader, self._saver)]
        if not all(are_over):
            logger.warning("prefix store: a call has not ended in time; it is left behind")
        try:
            self._store.close()
        except (StoreError, OSError) as error:
            logger.warning("prefix store: did not close cleanly (%s)", error)

    def _start_save(self, sequence: int, keys: PrefixKeys, first: int, pages: PageTable) -> None:
        stop = first + len(pages)
        save = BlockSave(
            sequence,
            keys.leading(stop),
            first,
            pages=pages,
            hold=self._cache.hold(sequence, first, stop),
            tenant=keys.tenant,
            deadline_s=self._limits.save_s,
        )
        self._saves.append(save)
        self._counts.add("saves")
        self._save_copies.order()
        self._saver.add(lambda: save.run(self._guard, self._save_copies))

    def _pages(self, sequence: int, first: int, stop: int) -> PageTable:
        rows = [self._cache.block_pages(sequence, block) for block in range(first, stop)]
        return np.array(rows, np.int32).reshape(len(rows), self._cache.layout.block_pages)

    def _end_load(self, load: BlockLoad) -> None:
        _end_hold(load)
        self._counts.add("loaded_blocks", load.done)
        self._counts.add("loaded_bytes", load.done * self.block_bytes)
        self._counts.add("load_seconds", load.taken_s)
        self._counts.add("load_missed_blocks", load.blocks - load.done)
        if load.reason == "late":
            self._counts.add("loads_late")

    def _count_save(self, save: BlockSave) -> None:
        self._counts.add("saved_blocks", save.stored)
        self._counts.add("saved_bytes", save.stored * self.block_bytes)
        self._counts.add("save_known_blocks", max(0, save.done - save.stored))
        self._counts.add("save_seconds", save.taken_s)
        if save.done < save.blocks:
            name = f"unsaved_{save.reason}"
            name = name if name in COUNTS else "unsaved_unavailable"
            self._counts.add(name, save.blocks - save.done)

    def _ask_stats(self) -> None:
        with self._guard.call("tell its numbers") as store:
            if store is not None:
                stats = flat_stats(store.stats(deadline_s=STATS_DEADLINE_S))
                self._stats = stats or self._stats
        self._is_asking = False


def _whole_run(pages: PageTable) -> tuple[int, int]:
    """Leading blocks of which pages were left behind, and how many whole ones follow them."""
    whole = np.append((pages != LEFT_BEHIND).all(axis=1), False)
    skipped = int(whole.argmax()) if whole.any() else len(pages)
    return skipped, int((~whole[skipped:]).argmax())


def _end_hold(transfer: Transfer) -> None:
    if transfer.hold is not None:
        transfer.hold.end()
