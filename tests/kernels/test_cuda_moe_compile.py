"""The tensor-core expert kernels compile for every architecture, and nothing spills."""

import pytest

from kernels.cuda.compile import ARCHITECTURES, available, compile_cubin
from kernels.cuda.moe_tile import TILE_SOURCE, kernel_variants
from kernels.cuda_emulation.source_text import read_source
from kernels.sass_counts import disassemble, find_nvdisasm, inner_loops

pytestmark = pytest.mark.skipif(not available(), reason="NVRTC wheels are not installed")
QUICK = {"moe_schedule", "moe_tile_gate_up_1", "moe_tile_down_1"}  # of these all architectures
MAX_THREADS_REGISTERS = 65536
CASES = [
    pytest.param(
        *variant,
        architecture,
        marks=() if variant[0] in QUICK or architecture == "sm_90" else pytest.mark.slow,
        id=f"{variant[0]}-{architecture}",
    )
    for variant in kernel_variants()
    for architecture in ARCHITECTURES
]


@pytest.mark.parametrize(("name", "source", "defines", "expressions", "architecture"), CASES)
def test_no_kernel_spills(name, source, defines, expressions, architecture):
    compiled = compile_cubin(
        read_source(source), architecture, defines=defines, name_expressions=expressions
    )
    assert set(expressions) <= set(compiled.resources)
    blocks = 1 if name.endswith(("_4", "_many")) else 2
    for kernel, used in compiled.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == 0, (kernel, used)
        assert used.registers * 256 * blocks <= MAX_THREADS_REGISTERS, (kernel, used)


# Instructions of the loop over units of moe_tile<GATE_UP, 1, false> on sm_90, for each weight a
# lane decodes (128 a unit): all, and those of the integer units. The paths of a last half unit and
# of a page's end are counted too, so a turn of the loop executes fewer.
INSTRUCTIONS_PER_WEIGHT = {
    2: (1.6, 1.1),
    3: (1.85, 1.25),
    4: (2.7, 2.05),
    5: (6.7, 3.7),
    6: (7.2, 4.0),
    7: (7.4, 4.2),
    8: (7.3, 4.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(2, 9))
def test_instructions_per_weight_stay_low(bits):
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        pytest.skip("nvdisasm is not installed")
    compiled = compile_cubin(
        read_source(TILE_SOURCE),
        "sm_90",
        defines=[f"WIDTHS={1 << bits}"],
        name_expressions=["moe_tile<0, 1, false>"],
    )
    loops = [
        loop
        for each in inner_loops(disassemble(compiled.cubin, nvdisasm)).values()
        for loop in each
        if loop.tensor_ops
    ]
    assert [loop.tensor_ops for loop in loops] == [8 if bits <= 5 else 16]
    everything, integer = INSTRUCTIONS_PER_WEIGHT[bits]
    assert loops[0].opcodes.total() <= 128 * everything
    assert loops[0].by_unit()["integer"] <= 128 * integer
