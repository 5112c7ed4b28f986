"""Loading: every layout of tensors, every type of number, and checkpoints that are not whole."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime.checkpoint_shards import SourceError
from runtime.engine.weight_pages import weights_in_pages
from runtime.model.experts_plain import ExpertMatrices, KernelExperts, TorchExperts
from runtime.model.load import load_model
from runtime.model.quantized_experts import QuantizedExperts, require_blocks
from runtime.model.spec_config import read_model_spec
from runtime.page_arena import PageArena
from runtime.quantize import quantize_checkpoint
from runtime.quantized_checkpoint import QuantizedCheckpoint, QuantizedCheckpointError

PROMPT = np.random.default_rng(8).integers(0, 97, size=29).tolist()


@torch.inference_mode()
def logits_of(model):
    return model(torch.tensor([PROMPT]), use_cache=False).logits[0].float()


def rewritten(folder, target, change):
    """A copy of a checkpoint of one file after ``change(tensors)``."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("variant", ["qwen2_moe", "mixtral", "olmoe", "gemma4-moe"])
def test_either_layout_of_experts_and_shards_give_the_same_logits(
    variant, tiny_model, tiny_folder, stepper, tmp_path
):
    model = tiny_model(variant)
    wanted = logits_of(model)
    fused = tmp_path / "fused"
    shutil.copytree(tiny_folder(variant), fused)
    state = {k: v.contiguous().clone() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file(state, fused / "model.safetensors")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for folder in (fused, tmp_path / "sharded"):
        found = stepper(load_model(folder)).step({0: PROMPT}, all_rows=True)[0]
        assert float((found - wanted).abs().max()) <= 1e-4


@pytest.mark.parametrize("variant", ["qwen2_moe", "llama", "gemma4-moe", "olmoe-tied"])
def test_bfloat16_weights_cost_no_more_than_the_library_loses_by_them(
    variant, tiny_folder, stepper
):
    import transformers

    folder = tiny_folder(variant, "bfloat16")
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact = logits_of(load(folder, dtype=torch.float32))
    library = logits_of(load(folder, dtype=torch.bfloat16))
    loaded = load_model(folder)
    assert loaded.dtype == torch.bfloat16 and isinstance(loaded.experts, KernelExperts | None)
    found = stepper(loaded).step({0: PROMPT}, all_rows=True)[0]
    ours, theirs = (float((x - exact).abs().max()) for x in (found, library))
    assert theirs > 1e-3  # bfloat16 loses something here
    assert ours <= 0.1 * theirs
    widened = stepper(load_model(folder, dtype="float32")).step({0: PROMPT}, all_rows=True)[0]
    assert float((widened - exact).abs().max()) <= 1e-4


def test_float16_checkpoints_become_float32(tiny_folder, stepper):
    import transformers

    folder = tiny_folder("qwen3_moe", "float16")
    exact = logits_of(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    )
    loaded = load_model(folder)
    assert loaded.dtype == torch.float32
    found = stepper(loaded).step({0: PROMPT}, all_rows=True)[0]
    assert float((found - exact).abs().max()) <= 1e-4


def test_without_the_compiled_kernels_torch_gives_the_same_logits(
    tiny_model, tiny_folder, stepper, monkeypatch
):
    monkeypatch.setenv("SERVING_TWIN_CPU_KERNELS", "numpy")
    for variant in ("qwen2_moe", "gemma4-moe"):
        loaded = load_model(tiny_folder(variant))
        assert not isinstance(loaded.experts, KernelExperts)
        found = stepper(loaded).step({0: PROMPT}, all_rows=True)[0]
        assert float((found - logits_of(tiny_model(variant))).abs().max()) <= 1e-4


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, *shape, dtype=torch.float32):
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


Q_BIAS = "model.layers.1.self_attn.q_proj.bias"
DOWN = "model.layers.2.mlp.experts.4.down_proj.weight"


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen2_moe", drop(Q_BIAS), r"layers\.1\.self_attn\.q_proj\.bias: is missing; .* \[128\]"),
        ("qwen2_moe", put(Q_BIAS, 64), r"q_proj\.bias: shape \[64\], config\.json gives \[128\]"),
        (
            "qwen2_moe",
            put("model.norm.weight", 128, dtype=torch.int32),
            r"norm\.weight: dtype I32, must be one of BF16, F16, F32",
        ),
        ("qwen2_moe", drop("lm_head.weight"), r"lm_head\.weight: is missing"),
        ("qwen2_moe", drop(DOWN), r"no tensor for the down matrix of layer 2, expert 4"),
        ("qwen2_moe", put(DOWN, 128, 41), r"shape \[128, 41\], config\.json gives \[128, 40\]"),
        (
            "qwen2_moe",
            put("model.layers.1.self_attn.o_proj.bias", 128),
            r"layers\.1\.self_attn\.o_proj\.bias: config\.json gives it no place",
        ),
        (
            "llama",
            put("model.layers.3.input_layernorm.weight", 64),
            r"layers\.3\.input_layernorm\.weight: config\.json gives it no place",
        ),
        ("gemma4-moe", drop("model.layers.0.layer_scalar"), r"layer_scalar: is missing"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_by_its_tensor(
    variant, change, message, tiny_folder, tmp_path
):
    folder = rewritten(tiny_folder(variant), tmp_path / "broken", change)
    with pytest.raises(SourceError, match=message) as found:
        load_model(folder)
    assert str(folder) in str(found.value) and "\n" not in str(found.value)


def test_tensors_that_follow_from_the_configuration_may_be_there(tiny_folder, tmp_path):
    folder = rewritten(
        tiny_folder("llama"),
        tmp_path / "old",
        put("model.layers.0.self_attn.rotary_emb.inv_freq", 16),
    )
    assert load_model(folder).kind == "none"


def test_an_unknown_type_of_number_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="dtype: must be auto, float32 or bfloat16, found 'int8'"):
        load_model(tiny_folder("llama"), dtype="int8")


@pytest.fixture(scope="module")
def quantized_folder(tiny_folder, tmp_path_factory):
    made = {}

    def get(variant):
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("quantized") / variant
            quantize_checkpoint(tiny_folder(variant), made[variant])
        return made[variant]

    return get


def reconstructed(checkpoint, widths, spec):
    """Float experts as the planes and tables of these widths say, [E, rows, columns] by layer."""
    layers = {}
    for index, record in enumerate(checkpoint.blocks):
        block, bits = checkpoint.block(index), int(widths[index])
        unpacked = np.unpackbits(block.planes[:bits].view(np.uint8), axis=-1, bitorder="little")
        places = (1 << np.arange(bits)[::-1])[:, None, None]
        codes = (unpacked[..., : record.columns].astype(np.int64) * places).sum(0)
        matrix = np.take_along_axis(block.tables[bits].astype(np.float32), codes, axis=1)
        layers.setdefault(record.layer, {}).setdefault(record.module, []).append(matrix)
    return {
        layer: {module: torch.from_numpy(np.stack(parts)) for module, parts in both.items()}
        for layer, both in layers.items()
    }


@pytest.mark.parametrize("variant", ["qwen2_moe-mixed", "gemma4-moe"])
def test_a_quantized_folder_computes_what_its_planes_and_tables_say(
    variant, quantized_folder, stepper
):
    loaded = load_model(quantized_folder(variant), verify=True)
    assert loaded.kind == "quantized" and loaded.experts is None
    checkpoint = loaded.checkpoint
    widths = np.random.default_rng(1).integers(2, 9, size=len(checkpoint.blocks))
    arena = PageArena(3000, page_bytes=1024)
    mover = weights_in_pages(checkpoint, arena, widths)
    seen = []
    experts = QuantizedExperts(
        loaded.spec, arena, mover.tables,
        observe=lambda layer, chosen, gates: seen.append((layer, chosen.copy(), gates.copy())),
    )  # fmt: skip
    found = stepper(loaded.decoder, experts).step({0: PROMPT}, all_rows=True)[0]
    floats = {
        layer: ExpertMatrices(both["gate_up"], both["down"])
        for layer, both in reconstructed(checkpoint, widths, loaded.spec).items()
    }
    plain = TorchExperts(floats, loaded.spec.activation)
    wanted = stepper(loaded.decoder, plain).step({0: PROMPT}, all_rows=True)[0]
    mover.close()
    assert float((found - wanted).abs().max()) <= 1e-4
    assert [layer for layer, _, _ in seen] == list(loaded.spec.moe_layers)
    assert all(chosen.shape == gates.shape == (29, 2) for _, chosen, gates in seen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"config\.json gives 12 blocks, found 24"),
        ({"moe_intermediate_size": 48}, r"gives block gate_up of layer 1, expert 0, \[96, 128\]"),
        (
            {"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]},
            r"found gate_up of layer 3, expert 0",
        ),
    ],
)
def test_quantized_blocks_of_another_model_are_refused(changes, message, quantized_folder):
    checkpoint = QuantizedCheckpoint.open(quantized_folder("qwen2_moe-mixed"))
    spec = read_model_spec({**checkpoint.config, **changes})
    with pytest.raises(QuantizedCheckpointError, match=message):
        require_blocks(checkpoint, spec)
