"""The two functions: one expert matrix, and a whole mixture-of-experts layer.

Activations, sums and results are float32; tables are float16, widened exactly. On every path the
sum of one output runs in an order that depends on the width and the number of columns alone: a
token's result is the same bit for bit whatever other tokens share the call, whatever the number of
threads, and whether the weights are contiguous or paged. It may differ between paths, and between
libraries made by different compilers, in the last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.arrays import check_array, check_threads, output_array
from kernels.cpu.backend import Backend, backend
from kernels.cpu.blocks import ContiguousBlock, ContiguousExperts
from kernels.cpu.fallback import PRODUCTS
from kernels.cpu.library import FaultReport, fault_message
from kernels.cpu.pages import PagedBlock, PagedExperts
from kernels.reference import ACTIVATIONS, Activation

FloatArray = NDArray[np.float32]
ACTIVATION_IDS = {"silu": 0, "gelu_tanh": 1}  # source/work.h


def block_matmul(
    x: FloatArray,
    block: ContiguousBlock | PagedBlock,
    *,
    threads: int = 1,
    path: str | None = None,
    out: FloatArray | None = None,
) -> FloatArray:
    """y[t, n] = sum over k of x[t, k] * weights[n, k].

    Args:
        x: [T >= 0, K], float32, C-contiguous.
        block: The weights; a paged block is used at the width committed now.
        threads: Rows are shared among this many, 1..256; compiled paths only.
        path: As in `kernels.cpu.backend`.
        out: [T, N], float32, C-contiguous, written and returned; None makes one.

    Returns:
        [T, N], float32.

    Raises:
        ValueError: If an array, width or page id does not fit.
        MemoryError: If there is no memory for the arranged inputs, or no thread can be started.
    """
    if x.ndim != 2 or x.shape[1] != block.columns:
        raise ValueError(f"x must be float32 [T, {block.columns}], found {list(x.shape)}")
    check_array("x", x, np.float32, x.shape)
    chosen = backend(path)
    y = output_array(out, (len(x), block.rows))
    check_threads(threads)
    if chosen.library is None:
        y[...] = PRODUCTS[chosen.name](x, block.contiguous())
        return y
    fault = FaultReport()
    failed = chosen.library.handle.block_matmul(
        chosen.library.path_ids[chosen.name],
        block.argument,
        block.index,
        block.rows,
        block.columns,
        x.ctypes.data,
        len(x),
        y.ctypes.data,
        threads,
        fault,
    )
    if failed:
        _refuse(fault, block.num_pages, block.widths)
    return y


def moe_layer(
    tokens: FloatArray,
    expert_index: NDArray[np.int32],
    gate_weight: FloatArray,
    experts: ContiguousExperts | PagedExperts,
    activation: Activation,
    *,
    expert_scale: FloatArray | None = None,
    threads: int = 1,
    path: str | None = None,
    out: FloatArray | None = None,
) -> FloatArray:
    """Sum over a token's experts of gate weight * down @ (act(gate @ x) * (up @ x)).

    Experts without tokens are not read. A token's experts are added in ascending order of their
    index.

    Args:
        tokens: [T >= 0, H], float32, C-contiguous.
        expert_index: [T, k], int32, C-contiguous, in [0, E).
        gate_weight: [T, k], float32, C-contiguous.
        experts: The layer's weights; widths and page lists of a paged layer are read now.
        activation: "silu" or "gelu_tanh".
        expert_scale: [E], float32, extra factor of an expert's output; None for 1.
        threads: As in `block_matmul`.
        path: As in `kernels.cpu.backend`.
        out: [T, H], float32, C-contiguous, written and returned; None makes one. Not `tokens`.

    Returns:
        [T, H], float32.

    Raises:
        ValueError: If an array, index, width or page id does not fit.
        MemoryError: If there is no memory for intermediate results, or no thread can be started.
    """
    check_routing(
        tokens,
        expert_index,
        gate_weight,
        experts.experts,
        experts.hidden,
        activation,
        expert_scale,
    )
    chosen = backend(path)
    y = output_array(out, tokens.shape)
    if np.may_share_memory(y, tokens):
        raise ValueError("out must not share memory with tokens")
    check_threads(threads)
    if chosen.library is None:
        return _layer_by_blocks(
            tokens, expert_index, gate_weight, experts, activation, expert_scale, chosen, y
        )
    fault = FaultReport()
    failed = chosen.library.handle.moe_layer(
        chosen.library.path_ids[chosen.name],
        experts.argument,
        experts.first_block,
        experts.experts,
        experts.hidden,
        experts.inner,
        ACTIVATION_IDS[activation],
        tokens.ctypes.data,
        len(tokens),
        expert_index.shape[1],
        expert_index.ctypes.data,
        gate_weight.ctypes.data,
        None if expert_scale is None else expert_scale.ctypes.data,
        y.ctypes.data,
        threads,
        fault,
    )
    if failed:
        _refuse(fault, experts.num_pages, experts.widths)
    return y


def _layer_by_blocks(
    tokens: FloatArray,
    expert_index: NDArray[np.int32],
    gate_weight: FloatArray,
    experts: ContiguousExperts | PagedExperts,
    activation: Activation,
    expert_scale: FloatArray | None,
    chosen: Backend,
    out: FloatArray,
) -> FloatArray:
    product, act = PRODUCTS[chosen.name], ACTIVATIONS[activation]
    out[...] = 0
    for expert in range(experts.experts):
        token_ids, positions = np.nonzero(expert_index == expert)
        if not len(token_ids):
            continue
        both = product(tokens[token_ids], experts.block(2 * expert).contiguous())
        gate, up = np.split(both.astype(np.float64), 2, axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            hidden = (act(gate) * up).astype(np.float32)
            result = product(hidden, experts.block(2 * expert + 1).contiguous())
            weight = gate_weight[token_ids, positions]
            if expert_scale is not None:
                weight = weight * expert_scale[expert]
            np.add.at(out, token_ids, weight[:, None] * result)
    return out


def check_routing(
    tokens: FloatArray,
    expert_index: NDArray[np.int32],
    gate_weight: FloatArray,
    experts: int,
    hidden: int,
    activation: str,
    expert_scale: FloatArray | None,
) -> None:
    """Refuse inputs of a mixture-of-experts layer that do not fit it or each other.

    Raises:
        ValueError: Naming what was found and what is allowed.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, found {activation!r}")
    if tokens.ndim != 2 or tokens.shape[1] != hidden:
        raise ValueError(f"tokens must be float32 [T, {hidden}], found {_found(tokens)}")
    check_array("tokens", tokens, np.float32, tokens.shape)
    if expert_index.ndim != 2 or len(expert_index) != len(tokens):
        raise ValueError(
            f"expert_index must be int32 [{len(tokens)}, k], found {_found(expert_index)}"
        )
    check_array("expert_index", expert_index, np.int32, expert_index.shape)
    check_array("gate_weight", gate_weight, np.float32, expert_index.shape)
    if expert_scale is not None:
        check_array("expert_scale", expert_scale, np.float32, (experts,))
    if expert_index.size:
        lowest, highest = int(expert_index.min()), int(expert_index.max())
        if lowest < 0 or highest >= experts:
            raise ValueError(f"expert_index must be in [0, {experts}), found {lowest}..{highest}")


def _found(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _refuse(fault: FaultReport, num_pages: int, widths: str) -> None:
    message = fault_message(fault, num_pages, widths)
    if fault.kind == FaultReport.RESOURCES:
        raise MemoryError(message)
    raise ValueError(message)
