"""NumPy arrays, torch tensors and GPU arrays as what the store puts and loads.

Dense host memory is handed over as it is, without a copy. GPU memory goes through pinned host
buffers taken from a bounded pool; an event marks when a copy is over, so the thread that talks to
the store, not the one that feeds the GPU, waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError
from runtime.store.tensor_staging import (
    CopyDevice,
    CopyEvent,
    StagingPool,
    is_torch,
    torch_bytes,
)

ALIGN_BYTES = 256  # copy engines like aligned rows


def host_view(tensor: Any, *, writable: bool = False) -> memoryview:
    """The bytes of dense host memory, without a copy.

    Args:
        tensor: NumPy array, torch CPU tensor of any type (bfloat16 too), or any object with the
            buffer protocol.
        writable: Whether the store is going to write there.

    Returns:
        One-dimensional view of unsigned bytes.

    Raises:
        StoreError: If the memory is not dense, not writable though it must be, or on a device.
    """
    if is_on_device(tensor):
        raise StoreError("the tensor lies on a device; use put_tensors and load_tensors")
    if is_torch(tensor):
        if not tensor.is_contiguous():
            raise StoreError(_not_dense(tensor))
        tensor = torch_bytes(tensor.detach()).numpy()
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous:
            raise StoreError(_not_dense(tensor))
        if writable and not tensor.flags.writeable:
            raise StoreError("the array is read-only and cannot be loaded into")
        tensor = tensor.reshape(-1).view(np.uint8)
    view = memoryview(tensor)
    if not view.c_contiguous:
        raise StoreError(_not_dense(tensor))
    if writable and view.readonly:
        raise StoreError("the buffer is read-only and cannot be loaded into")
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor's memory is a GPU's."""
    if is_torch(tensor):
        return bool(tensor.device.type != "cpu")
    return hasattr(tensor, "__cuda_array_interface__")


def put_tensors(
    store: Any,
    keys: Sequence[bytes],
    tensors: Sequence[Any],
    *,
    first: int = 0,
    deadline_s: float,
    staging: StagingPool | None = None,
    durable: bool = False,
    tenant: bytes = b"",
) -> Any:
    """Store one tensor per block: the blocks from ``first`` of a chain.

    Args:
        store: An open store.
        keys: The whole chain.
        tensors: Dense tensors of ``keys[first:]``, on the host or on the staging pool's device.
        first: How many leading blocks the store holds already.
        deadline_s: Seconds for copies and store together.
        staging: Pinned buffers; needed for device tensors.
        durable: Whether to return only once the blocks are on SSD.
        tenant: Tag of the tenant's salt.

    Returns:
        What the store's ``put`` returns.

    Raises:
        StoreError: For tensors that are not dense, or device tensors without a staging pool.
        DeadlineError: If no staging buffer came free in time.
    """
    deadline = Deadline.after(deadline_s)
    on_device = [tensor for tensor in tensors if is_on_device(tensor)]
    with _staged(staging, on_device, deadline) as (buffers, events):
        for tensor, buffer in zip(on_device, buffers, strict=True):
            events.append(_device_of(staging).to_host(tensor, buffer))
        staged = iter(buffers)
        blocks = [
            next(staged).data if is_on_device(tensor) else host_view(tensor) for tensor in tensors
        ]
        for event in events:
            event.wait()
        return store.put(
            keys,
            blocks,
            first=first,
            deadline_s=deadline.left_s(),
            durable=durable,
            tenant=tenant,
        )


def load_tensors(
    store: Any,
    keys: Sequence[bytes],
    tensors: Sequence[Any],
    *,
    deadline_s: float,
    staging: StagingPool | None = None,
) -> int:
    """Load the leading blocks of a chain into one tensor each.

    Args:
        store: An open store.
        keys: The chain.
        tensors: Dense, writable tensors, one for each key, on the host or on the pool's device.
        deadline_s: Seconds for store and copies together.
        staging: Pinned buffers; needed for device tensors.

    Returns:
        How many leading tensors hold their block; the others are as they were or undefined.

    Raises:
        StoreError: For tensors that are not dense, or device tensors without a staging pool.
        DeadlineError: If no staging buffer came free in time.
    """
    deadline = Deadline.after(deadline_s)
    on_device = [tensor for tensor in tensors if is_on_device(tensor)]
    with _staged(staging, on_device, deadline) as (buffers, events):
        staged = iter(buffers)
        views = [
            next(staged).data if is_on_device(tensor) else host_view(tensor, writable=True)
            for tensor in tensors
        ]
        loaded = int(store.load_into(keys, views, deadline_s=deadline.left_s()))
        staged = iter(buffers)
        for tensor in tensors[:loaded]:
            if is_on_device(tensor):
                events.append(_device_of(staging).to_device(next(staged), tensor))
        for event in events:
            event.wait()
        return loaded


@contextmanager
def _staged(
    staging: StagingPool | None, tensors: Sequence[Any], deadline: Deadline
) -> Iterator[tuple[list[NDArray[np.uint8]], list[CopyEvent]]]:
    """A pinned buffer for each device tensor, cut from one loan, and the copies to wait for.

    One loan, since callers that each hold a part and wait for the rest would wait for each other.
    It goes back only after every copy named in the list is over.
    """
    for tensor in tensors:
        if not _is_dense(tensor):
            raise StoreError(_not_dense(tensor))
    ends = list(accumulate(_aligned(_num_bytes(tensor)) for tensor in tensors))
    if not ends:
        yield [], []
        return
    loan = _pool(staging).take(ends[-1], deadline)
    events: list[CopyEvent] = []
    starts = [0, *ends[:-1]]
    try:
        yield (
            [
                loan.view[start : start + _num_bytes(tensor)]
                for start, tensor in zip(starts, tensors, strict=True)
            ],
            events,
        )
    finally:
        for event in events:
            event.wait()
        _pool(staging).give_back(loan)


def _pool(staging: StagingPool | None) -> StagingPool:
    if staging is None:
        raise StoreError("a tensor on a device needs a staging pool of pinned buffers")
    return staging


def _device_of(staging: StagingPool | None) -> CopyDevice:
    return _pool(staging).device


def _num_bytes(tensor: Any) -> int:
    return int(tensor.nbytes)


def _is_dense(tensor: Any) -> bool:
    if is_torch(tensor):
        return bool(tensor.is_contiguous())
    flags = getattr(tensor, "flags", None)
    if flags is not None:
        return bool(flags.c_contiguous)
    return tensor.__cuda_array_interface__.get("strides") is None


def _not_dense(tensor: Any) -> str:
    shape = tuple(getattr(tensor, "shape", ()))
    return f"a tensor of shape {shape} is not dense (row-major without gaps); pass a contiguous one"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
