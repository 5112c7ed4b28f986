"""Attention over pages compiles for every architecture, and nothing spills."""

import pytest

from kernels.cuda.compile import ARCHITECTURES, available, compile_cubin
from kernels.cuda.paged_attention import SOURCE, kernel_variants
from kernels.cuda_emulation.source_text import read_source

pytestmark = pytest.mark.skipif(not available(), reason="NVRTC wheels are not installed")
QUICK = {("bfloat16-128", "sm_80"), ("bfloat16-128", "sm_90"), ("bfloat16-128", "sm_100")}
REGISTERS = 65536
CASES = [
    pytest.param(
        expressions,
        architecture,
        marks=() if (name, architecture) in QUICK else pytest.mark.slow,
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
