"""The doctor where things are there, missing, broken or small."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernels.cpu.backend import forget
from kernels.cpu.compile import CompileError
from kernels.cpu.library import Library
from runtime import doctor_machine
from runtime.doctor import Check, can_serve, examine

REQUIRED = {
    "torch": "torch",
    "tokenizers": "text",
    "jinja2": "text",
    "msgspec": "records",
    "orjson": "records",
    "starlette": "web framework",
    "uvicorn": "web framework",
    "structlog": "numbers and logs",
    "llguidance": "constrained output",
    "lmdb": "prefix store",
}


def check(name: str) -> Check:
    return next(found for found in examine() if found.name == name)


def test_where_all_is_installed_serving_works_and_the_command_says_so(
    run_command: Callable[..., Any],
) -> None:
    done = run_command("doctor")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("\nruntime serve works here\n")
    assert done.stdout.splitlines()[0].split() == ["ok", "Python", sys.version.split()[0]]


def test_json_holds_every_line_of_the_report(run_command: Callable[..., Any]) -> None:
    content = json.loads(run_command("doctor", "--json").stdout)
    assert content["can_serve"] is True
    names = [entry["name"] for entry in content["checks"]]
    assert names == [found.name for found in examine()]
    assert len(set(names)) == len(names)
    for entry in content["checks"]:
        assert entry["status"] in ("ok", "note", "missing")
        assert entry["found"]
        assert entry["status"] != "missing" or entry["advice"]


@pytest.mark.parametrize(("module", "line"), REQUIRED.items())
def test_a_missing_package_that_serving_needs_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, module: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    checks = examine()
    assert not can_serve(checks)
    (stopping,) = [found for found in checks if found.stops_serving]
    assert stopping.name == line
    assert f"{module} is not installed" in stopping.found
    assert "pip install 'serving-twin[runtime]'" in stopping.advice


@pytest.mark.parametrize("module", ["ray", "gguf", "transformers"])
def test_a_missing_package_that_serving_does_not_need_is_a_note(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    checks = examine()
    assert can_serve(checks)
    (line,) = [found for found in checks if f"{module} is not installed" in found.found]
    assert line.status == "note"
    assert "pip install" in line.advice


def test_without_torch_and_web_framework_the_command_still_runs_and_ends_with_one() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'starlette', 'uvicorn', 'tokenizers', 'msgspec', 'lmdb'):\n"
        "    sys.modules[name] = None\n"
        "from runtime.cli import main\n"
        "sys.argv = ['runtime', 'doctor']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    last = done.stdout.splitlines()[-1]
    assert last == (
        "runtime serve cannot work here: torch, text, records, web framework, prefix store"
    )
    assert "starlette is not installed; uvicorn is not installed" in done.stdout


def test_a_package_that_breaks_on_import_is_told_from_a_missing_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "uvloop.py").write_text("raise OSError('libuv.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)
    line = check("web framework")
    assert line.stops_serving
    assert "uvloop is broken: OSError" in line.found
    assert "libuv.so.1: cannot open" in line.found


def test_without_a_compiler_kernels_are_slow_and_serving_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> Any:
        raise CompileError("no C++ compiler found (g++, clang++, c++)")

    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(Library, "load", staticmethod(none))
    forget()
    try:
        checks = examine()
    finally:
        forget()
    by_name = {found.name: found for found in checks}
    assert by_name["C++ compiler"].status == "note"
    assert "install g++ or clang" in by_name["C++ compiler"].advice
    assert by_name["CPU kernels"].status == "note"
    assert can_serve(checks)


def test_a_path_of_kernels_that_cannot_run_stops_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVING_TWIN_CPU_KERNELS", "abacus")
    line = check("CPU kernels")
    assert line.stops_serving
    assert "found 'abacus'" in line.found
    assert "SERVING_TWIN_CPU_KERNELS" in line.advice


def test_a_gpu_is_named_with_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("kernels.cuda.load")
    fake.gpu_problem = lambda: None  # type: ignore[attr-defined]
    fake.device_architecture = lambda: "sm_90"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels.cuda.load", fake)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "A GPU")
    assert check("GPU").found == "A GPU, sm_90"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    line = check("GPU")
    assert (line.status, line.found) == ("note", "sm_90, but torch cannot use it")


def test_a_port_in_use_is_noted() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        line = Check(**doctor_machine.port(number))
        assert (line.status, line.found) == ("note", "in use")
        assert "--port" in line.advice
    assert doctor_machine.port(number)["status"] == "ok"


def test_few_open_files_are_noted() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        line = Check(**doctor_machine.open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert line.status == "note"
    assert line.found.startswith("256, can be raised to")


def test_shared_memory_that_is_not_there_is_noted(tmp_path: Path) -> None:
    line = Check(**doctor_machine.shared_memory(tmp_path / "shm"))
    assert line.status == "note"
    assert "No such file" in line.found


def test_memory_of_a_control_group_counts_where_it_is_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = doctor_machine.available_memory_bytes()
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 29}\n")
    monkeypatch.setattr(doctor_machine, "CGROUP_LIMIT", tmp_path / "memory.max")
    assert doctor_machine.available_memory_bytes() == 1 << 29
    assert Check(**doctor_machine.memory()).status == "note"
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_machine.available_memory_bytes() > 1 << 29


def test_a_cache_folder_that_cannot_be_written_stops_serving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert Check(**doctor_machine.cache_disk()).status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = Check(**doctor_machine.cache_disk())
    assert line.stops_serving
    assert "cannot be written" in line.found
