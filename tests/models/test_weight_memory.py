"""Sizes of whole models at fewer bits, against published figures and counting block by block."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.llm_catalog import PAGEDWEIGHT_MODELS, load_llm
from models.memory_report import MemoryQuestion, memory_report, parse_bits
from models.plane_bytes import block_bytes, block_pages
from models.weight_memory import (
    BlockStorage,
    WeightMemoryError,
    bits_for_saving,
    bits_within,
    expert_memory,
    full_expert_bytes,
    other_bytes,
    saved_share,
)

ACTIVE = BlockStorage()
QWEN, MIXTRAL, GEMMA = (load_llm(name) for name in PAGEDWEIGHT_MODELS)

# Gigabytes of the experts and percent saved of the whole model, as published for the three.
PUBLISHED_EXPERT_GB = {
    QWEN.name: {2: 3.170, 3: 4.783, 4: 6.453, 5: 8.234, 6: 10.239, 8: 16.043},
    MIXTRAL.name: {2: 11.341, 3: 17.046, 4: 22.817, 5: 28.723, 6: 34.897, 8: 49.392},
    GEMMA.name: {2: 5.839, 3: 8.824, 4: 11.938, 5: 15.312, 6: 19.205, 8: 31.143},
}
PUBLISHED_SAVING = {
    QWEN.name: {2: 75.9, 3: 70.3, 4: 64.5, 6: 51.3},
    MIXTRAL.name: {2: 84.4, 3: 78.3, 4: 72.1, 6: 59.2},
    GEMMA.name: {2: 78.9, 3: 73.0, 4: 66.9, 6: 52.5},
}


@pytest.mark.parametrize("shape", [QWEN, MIXTRAL, GEMMA], ids=lambda s: s.name)
def test_experts_and_savings_are_the_published_ones(shape: object) -> None:
    assert isinstance(shape, type(QWEN))
    for bits, gigabytes in PUBLISHED_EXPERT_GB[shape.name].items():
        found = expert_memory(shape, bits, ACTIVE)
        assert round(found.total_bytes / 1e9, 3) == gigabytes
        assert found.bits == bits
    for bits, percent in PUBLISHED_SAVING[shape.name].items():
        size = expert_memory(shape, bits, ACTIVE).total_bytes
        assert round(100 * saved_share(shape, size), 1) == percent


def test_72_percent_needs_4_bits_of_mixtral_and_fewer_of_the_others() -> None:
    whole = {}
    for shape in (QWEN, MIXTRAL, GEMMA):
        bits = bits_for_saving(shape, 0.72, ACTIVE)
        assert bits is not None
        whole[shape.name] = math.floor(bits)
    assert whole == {QWEN.name: 2, MIXTRAL.name: 4, GEMMA.name: 3}


@given(
    shape=st.sampled_from([QWEN, MIXTRAL, GEMMA]),
    saving=st.floats(0.3, 0.85),
    storage=st.builds(
        BlockStorage,
        tables=st.sampled_from(["active", "all"]),
        entry=st.sampled_from(["fp16", "int8"]),
        page_bytes=st.sampled_from([4096, 32768, 2**21]),
    ),
    in_pages=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_found_average_saves_the_share_and_a_little_more_does_not(
    shape: object, saving: float, storage: BlockStorage, in_pages: bool
) -> None:
    assert isinstance(shape, type(QWEN))
    bits = bits_for_saving(shape, saving, storage, in_pages=in_pages)

    def saved(width: float) -> float:
        found = expert_memory(shape, width, storage)
        return saved_share(shape, found.paged_bytes if in_pages else found.total_bytes)

    step = 1.0 / min(group.count for group in shape.expert_matrices)  # one block more or less
    if bits is None:
        assert saved(2.0) < saving
    else:
        assert saved(max(2.0, bits - step)) >= saving
        if bits < 8.0:
            assert saved(min(8.0, bits + step)) <= saving


@given(bits=st.floats(2.0, 8.0), tables=st.sampled_from(["active", "all"]))
@settings(max_examples=40, deadline=None)
def test_an_average_is_a_mix_of_whole_blocks(bits: float, tables: str) -> None:
    storage = BlockStorage(tables=tables, page_bytes=4096)  # type: ignore[arg-type]
    found = expert_memory(MIXTRAL, bits, storage)
    low = math.floor(bits)
    total = pages = weights = bit_sum = 0
    for group in MIXTRAL.expert_matrices:
        num_upper = round((bits - low) * group.count)
        for i in range(group.count):
            width = low + 1 if i < num_upper else low
            n, k = group.rows, group.columns
            total += block_bytes(n, k, width, tables=storage.tables)
            pages += block_pages(n, k, width, page_bytes=4096, tables=storage.tables)
            weights += n * k
            bit_sum += width * n * k
    assert (found.total_bytes, found.paged_bytes) == (total, 4096 * pages)
    assert found.bits == bit_sum / weights
    assert abs(found.bits - bits) <= 0.5 / 256
    assert found.effective_bits == 8 * total / weights
    assert found.page_waste == pytest.approx(4096 * pages / total - 1)


def test_bits_within_a_budget_stop_at_8_and_at_nothing() -> None:
    assert bits_within(QWEN, 1e12, ACTIVE) == 8.0
    assert bits_within(QWEN, 1e9, ACTIVE) is None
    at_4 = expert_memory(QWEN, 4, ACTIVE).total_bytes
    assert bits_within(QWEN, at_4, ACTIVE) == 4.0


def test_ten_gigabytes_hold_qwen_at_3_bits_and_its_published_tokens() -> None:
    # Published: 3 bits and 7,600 tokens; pages of 1 KiB waste nothing here.
    question = MemoryQuestion(
        bits=(3.0, 4.0), storage=BlockStorage(page_bytes=1024), budget_bytes=10**10
    )
    report = memory_report(QWEN, question)
    at_3, at_4 = report.widths
    assert at_3.experts.page_waste == 0.0
    assert at_3.budget is not None and at_4.budget is not None
    free = 10**10 - other_bytes(QWEN) - at_3.experts.total_bytes
    assert at_3.budget.free_bytes == free
    assert free // 196_608 == 7_624
    assert at_3.budget.kv_tokens == 7_616  # whole blocks of 16 tokens
    assert not at_4.budget.fits and at_4.budget.kv_tokens == 0
    assert report.full_budget is not None and not report.full_budget.fits
    assert report.budget_bits is not None and 3.0 < report.budget_bits < 4.0


def test_a_report_adds_up() -> None:
    report = memory_report(GEMMA, MemoryQuestion(bits=(2.0, 3.5, 8.0)))
    assert report.num_blocks == 7_680
    for width in report.widths:
        assert width.model_bytes == report.other_bytes + width.experts.total_bytes
        assert width.freed_bytes == full_expert_bytes(GEMMA) - width.experts.paged_bytes
        assert 0 <= width.freed_bytes // 20_480 - width.freed_kv_tokens < 16
        assert width.saving_in_pages < width.saving
    assert report.target is not None
    assert list(report.target.saving_by_bits) == [3, 4]
    assert report.target.saving_by_bits[3] > 0.72 > report.target.saving_by_bits[4]
    assert report.target.bits_in_pages is not None and report.target.bits_in_pages < 3.0


def test_a_dense_model_has_a_cache_and_nothing_to_shrink() -> None:
    llama = load_llm("Llama-3.1-8B")
    report = memory_report(llama, MemoryQuestion(budget_bytes=20 * 10**9))
    assert report.widths == () and report.target is None and report.num_blocks == 0
    assert report.full_budget is not None
    tokens = (20 * 10**9 - 2 * 8_030_261_248) // 131_072
    assert report.full_budget.kv_tokens == tokens // 16 * 16
    with pytest.raises(WeightMemoryError, match=r"Llama-3.1-8B: has no experts"):
        expert_memory(llama, 4, ACTIVE)
    with pytest.raises(WeightMemoryError, match="has no experts"):
        bits_for_saving(llama, 0.72, ACTIVE)


def test_an_average_out_of_reach_is_none_and_shows_the_lowest_width() -> None:
    target = memory_report(QWEN, MemoryQuestion(saving=0.9)).target
    assert target is not None
    assert target.bits is None and target.bits_in_pages is None
    assert list(target.saving_by_bits) == [2, 3]


def test_widths_are_read_from_a_list() -> None:
    assert parse_bits("2, 3,3.5,8") == (2.0, 3.0, 3.5, 8.0)
    for text in ("", "2,,3", "1.9", "8.1", "four", "nan", "inf", "3;4"):
        with pytest.raises(WeightMemoryError, match=r"bits: must be numbers within 2\.\.8"):
            parse_bits(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockStorage(page_bytes=3000), "page_bytes: must be a power of two >= 1,024"),
        (lambda: BlockStorage(page_bytes=-4096), "page_bytes: must be a power of two"),
        (lambda: BlockStorage(tables="none"), "tables: must be one of active, all, found 'none'"),
        (lambda: BlockStorage(entry="fp8"), "entry: must be one of fp16, int8, found 'fp8'"),
        (lambda: BlockStorage(min_bits=9), r"min_bits: must be within 1\.\.8, found 9"),
        (lambda: MemoryQuestion(saving=1.0), "saving: must be more than 0 and less than 100 %"),
        (lambda: MemoryQuestion(saving=math.nan), "saving: must be more than 0"),
        (lambda: MemoryQuestion(num_sequences=0), "num_sequences: must be >= 1, found 0"),
        (lambda: expert_memory(QWEN, 1.5, ACTIVE), r"bits: must be within 2\.\.8, found 1.5"),
    ],
)
def test_questions_without_an_answer_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(WeightMemoryError, match=message):
        make()
