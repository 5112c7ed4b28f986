"""When the engine asks the prefix store, loads from it and saves into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.engine.counts import Counts
from runtime.engine.parts import EngineParts
from runtime.engine.prefix_keys import PrefixKeys
from runtime.engine.sequence import EngineSequence

MAX_LOOKUPS_PER_STEP: Final = 32
SAVE_WAIT_S: Final = 0.2
SWAP_S: Final = 0.5


class Prefixes:
    """Between the engine's sequences and ``PrefixBlocks``; does nothing where there is no store.

    A prompt's blocks are saved when all of it has been computed, those of the answer when the
    sequence ends. Models with sliding windows give blocks back on the way, so there every chunk is
    saved at once.
    """

    def __init__(self, parts: EngineParts, counts: Counts) -> None:
        self._parts, self._counts, self._prefix = parts, counts, parts.prefix
        self._block_tokens = parts.cache.layout.block_tokens
        self._has_windows = bool(parts.cache.layout.paging.windows)

    def keys_of(self, sequence: EngineSequence) -> PrefixKeys | None:
        """A chain for a new sequence; none where all of its prompt has to be computed."""
        if self._prefix is None or sequence.new.sampling.prompt_logprobs is not None:
            return None
        return self._prefix.keys(sequence.new.salt)

    def look_up(self, sequences: Mapping[int, EngineSequence]) -> None:
        """Ask for those who may be admitted in the next step."""
        if self._prefix is None:
            return
        accounts = self._parts.accounts
        places = accounts.settings.max_running - len(accounts.ids)
        for number in accounts.next_waiting(min(places, MAX_LOOKUPS_PER_STEP)):
            sequence = sequences[number]
            if sequence.keys is None or sequence.is_looked_up:
                continue
            sequence.is_looked_up = True
            sequence.keys.update(sequence.tokens)
            wanted = (len(sequence.tokens) - 1) // self._block_tokens
            found = min(self._prefix.lookup(sequence.keys), wanted) if wanted else 0
            if sequence.first_scheduled_s is None:
                self._counts.prefix_queries += sequence.prompt_tokens
            if found:
                self._parts.batching.cached(
                    number, found * self._block_tokens, now=self._parts.clock()
                )

    def load(self, sequence: EngineSequence, tokens: int) -> None:
        """Its pages are there: bring the blocks."""
        assert self._prefix is not None and sequence.keys is not None
        blocks = tokens // self._block_tokens
        self._prefix.start_load(sequence.number, sequence.keys, 0, blocks)

    def poll(self, sequences: Mapping[int, EngineSequence]) -> None:
        """Loads and saves that have ended."""
        if self._prefix is None:
            return
        for saved in self._prefix.poll_saves():
            sequence = sequences.get(saved.sequence)
            if sequence is not None:  # what did not get there is saved another time
                reached = saved.first_block + saved.blocks
                sequence.saved_blocks = min(sequence.saved_blocks, reached)
        for loaded in self._prefix.poll_loads():
            sequence = sequences.get(loaded.sequence)
            if sequence is None:
                continue
            tokens = loaded.blocks * self._block_tokens
            self._parts.cache.set_tokens(loaded.sequence, tokens)
            self._parts.batching.loaded(loaded.sequence, tokens, now=self._parts.clock())
            sequence.saved_blocks = loaded.blocks
            if sequence.is_first_output and not sequence.preemptions:
                sequence.cached_tokens = tokens
                self._counts.cached_tokens += tokens
                self._counts.prefix_hits += tokens

    def computed(self, sequence: EngineSequence, *, is_ended: bool) -> None:
        """A step has computed tokens of it."""
        if sequence.keys is None:
            return
        tokens = self._parts.cache.tokens(sequence.number)
        if is_ended or self._has_windows:
            self._save(sequence, tokens // self._block_tokens)
        elif tokens >= sequence.prompt_tokens:
            self._save(sequence, sequence.prompt_tokens // self._block_tokens)

    def save_all(self, sequence: EngineSequence) -> None:
        """It leaves before its end: what has been computed may serve others."""
        if sequence.keys is not None and sequence.number in self._parts.cache.sequences:
            tokens = self._parts.cache.tokens(sequence.number)
            self._save(sequence, tokens // self._block_tokens)

    def preempted(self, sequence: EngineSequence) -> None:
        """It gives its pages up; with ``swap`` its blocks are saved first."""
        if sequence.keys is None or self._prefix is None:
            return
        if self._parts.settings.preemption == "swap":
            sequence.keys.update(sequence.tokens)
            stop = self._parts.cache.tokens(sequence.number) // self._block_tokens
            first = sequence.saved_blocks
            if stop > first:
                saved = self._prefix.save_now(
                    sequence.number, sequence.keys, first, stop, within_s=SWAP_S
                )
                sequence.saved_blocks = first + saved

    def finish_saves(self) -> bool:
        """Saves under way give their pages back, done or not; whether there were any."""
        if self._prefix is None or not self._prefix.saving_blocks:
            return False
        if not self._prefix.drain(SAVE_WAIT_S):
            self._prefix.cancel_saves()
        self._prefix.poll_saves()
        return True

    def leaves(self, sequence: EngineSequence) -> None:
        """It ends: nothing is copied into its pages any more."""
        if self._prefix is not None:
            self._prefix.cancel_load(sequence.number)

    def _save(self, sequence: EngineSequence, stop: int) -> None:
        first = sequence.saved_blocks
        if self._prefix is None or sequence.keys is None or stop <= first:
            return
        sequence.keys.update(sequence.tokens)
        done = self._prefix.start_save(sequence.number, sequence.keys, first, stop)
        sequence.saved_blocks = first + done
