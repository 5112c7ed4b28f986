"""The compiled library as Python sees it: structures, signatures, and what went wrong."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernels.cpu.compile import compiled_library

NO_PLANE = -1  # a fault of this plane is one of the table


class WeightsArgument(ctypes.Structure):
    """`Weights` of source/weights.h."""

    _fields_ = (
        ("page_shift", ctypes.c_int32),
        ("min_bits", ctypes.c_int32),
        ("parent_bits", ctypes.c_int32),
        ("bits", ctypes.c_void_p),
        ("arena", ctypes.c_void_p),
        ("num_pages", ctypes.c_int64),
        ("plane_pages", ctypes.c_void_p),
        ("plane_list", ctypes.c_int64),
        ("table_pages", ctypes.c_void_p),
        ("table_list", ctypes.c_int64),
        ("planes", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
    )


class MatrixArgument(ctypes.Structure):
    """`Matrix` of source/linear.h."""

    FLOAT32, BFLOAT16 = 0, 1
    PANELS = -1  # row_stride of a matrix in panels

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
    )


class FaultReport(ctypes.Structure):
    """`Fault` of source/weights.h."""

    WIDTH, PAGE, RESOURCES = 1, 2, 3

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("plane", ctypes.c_int32),
        ("block", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("found", ctypes.c_int64),
    )


@dataclass(frozen=True)
class Library:
    """One loaded library; `path_ids` are the compiled paths this processor can run."""

    file: Path
    handle: ctypes.CDLL

    @classmethod
    def load(cls) -> Library:
        """Compile if needed and load.

        Raises:
            CompileError: If no library could be made.
            OSError: If it was made and cannot be loaded.
        """
        path = compiled_library()
        handle = ctypes.CDLL(str(path))
        _declare(handle)
        return cls(path, handle)

    @cached_property
    def path_ids(self) -> dict[str, int]:
        """Number of every path that runs on this processor, fastest instruction set first."""
        return {
            self.handle.path_name(i).decode(): i
            for i in range(self.handle.path_count())
            if self.handle.path_runs_here(i)
        }


def fault_message(fault: FaultReport, num_pages: int, widths: str) -> str:
    """One line about a call that the library refused."""
    if fault.kind == FaultReport.WIDTH:
        return f"block {fault.block}: bits must be {widths}, found {fault.found}"
    if fault.kind == FaultReport.PAGE:
        part = "table" if fault.plane == NO_PLANE else f"plane {fault.plane}"
        return (
            f"block {fault.block}: page {fault.index} of its {part} must be in "
            f"[0, {num_pages}), found {fault.found}"
        )
    return "no memory or no threads left"


def _declare(handle: ctypes.CDLL) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    weights, fault = ctypes.POINTER(WeightsArgument), ctypes.POINTER(FaultReport)
    handle.path_name.argtypes, handle.path_name.restype = [ctypes.c_int], ctypes.c_char_p
    handle.path_runs_here.argtypes = [ctypes.c_int]
    # path, weights, block, rows, columns, x, tokens, y, threads, fault
    handle.block_matmul.argtypes = [i32, weights, i64, i64, i64, pointer, i64, pointer, i32, fault]
    # path, weights, first block, experts, hidden, inner, activation, x, tokens, experts per token,
    # expert index, gate weight, expert scale, out, threads, fault
    handle.moe_layer.argtypes = [i32, weights, i64, i64, i64, i64, i32, pointer, i64, i64]
    handle.moe_layer.argtypes += [pointer, pointer, pointer, pointer, i32, fault]
    matrix = ctypes.POINTER(MatrixArgument)
    handle.pack_matrix.argtypes, handle.pack_matrix.restype = [matrix, pointer], None
    # path, matrix, bias, x, tokens, y, threads
    handle.linear.argtypes = [i32, matrix, pointer, pointer, i64, pointer, i32]
    # path, matrices, experts, hidden, inner, activation, x, tokens, experts per token, expert
    # index, gate weight, expert scale, out, threads
    handle.plain_moe_layer.argtypes = [i32, matrix, i64, i64, i64, i32, pointer, i64, i64]
    handle.plain_moe_layer.argtypes += [pointer, pointer, pointer, pointer, i32]
    # path, step, shape, queries, keys, values, scale, out, threads, found
    handle.paged_attention.argtypes = [i32, pointer, pointer, pointer, pointer, pointer]
    handle.paged_attention.argtypes += [ctypes.c_float, pointer, i32, pointer]
