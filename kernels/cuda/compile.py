"""CUDA source to machine code with NVRTC from pip wheels: no driver, no GPU, cached by content."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from kernels.cuda_emulation.build_cache import cached_file, content_key
from kernels.cuda_emulation.source_text import INCLUDE

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_WHEELS = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
_PTXAS_FUNCTION = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(RuntimeError):
    """The source does not compile; the message holds the compiler's log."""


class CompilerMissingError(RuntimeError):
    """A package that the compiler needs is not installed; the message names it."""


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel takes on one architecture, as the assembler reports it.

    Attributes:
        registers: Per thread.
        spill_store_bytes: Per thread; 0 where all values fit the registers.
        spill_load_bytes: Per thread.
        stack_bytes: Local memory of a thread, spills included.
        static_shared_bytes: Per block, without dynamic shared memory.
    """

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True, slots=True)
class CompiledSource:
    """Machine code of one source for one architecture.

    Attributes:
        architecture: Such as "sm_90".
        cubin: ELF bytes that `cupy.RawModule(path=...)` or cuModuleLoadData takes.
        log: What the compiler and the assembler said.
        symbols: Symbol in the cubin by name expression ("scale<float, 4>").
        resources: By kernel; name expressions under their own text.
    """

    architecture: str
    cubin: bytes
    log: str
    symbols: dict[str, str]
    resources: dict[str, KernelResources]


@cache
def missing_packages() -> tuple[str, ...]:
    """Packages that `compile_cubin` needs and that are not installed here; empty when it works."""
    missing = []
    for wheel in _WHEELS:
        try:
            metadata.distribution(wheel)
        except metadata.PackageNotFoundError:
            missing.append(wheel)
    return tuple(missing)


def available() -> bool:
    """Whether kernels can be compiled for a GPU here."""
    return not missing_packages()


@cache
def _nvrtc() -> Any:
    if missing_packages():
        raise CompilerMissingError(f"NVRTC needs packages: {', '.join(missing_packages())}")
    from cuda.bindings import nvrtc

    return nvrtc


@cache
def _cuda_include() -> Path:
    """Folder with cuda_fp16.h of the nvidia-cuda-runtime wheel."""
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or ()) if spec else []:
        for folder in ("cu13/include", "cuda_runtime/include"):
            if (Path(root) / folder / "cuda_fp16.h").is_file():
                return Path(root) / folder
    raise CompilerMissingError("cuda_fp16.h not found: install nvidia-cuda-runtime")


def _check(result: Any) -> Any:
    """The value behind NVRTC's status; only out of memory or a wrong handle fails here."""
    status, *values = result
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(str(status))
    return values[0] if values else None


def compile_cubin(
    source: str,
    architecture: str,
    *,
    defines: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    options: Sequence[str] = (),
) -> CompiledSource:
    """Compile one source text for one real architecture, or take it from the cache.

    Args:
        source: One text, as `read_source` gives it; ptx_compat.h and CUDA's headers are found.
        architecture: "sm_80" and so on.
        defines: Such as "TILE=64".
        name_expressions: Template instances to compile, such as "scale<float, 4>".
        options: Further NVRTC options, such as "--maxrregcount=128".

    Raises:
        CompileError: With the log.
        CompilerMissingError: A wheel is not installed.
    """
    header = (INCLUDE / "ptx_compat.h").read_text()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    flags += [f"-D{define}" for define in defines] + list(options)
    names = list(name_expressions)

    def build(path: Path) -> None:
        path.write_text(json.dumps(_compile(source, architecture, header, flags, names)))

    version = ".".join(str(part) for part in _nvrtc().nvrtcVersion()[1:])
    key = content_key(["cubin-1", version, source, header, *flags, "names", *names])
    stored = json.loads(cached_file(key, ".cubin.json", build).read_text())
    resources = {k: KernelResources(**v) for k, v in stored["resources"].items()}
    cubin = base64.b64decode(stored["cubin"])
    return CompiledSource(architecture, cubin, stored["log"], stored["symbols"], resources)


def _compile(
    source: str, architecture: str, header: str, flags: list[str], names: list[str]
) -> dict[str, Any]:
    nvrtc = _nvrtc()
    headers = {b"ptx_compat.h": header.encode()}
    program = _check(
        nvrtc.nvrtcCreateProgram(
            source.encode(), b"kernel.cu", len(headers), list(headers.values()), list(headers)
        )
    )
    try:
        for name in names:
            _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        include = _cuda_include()
        arguments = [*flags, f"-I{include}", f"-I{include / 'cccl'}"]
        status = nvrtc.nvrtcCompileProgram(
            program, len(arguments), [argument.encode() for argument in arguments]
        )[0]
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.decode(errors="replace").strip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{architecture}: {text or status}")
        cubin = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        symbols = {
            name: _check(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode()
            for name in names
        }
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    resources = {k: asdict(v) for k, v in _parse_resources(text, symbols).items()}
    code = base64.b64encode(cubin).decode()
    return {"cubin": code, "log": text, "symbols": symbols, "resources": resources}


def _parse_resources(log: str, symbols: dict[str, str]) -> dict[str, KernelResources]:
    name_by_symbol = {symbol: name for name, symbol in symbols.items()}
    resources = {}
    for part in log.split("ptxas info    : Compiling")[1:]:
        found = _PTXAS_FUNCTION.search("Compiling" + part)
        if found is None:
            raise CompileError(f"the assembler's report was not understood:\n{part[:500]}")
        shared = _SHARED.search(found["rest"])
        resources[name_by_symbol.get(found["name"], found["name"])] = KernelResources(
            registers=int(found["registers"]),
            spill_store_bytes=int(found["stores"]),
            spill_load_bytes=int(found["loads"]),
            stack_bytes=int(found["stack"]),
            static_shared_bytes=int(shared[1]) if shared else 0,
        )
    return resources


def resource_usage(
    source: str,
    *,
    architectures: Sequence[str] = ARCHITECTURES,
    defines: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
) -> dict[str, dict[str, KernelResources]]:
    """Registers, spills and shared memory: by kernel, then by architecture.

    Raises:
        CompileError: With the log.
        CompilerMissingError: A wheel is not installed.
    """
    table: dict[str, dict[str, KernelResources]] = {}
    for architecture in architectures:
        compiled = compile_cubin(
            source, architecture, defines=defines, name_expressions=name_expressions
        )
        for name, resources in compiled.resources.items():
            table.setdefault(name, {})[architecture] = resources
    return table
