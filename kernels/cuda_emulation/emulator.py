"""cuemu: run CUDA C++ kernel source on the CPU, with the call shape of cupy.RawModule (prototype).

    mod = RawModule(code=SOURCE, options=("-DTILE=64",))
    k = mod.get_function("gemv")           # or RawModule(name_expressions=["k<float>"])
    k((grid,), (block,), (numpy arrays and numpy scalars,), shared_mem=bytes)

Needs only g++ (C++17) and numpy. The same SOURCE goes unchanged to NVRTC / nvcc.
"""
from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
CACHE = Path(os.environ.get("CUEMU_CACHE", Path(tempfile.gettempdir()) / f"cuemu-{os.getuid()}"))
_DYN = re.compile(r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s+)?([\w:\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')


class EmulationError(RuntimeError):
    """The kernel did something that is an error or undefined on a GPU."""


class _Opts(ctypes.Structure):
    _fields_ = [("sched", ctypes.c_int), ("max_switches", ctypes.c_uint64), ("stats", ctypes.c_void_p)]


def available() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def _build(code: str, options: tuple[str, ...], exprs: tuple[str, ...], ubsan: bool) -> tuple[Path, list[str]]:
    names = _KERNEL.findall(code)
    src = '#include "cuemu.h"\n#line 1 "kernel.cu"\n' + _DYN.sub(r"CUEMU_DYN_SHARED(\1, \2);", code) + "\n"
    src += "".join(f"CUEMU_EXPORT({n}, {n})\n" for n in names)
    src += "".join(f"CUEMU_EXPORT(expr{i}, {e})\n" for i, e in enumerate(exprs))
    cxx = os.environ.get("CXX", "g++")
    march = ["-march=x86-64-v3"] if os.uname().machine == "x86_64" else []
    flags = ["-std=c++17", "-O2", *march, "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-w",
             "-ftrivial-auto-var-init=pattern", "-fvisibility=hidden", f"-I{INCLUDE}"]
    if ubsan:
        flags += ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fsanitize-undefined-trap-on-error"]
    flags += [o for o in options if o.startswith(("-D", "-I", "-U"))]
    h = hashlib.sha256()
    for p in sorted(INCLUDE.glob("*.h")):
        h.update(p.read_bytes())
    h.update(repr((src, cxx, flags)).encode())
    out = CACHE / f"{h.hexdigest()[:24]}.so"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as d:
            cpp, so = Path(d) / "kernel.cpp", Path(d) / "kernel.so"
            cpp.write_text(src)
            r = subprocess.run([cxx, *flags, str(cpp), "-o", str(so)], capture_output=True, text=True)
            if r.returncode:
                raise EmulationError("host compile failed:\n" + r.stderr[:4000])
            os.replace(so, out)
    return out, names


class Kernel:
    def __init__(self, lib, sym: str, guard: bool, ubsan: bool):
        self._lib, self._fn = lib, getattr(lib, f"cuemu_launch_{sym}")
        sig = getattr(lib, f"cuemu_sig_{sym}")
        sig.restype = ctypes.c_char_p
        self.signature = [p.split(":") for p in sig().decode().split(",") if p]
        self.guard = guard
        self.stats: dict[str, int] = {}

    def __call__(self, grid, block, args, *, shared_mem: int = 0, sched: int = 0, max_switches: int = 200_000_000):
        if len(args) != len(self.signature):
            raise EmulationError(f"kernel takes {len(self.signature)} arguments, {len(args)} given")
        g = (ctypes.c_uint * 3)(*(tuple(grid) + (1, 1, 1))[:3])
        b = (ctypes.c_uint * 3)(*(tuple(block) + (1, 1, 1))[:3])
        lib, keep, ptrs, back, seen = self._lib, [], [], [], {}
        lib.cuemu_galloc.restype = ctypes.c_void_p
        for i, (a, (kind, size)) in enumerate(zip(args, self.signature)):
            if isinstance(a, np.ndarray):
                if kind[1] != "*":
                    raise EmulationError(f"argument {i}: array given for a scalar parameter")
                want, have = kind[2:], a.dtype.kind + str(a.dtype.itemsize)
                if want not in ("?", "bf") and want[1:] != "1" and have != want:
                    raise EmulationError(f"argument {i}: {have} array given for a {want} pointer")
                if not a.flags.c_contiguous:
                    raise EmulationError(f"argument {i}: not contiguous")
                addr = a.ctypes.data
                key = (addr, a.nbytes)
                if key in seen:  # the same array given twice stays one buffer; its writes are copied back once
                    addr = seen[key][0]
                    seen[key][1] &= kind[0] == "c"
                elif self.guard and a.nbytes:
                    base, total = ctypes.c_void_p(), ctypes.c_size_t()
                    addr = lib.cuemu_galloc(ctypes.c_size_t(a.nbytes), ctypes.byref(base), ctypes.byref(total))
                    ctypes.memmove(addr, a.ctypes.data, a.nbytes)
                    seen[key] = [addr, kind[0] == "c"]
                    back.append((i, a, addr, base, total, seen[key]))
                v = ctypes.c_void_p(addr)
            elif isinstance(a, np.generic):
                if kind[1] == "*" or a.dtype.itemsize != int(size) or (kind[1] != "?" and a.dtype.kind + str(a.dtype.itemsize) != kind[1:]):
                    raise EmulationError(f"argument {i}: {a.dtype} scalar given for parameter {kind}:{size}")
                v = ctypes.create_string_buffer(a.tobytes(), a.dtype.itemsize)
            elif a is None and kind[1] == "*":
                v = ctypes.c_void_p(0)
            else:
                raise EmulationError(f"argument {i}: give a numpy array or numpy scalar, not {type(a).__name__}")
            keep.append(v)
            ptrs.append(ctypes.cast(ctypes.byref(v), ctypes.c_void_p))
        arr = (ctypes.c_void_p * max(1, len(ptrs)))(*ptrs)
        stats = (ctypes.c_uint64 * 2)()
        err = ctypes.create_string_buffer(1024)
        o = _Opts(sched, max_switches, ctypes.addressof(stats))
        rc = self._fn(g, b, ctypes.c_uint(shared_mem), arr, ctypes.byref(o), err, 1024)
        self.stats = {"switches": stats[0], "undefined_reads": stats[1]}
        bad = None
        for i, a, addr, base, total, entry in back:
            if lib.cuemu_gcheck(base, total, ctypes.c_void_p(addr), ctypes.c_size_t(a.nbytes)) and bad is None:
                bad = f"argument {i}: the kernel wrote outside the array"
            if not entry[1]:
                ctypes.memmove(a.ctypes.data, addr, a.nbytes)
            lib.cuemu_gfree(base, total)
        if rc:
            raise EmulationError(err.value.decode())
        if bad:
            raise EmulationError(bad)


class RawModule:
    def __init__(self, *, code: str, options=(), name_expressions=(), guard: bool = True, ubsan: bool = False):
        path, self.names = _build(code, tuple(options), tuple(name_expressions or ()), ubsan)
        self._lib = ctypes.CDLL(str(path))
        self._exprs = list(name_expressions or ())
        self._guard, self._ubsan = guard, ubsan

    def get_function(self, name: str) -> Kernel:
        sym = f"expr{self._exprs.index(name)}" if name in self._exprs else name
        return Kernel(self._lib, sym, self._guard, self._ubsan)
