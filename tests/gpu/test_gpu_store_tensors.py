"""Arrays on a GPU into the store and back, bit for bit."""

import numpy as np
import pytest

from policies.prefix.keys import Namespace, block_keys, root_key
from runtime.store.store import open_store
from runtime.store.tensor_staging import CupyDevice, StagingPool, TorchDevice
from runtime.store.tensors import load_tensors, put_tensors

pytestmark = pytest.mark.gpu
NAMESPACE = Namespace(
    model="m", revision="r", dtype="float16", layout="1", layers="0", kv_heads="0", block=4
)
KEYS = block_keys(root_key(NAMESPACE), list(range(32)), 4)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", dram="16MiB", block_bytes="1MiB") as store:
        yield store


def test_cupy_arrays_come_back_bit_for_bit(cupy, rng, store):
    staging = StagingPool(CupyDevice(), 16 << 20)
    blocks = [cupy.asarray(rng.integers(0, 256, 1 << 20).astype(np.uint8)) for _ in KEYS]
    assert put_tensors(store, KEYS, blocks, deadline_s=30, staging=staging).stored == len(KEYS)
    loaded = [cupy.zeros(1 << 20, cupy.uint8) for _ in KEYS]
    assert load_tensors(store, KEYS, loaded, deadline_s=30, staging=staging) == len(KEYS)
    assert all(bool((a == b).all()) for a, b in zip(blocks, loaded, strict=True))
    assert staging.lent_bytes == 0


def test_a_put_waits_for_the_kernels_that_fill_the_array(cupy, store):
    staging = StagingPool(CupyDevice(), 16 << 20)
    block = cupy.zeros(1 << 20, cupy.uint8)
    for _ in range(200):
        block += 1  # queued, not awaited
    put_tensors(store, KEYS[:1], [block], deadline_s=30, staging=staging)
    with store.load(KEYS[:1]) as found:
        assert bytes(found.views[0]) == bytes([200]) * (1 << 20)


def test_torch_tensors_of_two_bytes_come_back_bit_for_bit(store):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no GPU")
    staging = StagingPool(TorchDevice("cuda"), 16 << 20)
    blocks = [torch.randn(256, 1024, device="cuda").to(torch.bfloat16) for _ in KEYS]
    assert put_tensors(store, KEYS, blocks, deadline_s=30, staging=staging).stored == len(KEYS)
    loaded = [torch.zeros_like(block) for block in blocks]
    assert load_tensors(store, KEYS, loaded, deadline_s=30, staging=staging) == len(KEYS)
    assert all(torch.equal(a, b) for a, b in zip(blocks, loaded, strict=True))
