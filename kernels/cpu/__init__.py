"""Expert kernels for the CPU: bit planes and row tables in, activations out.

The compiled paths are one C++ library, built with the system's compiler at first use; see
`kernels.cpu.backend` for how a path is chosen and `kernels.cpu.matmul` for the functions.
"""

from kernels.cpu.attention import AttentionLayer, TokenPages, paged_attention
from kernels.cpu.backend import Backend, SlowKernelWarning, backend
from kernels.cpu.blocks import ContiguousBlock, ContiguousExperts
from kernels.cpu.linear import PackedLinear, linear
from kernels.cpu.matmul import block_matmul, moe_layer
from kernels.cpu.pages import PagedBlock, PagedExperts, PagedWeights
from kernels.cpu.plain_experts import PlainExperts, plain_moe_layer

__all__ = [
    "AttentionLayer",
    "Backend",
    "ContiguousBlock",
    "ContiguousExperts",
    "PackedLinear",
    "PagedBlock",
    "PagedExperts",
    "PagedWeights",
    "PlainExperts",
    "SlowKernelWarning",
    "TokenPages",
    "backend",
    "block_matmul",
    "linear",
    "moe_layer",
    "paged_attention",
    "plain_moe_layer",
]
