"""Which path is taken, what is said about it, and the cache of compiled libraries."""

import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

from kernels.cpu import ContiguousBlock, SlowKernelWarning, backend, block_matmul
from kernels.cpu import compile as compile_module
from kernels.cpu.backend import ALL_PATHS, PATH_VARIABLE, forget
from kernels.planes import pack_planes

HAVE_COMPILER = any(shutil.which(name) for name in compile_module.COMPILERS)
needs_compiler = pytest.mark.skipif(not HAVE_COMPILER, reason="no C++ compiler")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache and no choice made yet; the choice of before is forgotten again at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


@pytest.fixture(scope="module")
def library():
    """A library that works, as another process would have left it."""
    forget()
    return compile_module.compiled_library().read_bytes()


def fake_compiler(folder, library, *, pause_s=0.0):
    """A compiler that takes its time: it writes half of a good library, pauses, writes the rest."""
    good = folder / "good.so"
    good.write_bytes(library[: -compile_module.CHECKSUM_BYTES])
    script = folder / "fake-c++"
    script.write_text(
        f"""#!{sys.executable}
import sys, time
if "--version" in sys.argv:
    print("fake 1.0")
else:
    data = open({str(good)!r}, "rb").read()
    with open({str(folder / "runs")!r}, "a") as runs:
        runs.write("x")
    with open(sys.argv[sys.argv.index("-o") + 1], "wb") as out:
        out.write(data[: len(data) // 2])
        out.flush()
        time.sleep({pause_s})
        out.write(data[len(data) // 2 :])
"""
    )
    script.chmod(0o755)
    return script


def small_product(**options):
    codes = np.arange(80, dtype=np.uint8).reshape(2, 40)
    table = np.arange(8, dtype=np.float16).reshape(2, 4)
    block = ContiguousBlock(pack_planes(codes, 8), table, 2, 40)
    return block_matmul(np.ones((1, 40), np.float32), block, **options)


# Codes 0..39 and 40..79 are 0 and 0, 1 in their two top bits: 0 * 40, and 4 * 24 + 5 * 16.
SMALL_PRODUCT = [[0.0, 176.0]]


def test_the_path_taken_is_the_fastest_measured():
    chosen = backend()
    assert chosen.name in ALL_PATHS
    assert chosen.name in chosen.available
    if chosen.trial_seconds:
        assert min(chosen.trial_seconds.values()) == chosen.trial_seconds[chosen.name]
        assert set(chosen.trial_seconds) <= set(chosen.available)
    assert chosen.reason in str(chosen)


@needs_compiler
def test_where_there_is_a_compiler_the_source_compiles_and_a_compiled_path_is_taken():
    assert backend().library is not None
    assert "portable" in backend().available


def test_the_paths_are_those_whose_instruction_sets_the_processor_names():
    flags = compile_module.processor_features().split()
    if not HAVE_COMPILER or "sse2" not in flags:
        pytest.skip("not an x86 with a compiler")
    needs = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vbmi", "gfni"},
        "avx2": {"avx2", "fma", "f16c"},
    }
    names = {flag.replace("avx512vbmi", "avx512_vbmi") for flag in flags}
    for path, needed in needs.items():
        assert (path in backend().available) == (needed <= names)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_an_argument_or_the_environment_forces_a_path(path, monkeypatch):
    if path not in backend().available:
        pytest.skip(f"{path} does not run on this machine")
    assert backend(path).name == path
    assert np.array_equal(small_product(path=path), SMALL_PRODUCT)
    monkeypatch.setenv(PATH_VARIABLE, path)
    assert backend().name == path
    assert PATH_VARIABLE in backend().reason


def test_an_unknown_path_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "fast")
    with pytest.raises(ValueError, match=rf"'fast' \(asked for by {PATH_VARIABLE}\)"):
        small_product()


def test_without_a_compiler_results_are_right_and_a_warning_says_why(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.warns(SlowKernelWarning, match=r"no C\+\+ compiler found \(g\+\+, clang"):
        assert np.array_equal(small_product(), SMALL_PRODUCT)
    chosen = backend()
    assert chosen.name in ("numba", "numpy")
    assert chosen.library is None
    assert "no C++ compiler" in chosen.reason
    with pytest.raises(ValueError, match=r"'portable' .* cannot run here: no C\+\+ compiler"):
        backend("portable")


def test_the_warning_comes_once_not_at_every_call(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            small_product()
    assert len(seen) == 1
    assert "CXX=no-such-compiler" in str(seen[0].message)


def test_a_compiler_that_fails_is_quoted(fresh, monkeypatch):
    script = fresh / "bad-c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x: error: boom" >&2\nexit 3\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.warns(SlowKernelWarning, match="ended with 3: x: error: boom"):
        assert np.array_equal(small_product(), SMALL_PRODUCT)
    assert not list((fresh / "cache" / "serving-twin").glob("*.so*"))
    assert not list((fresh / "cache" / "serving-twin").glob("*.part"))


def test_a_cache_that_cannot_be_written_is_reported(fresh, monkeypatch):
    (fresh / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.warns(SlowKernelWarning, match="cache/serving-twin"):
        assert np.array_equal(small_product(), SMALL_PRODUCT)


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda d: d[:5000], lambda d: d[:9000] + b"?" + d[9001:], lambda d: b""]
)
def test_a_library_is_compiled_once_and_again_when_it_is_damaged(
    fresh, monkeypatch, library, damage
):
    monkeypatch.setenv("CXX", str(fake_compiler(fresh, library)))
    kept = compile_module.compiled_library()
    assert compile_module.compiled_library() == kept
    assert (fresh / "runs").read_text() == "x"
    kept.write_bytes(damage(library))
    assert np.array_equal(small_product(path="portable"), SMALL_PRODUCT)
    assert (fresh / "runs").read_text() == "xx"
    assert kept.read_bytes() == library
    forget()
    assert np.array_equal(small_product(path="portable"), SMALL_PRODUCT)
    assert (fresh / "runs").read_text() == "xx"


@needs_compiler
def test_compiler_flags_processor_and_source_are_in_the_name(fresh, monkeypatch, library):
    monkeypatch.setenv("CXX", str(fake_compiler(fresh, library)))
    names = [compile_module.compiled_library()]
    monkeypatch.setattr(compile_module, "FLAGS", (*compile_module.FLAGS, "-DX"))
    names.append(compile_module.compiled_library())
    monkeypatch.setattr(compile_module, "processor_features", lambda: "sse2")
    names.append(compile_module.compiled_library())
    source = fresh / "source"
    shutil.copytree(compile_module.SOURCE, source)
    (source / "block.h").write_text("// changed\n" + (source / "block.h").read_text())
    monkeypatch.setattr(compile_module, "SOURCE", source)
    names.append(compile_module.compiled_library())
    assert len(set(names)) == 4


@needs_compiler
def test_processes_that_compile_at_once_never_see_half_a_library(fresh, library):
    environment = os.environ | {
        "CXX": str(fake_compiler(fresh, library, pause_s=0.4)),
        "XDG_CACHE_HOME": str(fresh / "cache"),
    }
    script = (
        "import sys; from kernels.cpu import backend\n"
        "assert backend('portable').library.path_ids, 'nothing in it'\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in "ab"]
    sizes, done = set(), threading.Event()

    def watch():
        while not done.is_set():
            sizes.update(p.stat().st_size for p in (fresh / "cache").glob("*/cpu-kernels-*.so"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    codes = [process.wait(timeout=60) for process in processes]
    done.set()
    watcher.join()
    assert codes == [0, 0]
    assert sizes <= {len(library)}
    kept = sorted(path.suffix for path in (fresh / "cache" / "serving-twin").iterdir())
    assert kept == [".lock", ".so"]
