"""An engine that does to the connector's halves what vLLM does, with keys that can be checked.

The keys and values of a token are a checksum of all tokens up to it, so a page that holds what it
should not is seen at once. Freed pages are overwritten at once.
"""

import time
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from policies.prefix.keys import Namespace
from runtime.store.kv_blocks import KvBlocks
from runtime.store.tensor_staging import HostDevice, StagingPool
from runtime.store.vllm_counts import Counts
from runtime.store.vllm_guard import GuardedStore
from runtime.store.vllm_orders import RankIdentity
from runtime.store.vllm_scheduler import StoreScheduler
from runtime.store.vllm_settings import ConnectorSettings
from runtime.store.vllm_worker import StoreWorker

PAGE_TOKENS = 4
NUM_PAGES = 64
GARBAGE = -7
NOT_TO_BE_WRITTEN = -8
MOST_STEPS = 3000


@dataclass
class Request:
    """The part of vLLM's request that the connector reads."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: object = None
    resumable: bool = False
    media: tuple = ()
    num_computed_tokens: int = 0
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self):
        self.num_prompt_tokens = len(self.all_token_ids)


def content(tokens: list[int]) -> np.ndarray:
    """[len(tokens)] checksum of all tokens up to each."""
    total, found = 0, []
    for token in tokens:
        total = zlib.crc32(token.to_bytes(4, "little"), total)
        found.append(total & 0x7FFFFFFF)
    return np.array(found, np.int32)


class Engine:
    """One scheduler half, one worker half per rank, and pages."""

    def __init__(self, opener, *, ranks: int = 1, extra_keys=None, **settings):
        self.settings = ConnectorSettings(directory="unused", **settings)
        self.counts = Counts()
        self.seen: dict[str, float] = {}
        self.guards = [GuardedStore(opener, self.counts, retry_s=self.settings.retry_s)]
        self.pages: dict[str, list[int]] = {}
        self.free_pages = list(range(NUM_PAGES))
        per_block = self.settings.pages_per_block(PAGE_TOKENS)
        self.caches = [self._new_caches() for _ in range(ranks)]
        self.workers, identities = [], []
        for rank, caches in enumerate(self.caches):
            blocks = KvBlocks(caches, NUM_PAGES, per_block)
            identity = RankIdentity(blocks.signature, "0-1", str(rank), blocks.block_bytes)
            staging = StagingPool(HostDevice(), max(1 << 16, 8 * blocks.block_bytes))
            self.guards.append(GuardedStore(opener, self.counts, retry_s=self.settings.retry_s))
            self.workers.append(
                StoreWorker(
                    self.settings,
                    self.guards[-1],
                    self.counts,
                    blocks=blocks,
                    staging=staging,
                    identity=identity,
                )
            )
            identities.append(identity)
        self.scheduler = StoreScheduler(
            self.settings,
            self.guards[0],
            self.counts,
            page_tokens=PAGE_TOKENS,
            namespace=self._namespace,
            extra_keys=extra_keys or (lambda request, start, end, media: (request.media, media)),
            pages_of=lambda request_id: self.pages[request_id],
        )
        self.scheduler.set_identities(identities)

    def _new_caches(self):
        shape = (NUM_PAGES, 1, PAGE_TOKENS, 1)
        return {f"{i}": torch.full(shape, GARBAGE, dtype=torch.int32) for i in range(2)}

    def _namespace(self, identity, adapter):
        return Namespace(
            model="checksum",
            revision="1",
            dtype="int32",
            layout=identity.layout,
            layers=identity.layers,
            kv_heads=identity.kv_heads,
            block=PAGE_TOKENS * self.settings.pages_per_block(PAGE_TOKENS),
            adapter=adapter,
        )

    # --- what a test asks for ----------------------------------------------------------------

    def serve(self, request, answer_tokens=0, *, chunk=1000, local_tokens=0):
        """Run a request to its end; how many tokens of it came from the store.

        Args:
            request: Its tokens get the answer's appended.
            answer_tokens: To be generated.
            chunk: Most prompt tokens of one step.
            local_tokens: Tokens that the engine's own cache holds already.
        """
        loaded = self.admit(request, local_tokens)
        while request.num_computed_tokens < request.num_prompt_tokens:
            left = request.num_prompt_tokens - request.num_computed_tokens
            self.compute(request, min(chunk, left))
        for i in range(answer_tokens):
            request.all_token_ids.append(1000 + i)
            if i < answer_tokens - 1:
                self.compute(request, 1)
        self.finish(request)
        return loaded

    def admit(self, request, local_tokens=0):
        """Ask the connector, allocate pages, load; tokens from the store that are there."""
        name = request.request_id
        for _ in range(MOST_STEPS):
            external, is_async = self.scheduler.matched_tokens(request, local_tokens)
            if external is not None:
                break
            self.step({})
            time.sleep(0.001)  # an engine's step takes time, which other threads use
        assert external is not None
        assert is_async == (external > 0)
        assert local_tokens + external < len(request.all_token_ids)
        need = -(-(len(request.all_token_ids) + 200) // PAGE_TOKENS)
        self.pages[name] = [self.free_pages.pop() for _ in range(min(need, len(self.free_pages)))]
        mine = self.pages[name][: local_tokens // PAGE_TOKENS]  # others may be reading them
        self.mark(mine, NOT_TO_BE_WRITTEN)
        self.scheduler.allocated(request, external)
        request.num_computed_tokens = local_tokens + external
        if external:
            failed = self._wait_for_load(name)
            for i, page in enumerate(
                self.pages[name][: request.num_computed_tokens // PAGE_TOKENS]
            ):
                if page in failed:
                    assert i * PAGE_TOKENS >= local_tokens
                    request.num_computed_tokens = i * PAGE_TOKENS
                    break
            if request.num_computed_tokens == 0:
                again, _ = self._settled(request)
                assert again == 0, "a load that failed is promised again"
            self.scheduler.allocated(request, 0)
        assert all(bool((cache[mine] == NOT_TO_BE_WRITTEN).all()) for cache in self.all_caches())
        self.write(request, 0, local_tokens)
        self.check(request)
        return request.num_computed_tokens - local_tokens

    def _settled(self, request):
        for _ in range(MOST_STEPS):
            answer = self.scheduler.matched_tokens(request, 0)
            if answer[0] is not None:
                return answer
            self.step({})
            time.sleep(0.001)
        raise AssertionError("the connector never answered")

    def _wait_for_load(self, name):
        """Steps until every rank has reported; the pages that failed on any of them."""
        waiting, failed = set(range(len(self.workers))), set()
        for _ in range(MOST_STEPS):
            for rank, (_, received, bad) in enumerate(self.step({})):
                failed |= bad
                if name in received:
                    waiting.discard(rank)
            if not waiting:
                self.scheduler.received([name], failed)
                return failed
            time.sleep(0.001)
        raise AssertionError("a load never ended")

    def compute(self, request, count):
        """One step that computes so many tokens of a request."""
        end = request.num_computed_tokens + count
        orders = self.scheduler.step({request.request_id: end}, is_idle=False)
        for worker in self.workers:
            worker.start_loads(orders)
        self.write(request, request.num_computed_tokens, end)
        for worker in self.workers:
            worker.save(orders)
            worker.poll((), is_idle=False)
        request.num_computed_tokens = end

    def compute_ahead(self, request, token):
        """One step that is scheduled before the token it computes is known."""
        end = request.num_computed_tokens + 1
        assert end > len(request.all_token_ids)
        orders = self.scheduler.step({request.request_id: end}, is_idle=False)
        request.all_token_ids.append(token)
        for worker in self.workers:
            worker.start_loads(orders)
        self.write(request, end - 1, end)
        for worker in self.workers:
            worker.save(orders)
            worker.poll((), is_idle=False)
        request.num_computed_tokens = end

    def finish(self, request):
        """End a request; its pages are overwritten as soon as the connector lets them go."""
        self.check(request)
        name = request.request_id
        computed = -(-request.num_computed_tokens // PAGE_TOKENS)
        is_kept = self.scheduler.finished(request, self.pages[name][:computed])
        reports = self.step({}, finished=[name])
        assert all((name in sent) == is_kept for sent, _, _ in reports)
        self.release(request)

    def preempt(self, request):
        """Take a request's pages away; it is to be admitted again."""
        self.release(request)
        request.num_computed_tokens = 0

    def release(self, request):
        pages = self.pages.pop(request.request_id)
        self.mark(pages, GARBAGE)
        self.free_pages = pages + self.free_pages

    def all_caches(self):
        return [cache for caches in self.caches for cache in caches.values()]

    def mark(self, pages, value):
        for cache in self.all_caches():
            cache[pages] = value

    def step(self, ends, finished=()):
        """One step without a forward; what each rank reports."""
        orders = self.scheduler.step(ends, is_idle=True)
        reports = []
        for worker in self.workers:
            worker.start_loads(orders)
            worker.save(orders)
            sent, received = worker.poll(finished, is_idle=True)
            reports.append((sent, received, worker.take_failed_pages()))
        return reports

    def write(self, request, start, end):
        """Keys and values of some tokens, as a forward would write them."""
        values = content(request.all_token_ids[:end])
        for i in range(start, end):
            page = self.pages[request.request_id][i // PAGE_TOKENS]
            for rank, caches in enumerate(self.caches):
                for layer, cache in caches.items():
                    cache[page, 0, i % PAGE_TOKENS, 0] = int(values[i]) ^ rank ^ int(layer)

    def check(self, request):
        """Every computed token's keys and values are its own."""
        values = content(request.all_token_ids)
        for i in range(request.num_computed_tokens):
            page = self.pages[request.request_id][i // PAGE_TOKENS]
            for rank, caches in enumerate(self.caches):
                for layer, cache in caches.items():
                    want = int(values[i]) ^ rank ^ int(layer)
                    assert int(cache[page, 0, i % PAGE_TOKENS, 0]) == want, (i, rank, layer)

    def settle(self):
        """Wait until what was copied out is stored."""
        for worker in self.workers:
            worker.drain()

    def count(self, name):
        """An amount since the engine was made."""
        for key, amount in self.counts.take().items():
            self.seen[key] = self.seen.get(key, 0) + amount
        return self.seen.get(name, 0)

    def close(self):
        self.scheduler.close()
        for worker in self.workers:
            worker.close()


def lora(path, name="style", number=1, *, load_inplace=False):
    return SimpleNamespace(
        lora_int_id=number, lora_name=name, lora_path=str(path), load_inplace=load_inplace
    )
