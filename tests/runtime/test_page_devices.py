"""The arena, and real copies: a thread on the CPU, torch and its ring, a GPU if there is one."""

import contextlib
import threading
import time
import zlib
from dataclasses import dataclass

import numpy as np
import pytest

from kernels.planes import pack_planes
from policies.orders import BitWidths, PrecisionOrders
from policies.weight_page_rules import check_history
from policies.weight_page_table import MovementRules
from runtime.page_arena import PageArena
from runtime.page_devices import CopyJob, CpuDevice
from runtime.page_layout import BlockShape, CanonicalLayout
from runtime.page_movement import PageMover
from runtime.page_parent import HostParent
from runtime.page_tables import PageTables

torch = pytest.importorskip("torch")

from runtime.page_torch_device import CudaStreams, TorchDevice  # noqa: E402

SHAPES = [BlockShape(64, 160, 2), BlockShape(40, 300)] * 2
CUDA = pytest.param(
    "cuda:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)


@dataclass
class Block:
    planes: np.ndarray
    tables: dict


def blocks():
    chance = np.random.default_rng(5)
    return [
        Block(
            pack_planes(chance.integers(0, 256, (s.rows, s.columns), dtype=np.uint8), 8),
            {q: chance.normal(size=(s.rows, 1 << q)).astype(np.float16) for q in range(2, 9)},
        )
        for s in SHAPES
    ]


@dataclass
class Event:
    """An event that happens when the test says so."""

    happened: bool = True

    def query(self):
        return self.happened

    def synchronize(self):
        assert self.happened


class InlineStreams:
    """Streams of the CPU: work is done when it is enqueued, events happen when they are let."""

    def __init__(self):
        self.open = True
        self.copies = []
        self.waited_for = []
        self.log = threading.Lock()

    def on_copy_stream(self):
        return contextlib.nullcontext()

    def compute_events(self):
        return [Event()]

    def copy_after(self, events):
        self.waited_for += events

    def copy_event(self):
        event = Event(self.open)
        self.copies.append(event)
        return event


def torch_device(arena, place, **more):
    streams = InlineStreams() if place == "cpu" else CudaStreams(place)
    if place == "cpu":
        arena.buffer = TorchOnCpu(arena.buffer.array)
    return TorchDevice(arena, streams, slot_bytes=64 * 1024, **more), streams


class TorchOnCpu:
    """The host arena, seen by torch."""

    def __init__(self, array):
        self.array = torch.from_numpy(array)
        self.address = array.ctypes.data


def in_arena(arena):
    array = arena.buffer.array
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def until(done, mover, step):
    """Boundaries until something has happened (threads need their time)."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        step += 1
        mover.boundary(step)
        time.sleep(0.001)
    return step


def orders(plan_id, drops, raises):
    def widths(pairs):
        return BitWidths(np.array(list(pairs), np.int64), np.array(list(pairs.values()), np.int64))

    return PrecisionOrders(plan_id, widths(drops), widths(raises))


def make(kind, place="cpu", verify=True, pinned=True, job_bytes=16 * 1024):
    history = []
    arena = PageArena(400, page_bytes=1024, device=place, history=history.append)
    if kind == "thread":
        device, streams = CpuDevice(arena, verify=verify), None
    else:
        device, streams = torch_device(arena, place, verify=verify)
    parent = HostParent(
        SHAPES,
        CanonicalLayout(),
        page_bytes=1024,
        allocate=device.host_memory if pinned else None,
    )
    parent.store_all(blocks())
    mover = PageMover(
        parent,
        arena,
        device,
        np.array([4, 3, 2, 5]),
        rules=MovementRules(timeout_steps=1 << 40),
        job_bytes=job_bytes,
        history=history.append,
    )
    return mover, arena, parent, streams, history


def assert_bits_are_the_parents(mover, arena, parent):
    bytes_ = in_arena(arena)
    for block, q in enumerate(mover.tables.bits.tolist()):
        lists = [mover.tables.plane_list(block, p) for p in range(q)]
        lists += [mover.tables.table_list(block, bits) for bits in range(2, q + 1)]
        parts = [*range(q), *(8 + bits - 2 for bits in range(2, q + 1))]
        for part, pages in zip(parts, lists, strict=True):
            stream = parent.stream(block, part)
            assert bytes_[pages].reshape(-1)[: len(stream)].tobytes() == stream.tobytes()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(
    ("kind", "place"),
    [("thread", "cpu"), ("torch", "cpu"), pytest.param("torch", *CUDA.values, marks=CUDA.marks)],
)
def test_raises_and_drops_on_a_real_device(kind, place, pinned, verify):
    mover, arena, parent, _, history = make(kind, place, verify, pinned)
    try:
        assert_bits_are_the_parents(mover, arena, parent)
        mover.plan(orders(1, {0: 2, 3: 3}, {1: 8, 2: 6}), step=1)
        step = until(lambda: mover.at_rest, mover, 0)
        assert mover.tables.bits.tolist() == [2, 8, 6, 3]
        assert_bits_are_the_parents(mover, arena, parent)
        mover.plan(orders(2, {1: 3}, {0: 7, 3: 4}), step=step + 1)
        step = until(lambda: mover.at_rest, mover, step)
        assert_bits_are_the_parents(mover, arena, parent)
        report = mover.report()
        assert report.drops == 3
        assert report.raises >= 4  # partial raises count each time
        assert report.wasted_bytes == 0
        assert report.errors == ()
        assert check_history(history) is None
    finally:
        mover.close()


@pytest.mark.parametrize("place", ["cpu", CUDA])
def test_the_mirror_on_the_device_follows_the_tables_at_fixed_addresses(place):
    mover, _, _, _, _ = make("torch", place)
    try:
        mirror = mover._device.tables
        arrays = (mirror.bits, mirror.plane_pages, mirror.table_pages)
        addresses = [array.data_ptr() for array in arrays]
        mover.plan(orders(1, {0: 2}, {1: 8}), step=1)
        until(lambda: mover.at_rest, mover, 0)
        host = (mover.tables.bits, mover.tables.plane_pages, mover.tables.table_pages)
        for array, expected in zip(arrays, host, strict=True):
            assert np.array_equal(array.cpu().numpy(), expected)
        assert [array.data_ptr() for array in arrays] == addresses
    finally:
        mover.close()


def test_nothing_lands_before_its_event_has_happened():
    mover, arena, parent, streams, _ = make("torch")
    try:
        streams.open = False
        mover.plan(orders(1, {}, {2: 3}), step=1)
        deadline = time.monotonic() + 60
        while not any(not event.happened for event in streams.copies):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for step in range(1, 4):
            mover.boundary(step)
        assert mover.tables.bits[2] == 2
        for event in streams.copies:
            event.happened = True
        until(lambda: mover.at_rest, mover, 3)
        assert mover.tables.bits[2] == 3
        assert_bits_are_the_parents(mover, arena, parent)
        assert streams.waited_for  # the side stream is ordered behind the computation
    finally:
        mover.close()


def test_no_more_jobs_are_under_way_than_the_ring_has_slots():
    mover, _, _, streams, _ = make("torch")
    try:
        streams.open = False
        mover.plan(orders(1, {}, {1: 8, 2: 8, 0: 8, 3: 8}), step=1)
        assert mover.report().jobs > 3
        for step in range(1, 5):
            mover.boundary(step)
            assert len(mover._under_way) == 3
        streams.open = True
        for event in streams.copies:
            event.happened = True
        until(lambda: mover.at_rest or _let_all(streams), mover, 5)
        assert mover.tables.bits.tolist() == [8, 8, 8, 8]
    finally:
        mover.close()


def _let_all(streams):
    for event in list(streams.copies):
        event.happened = True
    return False


@pytest.mark.parametrize("kind", ["thread", "torch"])
def test_a_copy_that_raises_is_reported_and_the_thread_lives_on(kind):
    mover, arena, parent, _, history = make(kind)
    device = mover._device
    try:
        source = "_host_pages" if kind == "thread" else "_source"
        good = getattr(device, source)
        if kind == "torch":
            device._pinned_source = None
        setattr(device, source, good[:1])  # reads behind the end of the parent
        mover.plan(orders(1, {}, {2: 3}), step=1)
        step = until(lambda: mover.at_rest, mover, 0)
        assert mover.tables.bits[2] == 2
        report = mover.report()
        assert report.blocks_by_reason == {"copy error": 1}
        assert "Error" in report.errors[0]
        setattr(device, source, good)
        mover.plan(orders(2, {}, {2: 3}), step=step + 9)
        until(lambda: mover.at_rest, mover, step + 9)
        assert mover.tables.bits[2] == 3
        assert_bits_are_the_parents(mover, arena, parent)
        assert check_history(history) is None
    finally:
        mover.close()


def test_a_cancelled_job_is_skipped_and_still_ends():
    arena = PageArena(8, page_bytes=1024)
    device = CpuDevice(arena)
    try:
        source = np.full((4, 1024), 7, np.uint8)
        device.attach(source, None)
        one = np.zeros(1, np.int64)
        job = CopyJob(0, one, one, one + 1024, np.array([0, 1]), one, np.zeros(1, np.int32))
        device.cancel(job)
        assert device.start(job)
        deadline = time.monotonic() + 60
        while not (ends := device.ended()):
            assert time.monotonic() < deadline
        assert ends[0].error == "cancelled before its turn"
        assert not arena.buffer.array.any()
        device.start(job)
        while not (ends := device.ended()):
            assert time.monotonic() < deadline
        assert ends[0].error is None
        assert ends[0].checksums.tolist() == [zlib.crc32(bytes([7]) * 1024)]
    finally:
        device.close()


def test_a_part_larger_than_a_slot_is_refused():
    mover, _, _, _, _ = make("torch")
    try:
        pages = np.arange(65, dtype=np.int64)
        job = CopyJob(9, pages, pages, pages, pages, pages, pages.astype(np.int32))
        with pytest.raises(ValueError, match="65 pages does not fit a slot of 64"):
            mover._device.start(job)
    finally:
        mover.close()


def test_a_ring_too_small_for_a_table_is_refused_at_the_start():
    arena = PageArena(400, page_bytes=1024)
    arena.buffer = TorchOnCpu(arena.buffer.array)
    device = TorchDevice(arena, InlineStreams(), slot_bytes=8192)
    parent = HostParent(SHAPES, CanonicalLayout(), page_bytes=1024)
    try:
        with pytest.raises(ValueError, match="largest plane or table, 32768 bytes, not 8192"):
            PageMover(parent, arena, device, np.array([2, 2, 2, 2]))
    finally:
        device.close()


def test_jobs_are_no_larger_than_a_slot():
    mover, arena, parent, _, _ = make("torch", job_bytes=1 << 30)
    try:
        mover.plan(orders(1, {}, {0: 8, 1: 8, 2: 8, 3: 8}), step=1)
        sizes = [len(job.arena_pages) for job in [*mover._queue, *mover._under_way.values()]]
        assert max(sizes) <= 64 < sum(sizes)
        until(lambda: mover.at_rest, mover, 1)
        assert_bits_are_the_parents(mover, arena, parent)
    finally:
        mover.close()


def test_kv_blocks_are_lists_of_pages_all_or_none():
    arena = PageArena(10, page_bytes=1024)
    pages = arena.take_kv(3, 2500)
    assert pages.shape == (3, 3)
    assert len(set(pages.ravel().tolist())) == 9
    assert arena.take_kv(1, 2500) is None
    arena.give_kv(pages[1])
    with pytest.raises(RuntimeError, match="held by free"):
        arena.give_kv(pages[1])
    assert arena.use().kv_pages == 6
    assert (arena.use().most_kv_pages, arena.use().refused_kv) == (9, 1)
    assert arena.take_kv(4, 1).shape == (4, 1)
    arena.check()


def test_the_host_arena_is_aligned_and_its_pages_are_consecutive():
    for page_bytes in (1024, 32768):
        arena = PageArena(5, page_bytes=page_bytes)
        assert arena.buffer.address % 64 == 0
        assert arena.buffer.array.shape == (5, page_bytes)
        assert arena.buffer.array.flags.c_contiguous
        assert arena.buffer.array.ctypes.data == arena.buffer.address


@pytest.mark.parametrize("page_bytes", [0, 1000, 512])
def test_page_sizes_out_of_range_are_refused(page_bytes):
    with pytest.raises(ValueError, match=f"power of two >= 1024, not {page_bytes}"):
        PageArena(4, page_bytes=page_bytes)


def test_a_parent_of_other_pages_is_refused():
    arena = PageArena(400, page_bytes=2048)
    parent = HostParent(SHAPES, CanonicalLayout(), page_bytes=1024)
    device = CpuDevice(arena)
    try:
        with pytest.raises(ValueError, match="1024 bytes, the arena's 2048"):
            PageMover(parent, arena, device, np.array([2, 2, 2, 2]))
    finally:
        device.close()


def test_tables_are_published_before_the_first_step():
    mover, _, _, _, _ = make("thread")
    try:
        assert isinstance(mover.tables, PageTables)
        assert mover.tables.bits.tolist() == [4, 3, 2, 5]
        assert np.count_nonzero(mover.tables.plane_pages[2, 2:] != -1) == 0
    finally:
        mover.close()
