"""Every kernel compiles for three generations of GPUs, without a GPU, and spills nothing."""

from pathlib import Path

import pytest

from kernels.cuda import compile as cuda_compile
from kernels.cuda import gather, load, pack, shared_table
from kernels.cuda.compile import (
    ARCHITECTURES,
    CompileError,
    CompilerMissingError,
    compile_cubin,
    resource_usage,
)
from kernels.cuda.load import GpuUnavailableError, load_kernels
from kernels.cuda_emulation.source_text import read_source

needs_nvrtc = pytest.mark.skipif(
    not cuda_compile.available(), reason=f"packages missing: {cuda_compile.missing_packages()}"
)
SOURCES = Path(__file__).parent / "emulation_sources"
KERNELS = {
    pack.SOURCE: {"pack_planes", "unpack_codes"},
    gather.SOURCE: {"gather_pages", "scatter_pages"},
    shared_table.SOURCE: {"route_slots", "moe_gate_up", "moe_down", "combine_slots"},
}


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_every_kernel_compiles_without_spills(path, architecture):
    compiled = compile_cubin(read_source(path), architecture)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert set(compiled.resources) == KERNELS[path]
    for name, used in compiled.resources.items():
        assert used.spill_store_bytes == used.spill_load_bytes == used.stack_bytes == 0, name
        assert 0 < used.registers <= 128, name  # four blocks of 128 threads share 65,536


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["gemv_fp16", "misc", "tensor_core", "paged_decode", "ptx"])
def test_the_sources_of_the_emulation_tests_are_cuda(name, architecture):
    expressions = ["block_max<float, 64>"] if name == "misc" else []
    source = read_source(SOURCES / f"{name}.cu")
    compiled = compile_cubin(source, architecture, name_expressions=expressions)
    assert compiled.architecture == architecture
    assert set(expressions) <= set(compiled.resources)
    for expression in expressions:
        assert compiled.symbols[expression].encode() in compiled.cubin


@needs_nvrtc
def test_spills_registers_and_shared_memory_are_reported():
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) wide(float* x) {
      __shared__ float s[256];
      float v[64];
      for (int i = 0; i < 64; ++i) v[i] = x[i * 1024 + threadIdx.x];
      s[threadIdx.x & 255] = v[3];
      __syncthreads();
      for (int r = 0; r < 9; ++r)
        for (int i = 0; i < 64; ++i) v[i] = v[(i + 17) & 63] * v[i] + s[i];
      for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = v[i];
    }"""
    used = resource_usage(source, architectures=["sm_90"])["wide"]["sm_90"]
    assert used.static_shared_bytes == 1024
    assert used.registers <= 32
    assert used.spill_store_bytes > 0
    assert used.spill_load_bytes > 0
    assert used.stack_bytes > 0


@needs_nvrtc
def test_defines_reach_the_source_and_an_error_shows_the_compilers_log():
    source = 'extern "C" __global__ void k(int* x) { x[0] = VALUE; }'
    assert compile_cubin(source, "sm_90", defines=["VALUE=3"]).cubin
    with pytest.raises(CompileError, match=r'sm_90: .*identifier "VALUE" is undefined'):
        compile_cubin(source, "sm_90")


@needs_nvrtc
def test_an_unchanged_source_is_not_compiled_again(monkeypatch):
    source = 'extern "C" __global__ void k(int* x) { x[0] = 5; }'
    first = compile_cubin(source, "sm_80")

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda_compile, "_compile", refuse)
    assert compile_cubin(source, "sm_80") == first
    with pytest.raises(AssertionError, match="compiled again"):
        compile_cubin(source, "sm_80", options=["--use_fast_math"])


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(cuda_compile, "missing_packages", lambda: ("nvidia-cuda-nvrtc",))
    cuda_compile._nvrtc.cache_clear()
    with pytest.raises(CompilerMissingError, match="NVRTC needs packages: nvidia-cuda-nvrtc"):
        compile_cubin("", "sm_90")
    cuda_compile._nvrtc.cache_clear()


def test_loading_for_a_gpu_without_one_says_why(monkeypatch):
    monkeypatch.setattr(load, "gpu_problem", lambda: "no CUDA device")
    with pytest.raises(GpuUnavailableError, match="no CUDA device"):
        load_kernels(pack.SOURCE, target="gpu")


def test_an_unknown_target_is_refused():
    with pytest.raises(ValueError, match="must be 'gpu' or 'emulation', not 'tpu'"):
        load_kernels(pack.SOURCE, target="tpu")  # type: ignore[arg-type]
