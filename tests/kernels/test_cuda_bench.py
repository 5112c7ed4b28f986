"""The benchmark's own arithmetic, data and messages; timing itself needs a GPU."""

import json
from collections import Counter

import numpy as np
import pytest
from typer.testing import CliRunner

from kernels import bench, bench_device, bench_static, reference
from kernels.bench_device import ExpertShape, Routing
from kernels.cuda import compile as cuda_compile
from kernels.cuda import shared_table
from kernels.cuda.load import gpu_problem, load_kernels
from kernels.cuda.shared_table import SharedTableLayer
from kernels.cuda_emulation import emulator
from kernels.planes import plane_words
from kernels.sass_counts import inner_loops

SMALL = ExpertShape(hidden_size=96, intermediate=40, num_experts=3, top_k=2)


@pytest.mark.parametrize(
    ("columns", "bits", "effective"),
    # fp16 tables, of the bytes 4 N ceil(K / 32) q + 2 N 2^q, two digits
    [(704, 2, 2.09), (704, 8, 13.82), (1408, 4, 4.18), (2048, 6, 6.50), (14336, 7, 7.14)],
)
def test_bytes_of_a_block_are_planes_and_one_table(columns, bits, effective):
    shape = ExpertShape(hidden_size=64, intermediate=columns, num_experts=1, top_k=1)
    rows, k = shape.block_shape(1)
    assert (rows, k) == (64, columns)
    assert round(8 * shape.block_bytes(1, bits) / (rows * k), 2) == effective
    assert shape.block_bytes(1, 16) == 2 * rows * k


def test_a_step_reads_each_routed_expert_once():
    routing = Routing(np.array([[0, 2], [2, 0]], np.int32), np.ones((2, 2), np.float32))
    bits = [2, 3, 8, 8, 4, 16]
    want = [(0, 2), (1, 3), (0, 4), (1, 16)]
    assert routing.experts == [0, 2]
    total = sum(SMALL.block_bytes(module, q) for module, q in want)
    assert bench_device.read_bytes(SMALL, routing, bits) == total
    plain = bench_device.ENGINES["shared table"]
    assert bench_device.read_bytes(SMALL, routing, [*bits[:5], 8], plain) == total - (
        SMALL.block_bytes(1, 16) - SMALL.block_bytes(1, 8)
    )


def test_routing_takes_distinct_experts_with_weights_that_add_up():
    routing = bench_device.uniform_routing(np.random.default_rng(0), SMALL, 50)
    assert all(len(set(row)) == 2 for row in routing.expert_index.tolist())
    assert set(routing.experts) == {0, 1, 2}
    np.testing.assert_allclose(routing.gate_weight.sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("layer_bytes", [1, 10**6, 10**9])
def test_enough_layers_are_cycled_to_leave_the_cache(layer_bytes):
    copies = bench_device.copies_for(layer_bytes, 60 * 10**6)
    assert (copies - 1) * layer_bytes >= bench_device.CACHE_TIMES * 60 * 10**6 or copies == 2


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
def test_random_pages_make_layers_that_the_kernels_and_the_reference_read_alike():
    """numpy stands in for cupy: the layers are laid out by the benchmark, run by the emulation."""
    rng = np.random.default_rng(1)
    bits = [2, 5, 3, 8, 4, 6]
    engine = bench_device.ENGINES["shared table"]
    arrays = bench_device.random_pages(np, rng, engine, SMALL, bits, copies=2)
    pages = shared_table.DevicePages(
        arrays.arena, bench_device.PAGE_BYTES, bench_device.MIN_BITS, *arrays.tables()
    )
    taken = np.concatenate([pages.plane_pages.ravel(), pages.table_pages.ravel()])
    taken = taken[taken >= 0]
    assert len(np.unique(taken)) == len(taken) == len(pages.arena) // bench_device.PAGE_BYTES
    step = SharedTableLayer(
        load_kernels(shared_table.SOURCE, target="emulation"),
        np,
        hidden_size=96,
        intermediate=40,
        num_experts=3,
        top_k=2,
        max_tokens=2,
        number_type="float32",
    )
    x = rng.standard_normal((2, 96)).astype(np.float32)
    routing = bench_device.uniform_routing(rng, SMALL, 2)
    for copy in range(2):
        out = np.zeros_like(x)
        step(x, routing.expert_index, routing.gate_weight, pages, 6 * copy, out)
        weights = [_weights(pages, 6 * copy + i, i % 2, q) for i, q in enumerate(bits)]
        args = (x, routing.expert_index, routing.gate_weight, weights[0::2], weights[1::2])
        want = reference.moe_layer(*args, "silu")
        assert np.isfinite(want).all()
        assert np.abs(out - want).max() < 1e-5 * np.abs(want).max()


def _weights(pages, block: int, module: int, q: int) -> np.ndarray:
    rows, columns = SMALL.block_shape(module)
    by_page = pages.arena.reshape(-1, bench_device.PAGE_BYTES)

    def stream(ids: np.ndarray, num_bytes: int) -> np.ndarray:
        return by_page[ids[ids >= 0]].reshape(-1)[:num_bytes]

    words = plane_words(columns)
    lists = pages.plane_pages[block, :q]
    planes = np.stack([stream(ids, 4 * rows * words).view(np.uint32) for ids in lists])
    table = stream(pages.table_pages[block, q - bench_device.MIN_BITS], 2 * rows * 2**q)
    shape = (q, rows, words)
    return reference.dequantize(
        planes.reshape(shape), table.view(np.float16).reshape(rows, 2**q), q, columns
    )


@pytest.mark.parametrize("name", bench_device.ENGINES)
@pytest.mark.parametrize("module", [0, 1])
def test_the_floor_is_not_above_what_an_engine_keeps(name, module):
    """Padding to tiles may add bytes; one byte an entry may take a table below its fp16 form."""
    for shape in bench_device.SHAPES.values():
        rows, columns = shape.block_shape(module)
        for bits in range(2, 9):
            plane, table = bench_device.ENGINES[name].stream_bytes(shape, module, bits)
            assert rows * columns // 8 <= plane <= 1.1 * rows * columns // 8
            assert rows * 2**bits <= table <= rows * (2 * 2**bits + 4)


SASS = """
.text.first:
.L_x_9:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/                   LDS.U16 R3, [R4] ;
        /*0030*/                   LOP3.LUT R5, R5, 0x1, RZ, 0xc0, !PT ;
        /*0040*/                   HMMA.1688.F32.TF32 R8, R8, R9, R8 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/              @!P0 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_5:
        /*0080*/                   BRA `(.L_x_5);
.text.second:
        /*0000*/                   EXIT ;
"""


def test_inner_loops_are_found_and_the_outer_and_the_endless_one_are_not():
    loops = inner_loops(SASS)
    assert set(loops) == {"first", "second"}
    assert loops["second"] == []
    (loop,) = loops["first"]
    assert loop.opcodes == Counter({"LDS": 1, "LOP3": 1, "HMMA": 1, "BRA": 1})
    assert (loop.table_reads, loop.tensor_ops) == (1, 1)
    assert loop.by_unit() == {"shared memory": 1, "integer": 1, "tensor cores": 1, "control": 1}


@pytest.mark.skipif(not cuda_compile.available(), reason="NVRTC wheels missing")
def test_static_rows_name_every_kernel_once_an_architecture():
    rows = bench_static.resource_rows(bench_static.SOURCES[:2], ["sm_90"])
    assert [(r["source"], r["kernel"]) for r in rows] == [
        ("pack", "pack_planes"),
        ("pack", "unpack_codes"),
        ("gather", "gather_pages"),
        ("gather", "scatter_pages"),
    ]
    assert all(r["registers"] > 0 and r["spill_store_bytes"] == 0 for r in rows)


@pytest.mark.skipif(not cuda_compile.available(), reason="NVRTC wheels missing")
def test_the_static_run_writes_its_file_and_says_what_it_could_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_static, "SOURCES", bench_static.SOURCES[:1])
    monkeypatch.setattr(bench_static, "ONE_WIDTH", ())
    monkeypatch.setattr(bench, "find_nvdisasm", lambda: None)
    done = CliRunner().invoke(bench.app, ["--static", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "machine instructions are not counted" in done.output
    stored = json.loads((tmp_path / "cuda_static.json").read_text())
    assert {row["kernel"] for row in stored["resources"]} == {"pack_planes", "unpack_codes"}
    assert [path.name for path in tmp_path.iterdir()] == ["cuda_static.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "GPT-9"], "--model 'GPT-9' is unknown; there are Qwen1.5-MoE-A2.7B"),
        (["--batch", "0"], "--batch must be >= 1: 0"),
        ([], "no GPU to measure on"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, message):
    if not arguments and gpu_problem() is None:
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(bench.app, arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
