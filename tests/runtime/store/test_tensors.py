"""Arrays and tensors as blocks of the store, on the host and through pinned buffers."""

import threading

import numpy as np
import pytest
import torch

from policies.prefix.keys import Namespace, block_keys, root_key
from runtime.store.deadline import Deadline
from runtime.store.errors import DeadlineError, StoreError, StoreSetupError
from runtime.store.kv_blocks import ABSENT, KvBlocks
from runtime.store.store import open_store
from runtime.store.tensor_staging import StagingPool
from runtime.store.tensors import host_view, load_tensors, put_tensors

NAMESPACE = Namespace(
    model="m", revision="r", dtype="bfloat16", layout="1", layers="0", kv_heads="0", block=4
)
KEYS = block_keys(root_key(NAMESPACE), list(range(16)), 4)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", dram="1MiB", block_bytes="16KiB") as store:
        yield store


class FakeTensor:
    """Memory that only its device can reach."""

    def __init__(self, data: np.ndarray) -> None:
        self.hidden = data
        self.nbytes, self.shape, self.flags = data.nbytes, data.shape, data.flags
        self.__cuda_array_interface__ = {"strides": None}


class FakeDevice:
    """Copies when its event is waited for, as late as a device may."""

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self.pending = 0

    def pinned(self, num_bytes):
        self.pinned_bytes += num_bytes
        return np.full(num_bytes, 0xEE, np.uint8)

    def to_host(self, tensor, buffer):
        return self._later(lambda: np.copyto(buffer, _bytes(tensor)))

    def to_device(self, buffer, tensor):
        return self._later(lambda: np.copyto(_bytes(tensor), buffer))

    def _later(self, copy):
        device = self
        device.pending += 1

        class Event:
            def __init__(self):
                self.is_over = False

            def wait(self):
                if not self.is_over:
                    copy()
                    device.pending -= 1
                self.is_over = True

        return Event()


def _bytes(tensor: FakeTensor) -> np.ndarray:
    return tensor.hidden.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool])
def test_a_torch_tensor_is_viewed_without_a_copy(dtype):
    tensor = torch.zeros(3, 5).to(dtype)
    view = host_view(tensor, writable=True)
    assert view.nbytes == tensor.nbytes
    view[4] = 1
    assert tensor.view(torch.uint8).reshape(-1)[4] == 1


def test_arrays_and_buffers_are_viewed_without_a_copy():
    array, buffer = np.zeros((2, 3), np.int16), bytearray(6)
    host_view(array, writable=True)[0] = 7
    host_view(buffer, writable=True)[5] = 9
    assert array[0, 0] == 7
    assert buffer[5] == 9


def test_a_parameter_that_wants_a_gradient_is_viewed():
    tensor = torch.ones(4, requires_grad=True)
    assert bytes(host_view(tensor)) == np.ones(4, np.float32).tobytes()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4).t(), np.zeros((4, 4))[:, ::2], memoryview(b"abcd")[::2]]
)
def test_memory_with_gaps_is_refused(tensor):
    with pytest.raises(StoreError, match="not dense"):
        host_view(tensor)


@pytest.mark.parametrize("tensor", [b"abc", np.broadcast_to(np.uint8(1), (1,))])
def test_read_only_memory_is_not_loaded_into(tensor):
    host_view(tensor)
    with pytest.raises(StoreError, match="read-only"):
        host_view(tensor, writable=True)


def test_host_tensors_come_back_bit_for_bit(store):
    blocks = [torch.randn(4, 32).to(torch.bfloat16) for _ in KEYS]
    assert put_tensors(store, KEYS, blocks, deadline_s=30).stored == len(KEYS)
    loaded = [torch.zeros(4, 32, dtype=torch.bfloat16) for _ in KEYS]
    assert load_tensors(store, KEYS, loaded, deadline_s=30) == len(KEYS)
    assert all(torch.equal(a, b) for a, b in zip(blocks, loaded, strict=True))


def test_device_tensors_pass_through_pinned_buffers_that_go_back(store):
    device = FakeDevice()
    staging = StagingPool(device, 1 << 16)
    rng = np.random.default_rng(0)
    for round_ in range(3):
        blocks = [FakeTensor(rng.standard_normal((5, 7 + round_))) for _ in KEYS]
        keys = block_keys(KEYS[round_], list(range(16)), 4)
        assert put_tensors(store, keys, blocks, deadline_s=30, staging=staging).stored == 4
        loaded = [FakeTensor(np.zeros((5, 7 + round_))) for _ in KEYS]
        assert load_tensors(store, keys, loaded, deadline_s=30, staging=staging) == 4
        assert all(np.array_equal(a.hidden, b.hidden) for a, b in zip(blocks, loaded, strict=True))
        assert (staging.lent_bytes, device.pending) == (0, 0)
    assert device.pinned_bytes <= 1 << 16


def test_a_load_leaves_tensors_behind_the_first_missing_block_alone(store):
    staging = StagingPool(FakeDevice(), 1 << 16)
    blocks = [FakeTensor(np.full(8, i, np.uint8)) for i in range(2)]
    put_tensors(store, KEYS[:2], blocks, deadline_s=30, staging=staging)
    loaded = [FakeTensor(np.full(8, 99, np.uint8)) for _ in KEYS]
    assert load_tensors(store, KEYS, loaded, deadline_s=30, staging=staging) == 2
    assert [int(tensor.hidden[0]) for tensor in loaded] == [0, 1, 99, 99]


def test_host_and_device_tensors_may_be_mixed(store):
    staging = StagingPool(FakeDevice(), 1 << 16)
    blocks = [np.full(8, 1, np.uint8), FakeTensor(np.full(8, 2, np.uint8))]
    put_tensors(store, KEYS[:2], blocks, deadline_s=30, staging=staging)
    loaded = [FakeTensor(np.zeros(8, np.uint8)), np.zeros(8, np.uint8)]
    assert load_tensors(store, KEYS[:2], loaded, deadline_s=30, staging=staging) == 2
    assert (loaded[0].hidden[0], loaded[1][0]) == (1, 2)


class FailingStore:
    def put(self, *args, **kwargs):
        raise StoreError("no")


def test_a_failed_put_gives_its_buffer_back_after_its_copies():
    device = FakeDevice()
    staging = StagingPool(device, 1 << 16)
    tensor = FakeTensor(np.zeros(8, np.uint8))
    with pytest.raises(StoreError, match="no"):
        put_tensors(FailingStore(), KEYS[:1], [tensor], deadline_s=30, staging=staging)
    assert (staging.lent_bytes, device.pending) == (0, 0)


def test_a_device_tensor_needs_a_pool(store):
    with pytest.raises(StoreError, match="staging pool"):
        put_tensors(store, KEYS[:1], [FakeTensor(np.zeros(8))], deadline_s=1)


def test_a_pool_gives_no_more_than_its_capacity_and_waits_by_the_deadline():
    staging = StagingPool(FakeDevice(), 3 * 4096)
    loans = [staging.take(4096, Deadline.after(30)) for _ in range(3)]
    with pytest.raises(DeadlineError):
        staging.take(1, Deadline.after(0.01))
    with pytest.raises(StoreError, match="do not fit"):
        staging.take(3 * 4096 + 1, Deadline.after(30))
    threading.Timer(0.01, staging.give_back, [loans.pop()]).start()
    assert staging.take(100, Deadline.after(30)).view.nbytes == 100


def test_buffers_of_one_size_give_way_to_another():
    device = FakeDevice()
    staging = StagingPool(device, 1 << 16)
    for num_bytes in (4096, 1 << 16, 8192, 1 << 16):
        staging.give_back(staging.take(num_bytes, Deadline.after(30)))
    assert staging.lent_bytes == 0
    assert staging.take(1 << 16, Deadline.after(30)).view.nbytes == 1 << 16


def _caches(num_pages: int, *, is_head_major: bool) -> dict[str, torch.Tensor]:
    """Two layers as an engine lays them out: [pages, heads, tokens, content], any stride order."""
    caches = {}
    for i, (dtype, width) in enumerate([(torch.bfloat16, 6), (torch.float8_e4m3fn, 3)]):
        if is_head_major:
            flat = torch.randint(0, 120, (num_pages, 2, 4, width), dtype=torch.uint8)
        else:
            flat = torch.randint(0, 120, (num_pages, 4, 2, width), dtype=torch.uint8).transpose(
                1, 2
            )
        caches[f"layer.{i}"] = flat.float().to(dtype) if is_head_major else flat.to(dtype)
    return caches


@pytest.mark.parametrize("is_head_major", [True, False])
@pytest.mark.parametrize("per_block", [1, 2])
def test_gathered_pages_scatter_into_equal_pages(is_head_major, per_block):
    caches = _caches(8, is_head_major=is_head_major)
    blocks = KvBlocks(caches, 8, per_block)
    buffer = np.zeros(3 * blocks.page_bytes, np.uint8)
    blocks.gather([5, 0, 7], buffer)
    others = {name: torch.zeros_like(cache) for name, cache in caches.items()}
    KvBlocks(others, 8, per_block).scatter(memoryview(buffer).toreadonly(), [1, ABSENT, 2])
    for name, cache in caches.items():
        other = others[name].float()
        assert torch.equal(other[1], cache[5].float())
        assert torch.equal(other[2], cache[7].float())
        assert not other[[0, 3, 4, 5, 6, 7]].any()
    assert blocks.block_bytes == per_block * blocks.page_bytes


def test_how_an_engine_strides_its_memory_does_not_show_in_a_block():
    content = torch.randn(8, 2, 4, 6)
    as_heads, as_tokens = content.clone(), content.transpose(1, 2).contiguous().transpose(1, 2)
    assert as_heads.stride() != as_tokens.stride()
    found = []
    for cache in (as_heads, as_tokens):
        blocks = KvBlocks({"layer": cache}, 8)
        buffer = np.zeros(blocks.page_bytes, np.uint8)
        blocks.gather([3], buffer)
        found.append(buffer.tobytes())
    assert found[0] == found[1] == content[3].numpy().tobytes()


def test_copies_by_torch_operations_equal_copies_by_memory():
    caches = _caches(8, is_head_major=True)
    blocks = KvBlocks(caches, 8)
    buffer = np.zeros(3 * blocks.page_bytes, np.uint8)
    blocks.gather([6, 2, 4], buffer)
    rows = blocks.gather_on_device([6, 2, 4])
    assert np.array_equal(rows.numpy().reshape(-1), buffer)
    others = {name: torch.zeros_like(cache) for name, cache in caches.items()}
    KvBlocks(others, 8).scatter_on_device(rows, [0, ABSENT, 3])
    for name, cache in caches.items():
        assert torch.equal(others[name][0].float(), cache[6].float())
        assert torch.equal(others[name][3].float(), cache[4].float())
        assert not others[name][[1, 2, 4, 5, 6, 7]].float().any()


def test_several_kernel_pages_make_one_page():
    cache = torch.arange(8 * 2 * 6, dtype=torch.float32).reshape(8, 2, 6)
    blocks = KvBlocks({"layer": cache}, num_pages=4)
    buffer = np.zeros(blocks.page_bytes, np.uint8)
    blocks.gather([1], buffer)
    assert buffer.tobytes() == cache[2:4].numpy().tobytes()


def test_types_and_shapes_show_in_the_signature():
    half, single = torch.zeros(4, 2, dtype=torch.bfloat16), torch.zeros(4, 2)
    signatures = {KvBlocks({"a": cache}, 4).signature for cache in (half, single, single[:, :1])}
    assert len(signatures | {KvBlocks({"a": half}, 4, 2).signature}) == 4


@pytest.mark.parametrize(
    ("caches", "num_pages"),
    [({}, 4), ({"a": torch.zeros(5, 2)}, 4), ({"a": torch.zeros(2, 4).t()}, 4)],
)
def test_pages_that_cannot_be_told_apart_are_refused(caches, num_pages):
    with pytest.raises(StoreSetupError):
        KvBlocks(caches, num_pages)
