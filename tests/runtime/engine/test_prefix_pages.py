"""Blocks between pages and buffers: the bytes, and the checksum of what arrived."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.prefix_pages import SCATTER_BYTES, BlockCopies, DeviceCopies, HostCopies
from runtime.model.kv_cache import LEFT_BEHIND
from runtime.store.blocks import checksum

PAGE_BYTES, NUM_PAGES = 1024, 40
KINDS = ["host", "device"]


def pages_and_copies(kind: str, num_pages: int = NUM_PAGES) -> tuple[np.ndarray, BlockCopies]:
    """Pages of random bytes; those of the device kind are a tensor on the processor."""
    pages = np.random.default_rng(0).integers(0, 256, (num_pages, PAGE_BYTES), np.uint8)
    if kind == "host":
        return pages, HostCopies(pages)
    return pages, DeviceCopies(torch.from_numpy(pages))


def random_bytes(count: int) -> bytes:
    return np.random.default_rng(1).bytes(count)


@pytest.mark.parametrize("kind", KINDS)
@given(order=st.permutations(range(NUM_PAGES)), count=st.integers(1, NUM_PAGES), gaps=st.data())
@settings(max_examples=40, deadline=None)
def test_pages_get_their_bytes_and_no_other_page_does(
    kind: str, order: list[int], count: int, gaps: st.DataObject
) -> None:
    pages, copies = pages_and_copies(kind)
    before = pages.copy()
    ids = np.array(order[:count], np.int32)
    ids[gaps.draw(st.lists(st.integers(0, count - 1), max_size=3))] = LEFT_BEHIND
    source = random_bytes(count * PAGE_BYTES)
    copies.order()
    assert copies.write(memoryview(source), ids) == checksum(source)
    rows = np.frombuffer(source, np.uint8).reshape(count, PAGE_BYTES)
    for row, page in zip(rows, ids, strict=True):
        if page != LEFT_BEHIND:
            assert np.array_equal(pages[page], row)
    others = np.setdiff1d(np.arange(NUM_PAGES), ids)
    assert np.array_equal(pages[others], before[others])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [[3], [5, 6, 7, 20, 1, 2], list(range(NUM_PAGES))])
def test_a_buffer_gets_the_pages_in_their_order(kind: str, ids: list[int]) -> None:
    pages, copies = pages_and_copies(kind)
    buffer = bytearray(len(ids) * PAGE_BYTES)
    assert copies.read(np.array(ids, np.int32), memoryview(buffer)) == checksum(buffer)
    assert bytes(buffer) == pages[ids].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [1, 7, 300, 2000], ids=lambda run: f"runs-of-{run}")
def test_a_block_larger_than_a_piece_goes_both_ways(kind: str, run: int) -> None:
    count = 2 * SCATTER_BYTES // PAGE_BYTES + 3
    _, copies = pages_and_copies(kind, 4 * count)
    rows = np.arange(4 * count)[: 4 * count // run * run].reshape(-1, run)
    ids = np.random.default_rng(2).permutation(rows).ravel()[:count].astype(np.int32)
    source = random_bytes(count * PAGE_BYTES)
    assert copies.write(memoryview(source), ids) == checksum(source)
    buffer = bytearray(count * PAGE_BYTES)
    assert copies.read(ids, memoryview(buffer)) == checksum(source)
    assert bytes(buffer) == source


@pytest.mark.parametrize("ids", [[6, 7, 8], [7, 2, 9], list(range(NUM_PAGES)), [7, LEFT_BEHIND]])
def test_the_checksum_is_of_the_pages_not_of_the_source(ids: list[int]) -> None:
    """A page that does not take what is written is seen, however its neighbours lie."""
    pages, _ = pages_and_copies("host")

    class Worn(np.ndarray):
        def __setitem__(self, at: object, value: object) -> None:
            super().__setitem__(at, value)
            pages[7, 100] ^= 1

    copies = HostCopies(pages.view(Worn))
    source = random_bytes(len(ids) * PAGE_BYTES)
    assert copies.write(memoryview(source), np.array(ids, np.int32)) != checksum(source)
