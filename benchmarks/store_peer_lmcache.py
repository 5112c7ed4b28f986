"""LMCache's local CPU backend, in the caller's process, in ``store_peers.py``."""

from __future__ import annotations

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from store_peer_timing import LOOKUP_KEYS, arguments, report

_, block_bytes, num_blocks, repeats = arguments()
config = LMCacheEngineConfig.from_defaults(local_cpu=True, max_local_cpu_size=2.0)
backend = LocalCPUBackend(
    config=config,
    metadata=None,
    dst_device="cpu",
    memory_allocator=HostMemoryAllocator(block_bytes * num_blocks * (repeats + 2)),
)
shape = torch.Size([2, 1, block_bytes // 512, 128])
keys = [
    [CacheEngineKey("m", 1, 0, repeat * 100_000 + i, torch.float16) for i in range(num_blocks)]
    for repeat in range(repeats)
]
many = (keys[0] * LOOKUP_KEYS)[:LOOKUP_KEYS]


def put(repeat: int, source: np.ndarray) -> None:
    for key, row in zip(keys[repeat], source, strict=True):
        memory = backend.allocate(shape, torch.float16, fmt=MemoryFormat.KV_2LTD)
        memory.tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(row))
        backend.submit_put_task(key, memory)
        memory.ref_count_down()


def get(repeat: int, target: np.ndarray) -> None:
    for key, row in zip(keys[repeat], target, strict=True):
        memory = backend.get_blocking(key)
        torch.from_numpy(row).copy_(memory.tensor.view(torch.uint8).view(-1))
        memory.ref_count_down()


def lookup() -> None:
    for key in many:
        assert backend.contains(key)


report(put, get, lookup)
