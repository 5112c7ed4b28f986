"""Pinned host buffers between a GPU and the store, and the copies that pass through them.

The pool is bounded and every wait for it has a deadline. Nothing here knows what is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreError


class CopyEvent(Protocol):
    """When a copy between host and device is over."""

    def wait(self) -> None:
        """Return once it is."""


class CopyDevice(Protocol):
    """A device that copies between its memory and pinned host memory."""

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that the device can copy to and from without help."""

    def to_host(self, tensor: Any, buffer: NDArray[np.uint8]) -> CopyEvent:
        """Start copying a dense tensor into a pinned buffer of its size."""

    def to_device(self, buffer: NDArray[np.uint8], tensor: Any) -> CopyEvent:
        """Start copying a pinned buffer into a dense tensor of its size."""


class HostDevice:
    """Host memory as a device of its own: copies are over when they return."""

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Plain memory."""
        return np.zeros(num_bytes, np.uint8)

    def to_host(self, tensor: Any, buffer: NDArray[np.uint8]) -> CopyEvent:
        """Copy at once."""
        buffer[:] = torch_bytes(tensor).numpy()
        return _Over()

    def to_device(self, buffer: NDArray[np.uint8], tensor: Any) -> CopyEvent:
        """Copy at once."""
        torch_bytes(tensor).numpy()[:] = buffer
        return _Over()


class _Over:
    """An event of the past."""

    def wait(self) -> None:
        return


class TorchDevice:
    """A CUDA or ROCm device as torch sees it.

    Copies run on a stream of their own, after what the caller's stream had queued; the caller's
    later work on a tensor that is being read or written must be ordered behind `CopyEvent.wait`.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Page-locked memory; torch keeps it while the array lives."""
        pinned: NDArray[np.uint8] = self._torch.empty(
            num_bytes, dtype=self._torch.uint8, pin_memory=True
        ).numpy()
        return pinned

    def to_host(self, tensor: Any, buffer: NDArray[np.uint8]) -> CopyEvent:
        """Queue the copy on the stream of copies."""
        return self._copy(self._torch.from_numpy(buffer), torch_bytes(tensor), tensor)

    def to_device(self, buffer: NDArray[np.uint8], tensor: Any) -> CopyEvent:
        """Queue the copy on the stream of copies."""
        return self._copy(torch_bytes(tensor), self._torch.from_numpy(buffer), tensor)

    def _copy(self, target: Any, source: Any, tensor: Any) -> CopyEvent:
        cuda = self._torch.cuda
        self.stream.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            torch_of(tensor).record_stream(self.stream)
            event = cuda.Event()
            event.record(self.stream)
        return _Synchronized(event)


class CupyDevice:
    """A CUDA device as CuPy sees it, for arrays of any library that share memory with CuPy.

    Copies run on a stream of their own, after what the caller's CuPy stream had queued.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy: Any = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Page-locked memory; freed with the array."""
        memory = self._cupy.cuda.alloc_pinned_memory(num_bytes)
        return np.frombuffer(memory, np.uint8, num_bytes)

    def to_host(self, tensor: Any, buffer: NDArray[np.uint8]) -> CopyEvent:
        """Queue the copy on the stream of copies."""
        source = self._bytes(tensor)
        return self._queue(lambda: source.get(stream=self.stream, out=buffer, blocking=False))

    def to_device(self, buffer: NDArray[np.uint8], tensor: Any) -> CopyEvent:
        """Queue the copy on the stream of copies."""
        target = self._bytes(tensor)
        return self._queue(lambda: target.set(buffer, stream=self.stream))

    def _bytes(self, tensor: Any) -> Any:
        has_interface = hasattr(tensor, "__cuda_array_interface__")
        cupy = self._cupy
        array = cupy.asarray(tensor) if has_interface else cupy.from_dlpack(tensor)
        return array.reshape(-1).view(cupy.uint8)

    def _queue(self, copy: Callable[[], Any]) -> CopyEvent:
        self.stream.wait_event(self._cupy.cuda.get_current_stream().record())
        copy()
        return _Synchronized(self.stream.record())


class _Synchronized:
    """A device event whose wait lets other threads run."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """A pinned buffer on loan.

    Attributes:
        view: The bytes asked for.
        whole: The buffer they are the beginning of.
    """

    view: NDArray[np.uint8]
    whole: NDArray[np.uint8]


class StagingPool:
    """Pinned buffers of one device, at most so many bytes, given back and used again.

    Args:
        device: Allocates them and copies to and from them.
        capacity_bytes: All buffers together, on loan or waiting.
    """

    def __init__(self, device: CopyDevice, capacity_bytes: int) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self._allocated_bytes = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._changed = threading.Condition()

    @property
    def lent_bytes(self) -> int:
        """Bytes of the buffers on loan."""
        with self._changed:
            waiting = sum(size * len(kept) for size, kept in self._free.items())
            return self._allocated_bytes - waiting

    def take(self, num_bytes: int, deadline: Deadline) -> Staging:
        """A buffer of at least that many bytes.

        Raises:
            StoreError: If it is larger than the whole pool.
            DeadlineError: If none comes free in time.
        """
        size = _size_class(num_bytes, self.capacity_bytes)
        if num_bytes > size:
            raise StoreError(
                f"{num_bytes} bytes do not fit the staging pool of {self.capacity_bytes} bytes"
            )
        with self._changed:
            while (whole := self._try_take(size)) is None:
                deadline.require("waiting for a staging buffer")
                self._changed.wait(deadline.left_s())
        return Staging(whole[:num_bytes], whole)

    def give_back(self, staging: Staging) -> None:
        """Return a buffer that no copy uses any more."""
        with self._changed:
            self._free.setdefault(staging.whole.nbytes, []).append(staging.whole)
            self._changed.notify_all()

    def _try_take(self, size: int) -> NDArray[np.uint8] | None:
        kept = self._free.get(size)
        if kept:
            return kept.pop()
        for other, unused in self._free.items():
            while unused and self._allocated_bytes + size > self.capacity_bytes:
                unused.pop()  # buffers of another size give way
                self._allocated_bytes -= other
        if self._allocated_bytes + size > self.capacity_bytes:
            return None
        whole = self.device.pinned(size)
        self._allocated_bytes += size
        return whole


def is_torch(tensor: Any) -> bool:
    """Whether it is torch's, told without importing torch."""
    return type(tensor).__module__.partition(".")[0] == "torch"


def torch_of(tensor: Any) -> Any:
    """A device array of any library as a torch tensor over the same memory."""
    if is_torch(tensor):
        return tensor.detach()
    import torch

    if hasattr(tensor, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(tensor)
    return torch.as_tensor(tensor, device="cuda")  # by __cuda_array_interface__


def torch_bytes(tensor: Any) -> Any:
    """A dense array's memory as torch bytes, one-dimensional."""
    import torch

    return torch_of(tensor).reshape(-1).view(torch.uint8)


def _size_class(num_bytes: int, capacity_bytes: int) -> int:
    """The next of four sizes per power of two, so that few sizes serve all; the whole at most."""
    step = max(4096, 1 << max(0, max(1, num_bytes).bit_length() - 3))
    return min(-(-num_bytes // step) * step or step, capacity_bytes)
