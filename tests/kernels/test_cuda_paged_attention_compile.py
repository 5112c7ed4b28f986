"""Attention over pages compiles for every architecture, and nothing spills.

All 51 builds take ten minutes; without ``SERVING_TWIN_ALL_BUILDS`` those of the usual type and head
size run, and one of every other.
"""

import os

import pytest

from kernels.cuda.compile import ARCHITECTURES, available, compile_cubin
from kernels.cuda.paged_attention import SOURCE, kernel_variants
from kernels.cuda_emulation.source_text import read_source

pytestmark = pytest.mark.skipif(not available(), reason="NVRTC wheels are not installed")
ALL_BUILDS = "SERVING_TWIN_ALL_BUILDS"
QUICK = {
    *(("bfloat16-128", architecture) for architecture in ARCHITECTURES),
    ("float16-64", "sm_80"),
    ("float32-32", "sm_90"),
    ("bfloat16-96", "sm_100"),
}
LEFT_OUT = pytest.mark.skipif(ALL_BUILDS not in os.environ, reason=f"set {ALL_BUILDS} to run it")
REGISTERS = 65536
CASES = [
    pytest.param(
        expressions,
        architecture,
        marks=() if (name, architecture) in QUICK else LEFT_OUT,
        id=f"{name}-{architecture}",
    )
    for name, expressions in kernel_variants()
    for architecture in ARCHITECTURES
]


@pytest.mark.parametrize(("expressions", "architecture"), CASES)
def test_no_kernel_spills_and_two_blocks_fit_a_multiprocessor(expressions, architecture):
    compiled = compile_cubin(read_source(SOURCE), architecture, name_expressions=expressions)
    assert {*expressions, "combine_chunks"} == set(compiled.resources)
    for kernel, used in compiled.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == 0, (kernel, used)
        assert used.registers * 128 * 2 <= REGISTERS, (kernel, used)
