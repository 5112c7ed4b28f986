"""What this machine can do for ``runtime serve``, and what to install where something is missing.

Every check looks at one thing and never raises: what it cannot find out it says. Nothing is
imported at the top that a bare Python lacks, so that the doctor speaks where the patient cannot.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Literal

from runtime.doctor_machine import MACHINE_CHECKS

Status = Literal["ok", "note", "missing"]
LEAST_PYTHON = (3, 11)
RUNTIME = "pip install 'serving-twin[runtime]'"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ``ok``; ``note``: serving works, with less; ``missing``: it is not there.
        found: What there is.
        advice: What to do; empty where nothing is to be done.
        is_required: Whether ``runtime serve`` cannot work without it.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    is_required: bool = False

    @property
    def stops_serving(self) -> bool:
        """Whether ``runtime serve`` would not work for this."""
        return self.is_required and self.status == "missing"


@dataclass(frozen=True)
class _Package:
    """Something to import.

    Attributes:
        name: In the report.
        modules: All of them are needed.
        what_for: Said when it is missing.
        advice: How to get it.
        is_required: For ``runtime serve``.
    """

    name: str
    modules: tuple[str, ...]
    what_for: str
    advice: str = RUNTIME
    is_required: bool = True


PACKAGES = (
    _Package("arrays", ("numpy",), "everything"),
    _Package("text", ("tokenizers", "jinja2"), "text and chat templates"),
    _Package("records", ("msgspec", "orjson"), "requests and answers"),
    _Package("web framework", ("starlette", "uvicorn", "httptools", "uvloop"), "the HTTP server"),
    _Package("numbers and logs", ("prometheus_client", "structlog"), "/metrics and logs"),
    _Package("constrained output", ("llguidance",), "JSON, regex and grammars"),
    _Package("prefix store", ("lmdb", "crc32c"), "prefixes kept between requests"),
    _Package("GGUF reader", ("gguf",), "making the demo model", is_required=False),
    _Package("safetensors, transformers", ("safetensors", "transformers"),
             "runtime calibrate", is_required=False),
    _Package("FlashInfer", ("flashinfer",), "faster attention on a GPU; our own kernel is used",
             "pip install flashinfer-python", is_required=False),
    _Package("Ray", ("ray",), "several instances over machines; one process needs none",
             "pip install 'serving-twin[cluster]'", is_required=False),
    _Package("OpenTelemetry", ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
             "traces of requests", "pip install 'serving-twin[telemetry]'", is_required=False),
)  # fmt: skip


def examine() -> tuple[Check, ...]:
    """All checks, in the order in which they are shown."""
    checks: list[Callable[[], Check]] = [_python, _torch]
    checks += [partial(_package, package) for package in PACKAGES]
    checks += [_compiler, _cpu_kernels, _gpu, _nvrtc]
    found = [check() for check in checks]
    return (*found, *(Check(**check()) for check in MACHINE_CHECKS))


def can_serve(checks: tuple[Check, ...]) -> bool:
    """Whether ``runtime serve`` would work."""
    return not any(check.stops_serving for check in checks)


def _python() -> Check:
    version = sys.version.split()[0]
    if sys.version_info >= LEAST_PYTHON:
        return Check(name="Python", status="ok", found=version, is_required=True)
    least = ".".join(map(str, LEAST_PYTHON))
    return Check(
        name="Python",
        status="missing",
        found=version,
        advice=f"install Python {least} or later",
        is_required=True,
    )


def _import(module: str) -> tuple[Any, str]:
    """The module, or None and why not."""
    try:
        return importlib.import_module(module), ""
    except ModuleNotFoundError as error:
        return None, f"{error.name or module} is not installed"
    except Exception as error:  # a package that is there and broken: any error at all
        return None, f"{module} is broken: {type(error).__name__}: {str(error).splitlines()[:1]}"


def _torch() -> Check:
    torch, problem = _import("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return Check(
            name="torch",
            status="missing",
            found=problem or "torch is broken",
            advice=f"{RUNTIME}; a CPU build will do",
            is_required=True,
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check(name="torch", status="ok", found=f"{torch.__version__}, {build}", is_required=True)


def _package(package: _Package) -> Check:
    problems, versions = [], []
    for module in package.modules:
        present, problem = (
            _import(module) if package.is_required else _find(module)
        )  # optional ones may be large: looked for, not imported
        if present is None:
            problems.append(problem)
        else:
            versions.append(f"{module.partition('.')[0]} {_version(module)}".strip())
    if not problems:
        found = ", ".join(dict.fromkeys(versions))
        return Check(name=package.name, status="ok", found=found, is_required=package.is_required)
    return Check(
        name=package.name,
        status="missing" if package.is_required else "note",
        found="; ".join(problems),
        advice=f"for {package.what_for}: {package.advice}",
        is_required=package.is_required,
    )


def _find(module: str) -> tuple[Any, str]:
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    return found, "" if found else f"{module.partition('.')[0]} is not installed"


def _version(module: str) -> str:
    """Of the distribution of the module's own name; empty where that is another."""
    try:
        return metadata.version(module.replace(".", "-"))
    except metadata.PackageNotFoundError:
        return ""


def _compiler() -> Check:
    kernels, problem = _import("kernels.cpu.compile")
    if kernels is not None:
        try:
            return Check(name="C++ compiler", status="ok", found=kernels.find_compiler())
        except kernels.CompileError as error:
            problem = str(error)
    return Check(
        name="C++ compiler",
        status="note",
        found=problem,
        advice="for fast CPU kernels: install g++ or clang, or set CXX",
    )


def _cpu_kernels() -> Check:
    module, problem = _import("kernels.cpu.backend")
    if module is None:
        return Check(
            name="CPU kernels", status="missing", found=problem, advice=RUNTIME, is_required=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", module.SlowKernelWarning)
        try:
            backend = module.backend()
        except ValueError as error:
            return Check(
                name="CPU kernels",
                status="missing",
                found=str(error),
                advice=f"unset or change {module.PATH_VARIABLE}",
                is_required=True,
            )
    is_fast = backend.library is not None
    return Check(
        name="CPU kernels",
        status="ok" if is_fast else "note",
        found=str(backend),
        advice="" if is_fast else "results are right and slow; install a C++ compiler",
        is_required=True,
    )


def _gpu() -> Check:
    module, problem = _import("kernels.cuda.load")
    if module is not None:
        problem = module.gpu_problem()
        if problem is None:
            architecture = module.device_architecture()
            torch, _ = _import("torch")
            if torch is not None and torch.cuda.is_available():
                name = torch.cuda.get_device_name(0)
                return Check(name="GPU", status="ok", found=f"{name}, {architecture}")
            problem = f"{architecture}, but torch cannot use it"
    return Check(
        name="GPU",
        status="note",
        found=problem or "none",
        advice="the CPU serves; with a GPU: its driver, torch built for CUDA,"
        " pip install 'serving-twin[gpu]'",
    )


def _nvrtc() -> Check:
    module, problem = _import("kernels.cuda.compile")
    if module is not None:
        missing = module.missing_packages()
        if not missing:
            return Check(name="NVRTC", status="ok", found=f"nvrtc {_nvrtc_version()}".strip())
        problem = f"not installed: {', '.join(missing)}"
    return Check(
        name="NVRTC",
        status="note",
        found=problem,
        advice="to compile CUDA kernels, also where there is no GPU:"
        " pip install 'serving-twin[gpu]'",
    )


def _nvrtc_version() -> str:
    try:
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError:
        return ""
