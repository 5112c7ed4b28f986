"""What a loaded model holds, against the byte formulas."""

import shutil

import numpy as np
import pytest
import torch
import transformers

from models.plane_bytes import block_bytes
from runtime.decoder_config import DecoderConfigError
from runtime.loaded_model import load_quantized
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantized Mixtral of two layers whose planes and tables fill whole pages of 1 KiB."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("mixtral")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path / "source")
    quantize_checkpoint(path / "source", path / "quantized")
    return path / "quantized"


@pytest.mark.parametrize("bits", [2, 3, 5, 8, "mixed"])
def test_resident_bytes_of_a_loaded_model_are_those_of_the_formula(folder, bits):
    widths = np.arange(12) % 7 + 2 if bits == "mixed" else np.full(12, bits)
    loaded = load_quantized(folder, arena_pages=4000, bits=widths, page_bytes=1024)
    checkpoint = QuantizedCheckpoint.open(folder)
    formula = sum(
        block_bytes(record.rows, record.columns, int(q), tables="all")
        for record, q in zip(checkpoint.blocks, widths, strict=True)
    )
    resident = loaded.arena.use().weight_pages * 1024
    read_by_lists = 1024 * sum(
        len(loaded.mover.tables.plane_list(i, p)) for i in range(12) for p in range(widths[i])
    ) + 1024 * sum(
        len(loaded.mover.tables.table_list(i, q))
        for i in range(12)
        for q in range(2, widths[i] + 1)
    )
    planned = loaded.tables.bytes_[np.arange(12), widths - 2].sum()
    loaded.close()
    assert resident == formula == read_by_lists == planned


def test_larger_pages_cost_what_rounding_costs_and_the_planner_knows_it(folder):
    loaded = load_quantized(folder, arena_pages=200, bits=3, page_bytes=32 * 1024)
    resident = loaded.arena.use().weight_pages * 32 * 1024
    planned = loaded.tables.bytes_[:, 1].sum()
    loaded.close()
    assert resident == planned


def test_weights_that_do_not_fit_are_refused_with_both_sizes(folder):
    with pytest.raises(ValueError, match=r"weights need \d+ pages, the arena has 100"):
        load_quantized(folder, arena_pages=100, bits=8, page_bytes=1024)


@pytest.mark.parametrize("bits", [9, 1, 3.7])
def test_a_width_that_the_checkpoint_does_not_have_is_refused(folder, bits):
    with pytest.raises(ValueError, match=f"bits: must be one of .*found {bits}"):
        load_quantized(folder, arena_pages=4000, bits=bits, page_bytes=1024)


def test_a_checkpoint_of_another_decoder_is_refused_by_field(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = (copy / "config.json").read_text().replace('"mixtral"', '"gpt_neo"')
    (copy / "config.json").write_text(config)
    with pytest.raises((DecoderConfigError, ValueError), match="model_type"):
        load_quantized(copy, arena_pages=4000, bits=2, page_bytes=1024)
