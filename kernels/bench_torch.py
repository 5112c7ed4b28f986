"""The same experts as bfloat16 matrix products of torch: what low-bit kernels must beat."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kernels.bench_device import ExpertShape, Routing


def torch_microseconds(
    shape: ExpertShape, routing: Routing, copies: int, repeats: int
) -> list[float] | None:
    """The same experts as bfloat16 matrix products of torch in a CUDA graph; None without CUDA."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    tokens, options = routing.expert_index.shape[0], {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.ones(tokens, shape.hidden_size, **options)
    rows = [np.nonzero(routing.expert_index == e) for e in routing.experts]
    members = [torch.as_tensor(r[0], device="cuda") for r in rows]
    gates = [torch.as_tensor(routing.gate_weight[r], **options).unsqueeze(1) for r in rows]
    weights = [
        [
            (
                torch.randn(*shape.block_shape(0), **options),
                torch.randn(*shape.block_shape(1), **options),
            )
            for _ in routing.experts
        ]
        for _ in range(copies)
    ]
    out = torch.zeros_like(x)

    def run(layer: int) -> None:
        out.zero_()
        for (gate_up, down), member, gate in zip(weights[layer], members, gates, strict=True):
            first, second = (x[member] @ gate_up.T).chunk(2, dim=1)
            hidden = torch.nn.functional.silu(first) * second
            out.index_add_(0, member, gate * (hidden @ down.T))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(copies):
            run(layer)
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000.0 * begin.elapsed_time(end) / copies)
    return times[3:]
