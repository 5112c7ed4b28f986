"""The device that every test of this folder runs on, or why there is none."""

from types import ModuleType

import numpy as np
import pytest

from kernels.cuda.load import gpu_problem
from kernels.sample_layer import SampleLayer


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """CuPy with a device; without one the test is skipped, saying what is missing."""
    problem = gpu_problem()
    if problem:
        pytest.skip(problem)
    import cupy

    return cupy


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def on_device(cupy):
    """Pages of a sample layer in device memory; kept by the caller while kernels use them."""

    def upload(layer: SampleLayer):
        from kernels.cuda.shared_table import DevicePages

        return DevicePages(
            cupy.asarray(layer.arena),
            layer.page_bytes,
            layer.min_bits,
            cupy.asarray(layer.bits),
            cupy.asarray(layer.plane_pages),
            cupy.asarray(layer.table_pages),
        )

    return upload
