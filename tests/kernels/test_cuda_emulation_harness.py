"""What surrounds an emulated kernel: source text, cache, arguments, messages."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernels.cuda_emulation import build_cache, emulator, host_compile
from kernels.cuda_emulation.emulator import EmulationError, RawModule
from kernels.cuda_emulation.source_text import read_source

needs_compiler = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
SCALE = """
extern "C" __global__ void scale(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = 2.f * in[i];
}
extern "C" __global__ void __launch_bounds__((2 * (32)) + 1) shared_words(unsigned* out) {
  extern __shared__ unsigned words[];
  words[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = words[threadIdx.x];
}
"""


def test_kernels_are_found_behind_launch_bounds_and_not_in_comments_or_macros():
    source = SCALE + '// extern "C" __global__ void no(int x)\n'
    source += '#define MAKE(name) \\\n  extern "C" __global__ void name(int x) {}\n'
    source += 'extern "C" __global__ __launch_bounds__(64, 2) void before(int x) {}\n'
    assert host_compile.kernel_names(source) == ["scale", "shared_words", "before"]


def test_local_headers_are_written_out_once_and_lines_stay_true(tmp_path):
    (tmp_path / "inner.cuh").write_text("#pragma once\n#define TWO 2\n")
    (tmp_path / "outer.cuh").write_text(
        '#pragma once\n#include "inner.cuh"\n#define FOUR (2 * TWO)\n'
    )
    main = tmp_path / "main.cu"
    main.write_text(
        '#include <cuda_fp16.h>\n#include "outer.cuh"\n#include "inner.cuh"\nint here;\n'
    )
    text = read_source(main)
    assert text.count("#define TWO 2") == 1
    assert "#include <cuda_fp16.h>" in text
    lines = text.splitlines()
    at = lines.index("int here;")
    markers = [line for line in lines[:at] if line.startswith("#line")]
    assert markers[-1] == '#line 4 "main.cu"'
    assert lines[at - 1] == markers[-1]


def test_headers_of_the_emulation_stay_includes_and_missing_ones_are_named(tmp_path):
    main = tmp_path / "main.cu"
    main.write_text('#include "ptx_compat.h"\n')
    assert '#include "ptx_compat.h"' in read_source(main)
    main.write_text('#include "nowhere.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"main\.cu: includes 'nowhere\.cuh'"):
        read_source(main)


def test_a_file_is_built_once_a_key_and_never_left_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(build_cache, "cache_directory", lambda: tmp_path)
    built = []

    def build(path: Path) -> None:
        built.append(path)
        path.write_text("whole")
        if len(built) == 1:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_cache.cached_file("key", ".txt", build)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert build_cache.cached_file("key", ".txt", build).read_text() == "whole"
    assert len(built) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["key.txt"]


def test_keys_tell_lists_apart_that_join_to_the_same_text():
    assert build_cache.content_key(["ab", "c"]) != build_cache.content_key(["a", "bc"])
    assert build_cache.content_key(["ab", b"c"]) == build_cache.content_key([b"ab", "c"])


def test_a_cache_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = build_cache.cache_directory()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="only its user writes"):
        build_cache.cache_directory()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="only its user writes"):
        build_cache.cache_directory()


def test_without_a_compiler_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(host_compile, "compiler", lambda: None)
    assert not host_compile.available()
    with pytest.raises(EmulationError, match=r"install g\+\+"):
        host_compile.build_library(SCALE, (), (), False)


@needs_compiler
def test_a_compile_error_is_reported_with_its_own_line():
    with pytest.raises(EmulationError, match=r"kernel\.cu:2:.*'nope' was not declared"):
        RawModule(code='extern "C" __global__ void k(int* x) {\n  x[0] = nope; }')


@needs_compiler
def test_an_unknown_kernel_is_answered_with_those_that_there_are():
    with pytest.raises(EmulationError, match="no kernel 'gone' in this source; it has: scale"):
        RawModule(code=SCALE).get_function("gone")


@needs_compiler
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.zeros(4, np.float32),), "takes 3 arguments, 1 given"),
        ((np.float32(1), np.zeros(4, np.float32), np.int32(4)), "argument 0: float32 scalar"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), 4), "argument 2: give a numpy"),
        ((np.zeros(4, np.float32), np.zeros(4, np.float32), np.int64(4)), "argument 2: int64"),
        ((np.zeros(8, np.float32)[::2], np.zeros(4, np.float32), np.int32(4)), "not contiguous"),
    ],
)
def test_arguments_that_a_gpu_would_misread_are_refused(args, message):
    kernel = RawModule(code=SCALE).get_function("scale")
    with pytest.raises(EmulationError, match=message):
        kernel((1,), (4,), args)


@needs_compiler
def test_a_read_only_array_is_taken_as_input_and_refused_as_output():
    kernel = RawModule(code=SCALE).get_function("scale")
    fixed, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    fixed.flags.writeable = False
    kernel((1,), (4,), (fixed, out, np.int32(4)))
    assert (out == 2).all()
    with pytest.raises(EmulationError, match="argument 1: read-only"):
        kernel((1,), (4,), (out, fixed, np.int32(4)))


@needs_compiler
def test_a_read_past_the_end_names_the_argument_and_the_distance():
    kernel = RawModule(code=SCALE).get_function("scale")
    short, out = np.ones(4, np.float32), np.zeros(8, np.float32)
    with pytest.raises(
        EmulationError, match=r"thread \(4,0,0\).*: 0 bytes past the end of argument 0"
    ):
        kernel((1,), (8,), (short, out, np.int32(8)))


@needs_compiler
def test_more_than_48_kib_of_shared_memory_must_be_asked_for():
    kernel = RawModule(code=SCALE).get_function("shared_words")
    out = np.zeros(32, np.uint32)
    with pytest.raises(EmulationError, match="raise max_dynamic_shared_size_bytes"):
        kernel((1,), (32,), (out,), shared_mem=49153)
    kernel.max_dynamic_shared_size_bytes = 64 * 1024
    kernel((1,), (32,), (out,), shared_mem=64 * 1024)
    assert np.array_equal(out, np.arange(32))


@needs_compiler
def test_launches_from_several_threads_do_not_mix():
    kernel = RawModule(code=SCALE).get_function("scale")
    inputs = [np.full(1000, i, np.float32) for i in range(8)]

    def launch(x: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        kernel((8,), (128,), (x, out, np.int32(x.size)))
        return out

    with ThreadPoolExecutor(4) as pool:
        for x, out in zip(inputs, pool.map(launch, inputs), strict=True):
            assert np.array_equal(out, 2 * x)
