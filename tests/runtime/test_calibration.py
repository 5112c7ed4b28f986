"""Calibration of real transformers models against plain loops over tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from models.quality import (  # noqa: E402
    activation_slope,
    activation_value,
    conditional_second_moment,
    gate_up_row_weight,
    gradient_scale,
    output_scale,
    routed_mass,
)
from runtime.calibration import (  # noqa: E402
    CalibrationError,
    CalibrationSettings,
    UnsupportedModelError,
    accumulator_bytes,
    calibrate_checkpoint,
    calibrate_model,
    layer_groups,
)
from runtime.calibration_experts import find_experts  # noqa: E402
from runtime.calibration_stats import INDEX, CalibrationStats, layer_file  # noqa: E402

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 24, 16, 5, 2, 60


def qwen2(**changes: Any) -> Any:
    config = transformers.Qwen2MoeConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "initializer_range": 0.3,
            **changes,
        }
    )
    return transformers.Qwen2MoeForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    return transformers.MixtralForCausalLM(config)


def gemma4() -> Any:
    config = transformers.Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=EXPERTS,
        top_k_experts=2,
        moe_intermediate_size=INNER,
        num_kv_shared_layers=0,
        initializer_range=0.3,
    )
    return transformers.Gemma4ForCausalLM(config)


FAMILIES = {"qwen2": qwen2, "mixtral": mixtral, "gemma4": gemma4}


def built(family: str) -> Any:
    torch.manual_seed(3)
    model = FAMILIES[family]()
    model.set_experts_implementation("eager")
    for layer in find_experts(model):  # some families start their experts and routers at 0
        layer.gate_up.normal_(0.0, 0.3)
        layer.down.normal_(0.0, 0.3)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.proj.weight")):
            parameter.data.normal_(0.0, 0.5)
    return model.eval()


def sequences(count: int = 6, length: int = 20) -> Any:
    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def routed(model: Any, tokens: Any, layer: int) -> dict[str, np.ndarray]:
    """Inputs, experts, gates, output and output gradient of one layer, token by token.

    The loss gradient is taken by adding a zero to the experts' output: no hook on a tensor.
    """
    module = find_experts(model)[layer].module
    kept: dict[str, Any] = {}
    plain = module.forward

    def forward(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        output = plain(hidden_states, top_k_index, top_k_weights)
        kept["zero"] = torch.zeros_like(output, requires_grad=True)
        kept.update(x=hidden_states, index=top_k_index, gate=top_k_weights, y=output)
        return output + kept["zero"]

    module.forward = forward
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in ("x", "index", "gate", "y", "dy")}
    try:
        for row in tokens:  # one sequence at a time: batching must not matter
            logits = model(input_ids=row[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
            (kept["dy"],) = torch.autograd.grad(loss, kept["zero"])
            for name in pieces:
                array = kept[name].detach().numpy()
                pieces[name].append(array.reshape(-1, array.shape[-1]))
    finally:
        module.forward = plain
    return {name: np.concatenate(arrays) for name, arrays in pieces.items()}


def expert_tokens(seen: dict[str, np.ndarray], e: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token numbers and gates of one expert by a plain loop, and the inputs."""
    chosen = [
        (t, seen["gate"][t, j])
        for t in range(len(seen["x"]))
        for j in range(seen["index"].shape[1])
        if seen["index"][t, j] == e
    ]
    tokens = np.array([t for t, _ in chosen], dtype=int)
    return tokens, np.array([g for _, g in chosen], dtype=np.float64), seen["x"][tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_weighted_statistics_are_those_of_a_loop_over_tokens(
    family: str, tmp_path: Path
) -> None:
    model, tokens = built(family), sequences()
    settings = CalibrationSettings(tokens=120, sequence_tokens=20, weighting="gate")
    stats = calibrate_model(model, tokens, tmp_path, settings)
    for layer, experts in enumerate(find_experts(model)):
        seen = routed(model, tokens, layer)
        arrays = stats._load(layer)
        sums, counts = np.zeros(EXPERTS), np.zeros(EXPERTS, dtype=int)
        for e in range(EXPERTS):
            chosen, gate, x = expert_tokens(seen, e)
            counts[e], sums[e] = len(chosen), float((gate**2).sum())
            if not len(chosen):
                continue
            z, u = np.split(x @ experts.gate_up[e].numpy().T, 2, axis=1)
            inner = activation_value(z, experts.activation) * u
            down = experts.down[e].numpy()
            rows = gate_up_row_weight(z, u, gate, down, experts.activation)
            for name, expected in (
                ("gate_up.moment", conditional_second_moment(x, gate)),
                ("down.moment", conditional_second_moment(inner, gate)),
                ("gate_up.row_weight", rows),
                ("down.row_weight", np.ones(HIDDEN)),
            ):
                scale = np.abs(expected).max()
                np.testing.assert_allclose(
                    arrays[name][e], expected, rtol=2e-4, atol=2e-5 * scale, err_msg=name
                )
        np.testing.assert_array_equal(stats.routed_tokens(layer), counts)
        np.testing.assert_allclose(arrays["mass"], routed_mass(sums, counts, 120), rtol=1e-5)
        assert stats.scale(layer) == pytest.approx(gradient_scale(seen["dy"]), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_weighted_statistics_are_those_of_a_loop_over_tokens(
    family: str, tmp_path: Path
) -> None:
    model, tokens = built(family), sequences()
    settings = CalibrationSettings(tokens=120, sequence_tokens=20, weighting="gradient")
    stats = calibrate_model(model, tokens, tmp_path, settings)
    for layer, experts in enumerate(find_experts(model)):
        seen = routed(model, tokens, layer)
        arrays = stats._load(layer)
        for e in range(EXPERTS):
            chosen, gate, x = expert_tokens(seen, e)
            if not len(chosen):
                continue
            z, u = np.split(x.astype(np.float64) @ experts.gate_up[e].numpy().T, 2, axis=1)
            act, slope = (f(z, experts.activation) for f in (activation_value, activation_slope))
            at_output = gate[:, None] * seen["dy"][chosen]
            at_inner = at_output @ experts.down[e].numpy()
            at_rows = np.concatenate([at_inner * slope * u, at_inner * act], axis=1)
            scale = gradient_scale(seen["dy"]) * float((gate**2).sum())
            for name, gradient, inputs in (
                ("gate_up", at_rows, x),
                ("down", at_output, act * u),
            ):
                weight = (gradient**2).sum(axis=1)
                moment = conditional_second_moment(inputs, np.sqrt(weight))
                np.testing.assert_allclose(
                    arrays[f"{name}.moment"][e],
                    moment,
                    rtol=1e-3,
                    atol=1e-4 * np.abs(moment).max(),
                )
                rows = (gradient**2).sum(axis=0) / scale
                np.testing.assert_allclose(
                    arrays[f"{name}.row_weight"][e], rows, rtol=5e-3, atol=1e-4 * rows.max()
                )


def test_without_gradients_the_layer_scale_is_one_over_the_output_square(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), sequences()
    settings = CalibrationSettings(
        tokens=120, sequence_tokens=20, weighting="gate", layer_gradients=False
    )
    stats = calibrate_model(model, tokens, tmp_path, settings)
    assert stats.scale(1) == pytest.approx(output_scale(routed(model, tokens, 1)["y"]), rel=1e-4)


def test_wide_blocks_keep_the_diagonal(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), sequences()
    common = {"tokens": 120, "sequence_tokens": 20}
    full = calibrate_model(model, tokens, tmp_path / "a", CalibrationSettings(**common))
    settings = CalibrationSettings(max_full_columns=INNER, **common)
    narrow = calibrate_model(model, tokens, tmp_path / "b", settings)
    moments = [s._load(0)["gate_up.moment"] for s in (full, narrow)]
    np.testing.assert_allclose(
        moments[1], np.diagonal(moments[0], axis1=1, axis2=2), rtol=1e-4, atol=1e-6
    )
    assert narrow.input_second_moment(0, 0, 0).shape == (HIDDEN,)
    assert narrow.input_second_moment(0, 0, 1).shape == (INNER, INNER)


def test_one_layer_at_a_time_gives_the_same_files(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), sequences()
    for name, memory in (("all", 1 << 30), ("each", 1)):
        settings = CalibrationSettings(tokens=120, sequence_tokens=20, memory_bytes=memory)
        assert len(layer_groups(find_experts(model), settings)) == (1 if name == "all" else LAYERS)
        calibrate_model(model, tokens, tmp_path / name, settings)
    for layer in range(LAYERS):
        one, other = (tmp_path / name / layer_file(layer) for name in ("all", "each"))
        assert one.read_bytes() == other.read_bytes()


def test_accumulators_take_the_memory_that_is_stated() -> None:
    experts = find_experts(built("qwen2"))[0]
    assert accumulator_bytes(experts, 8192) == EXPERTS * 8 * (HIDDEN**2 + INNER**2)
    assert accumulator_bytes(experts, 20) == EXPERTS * 8 * (HIDDEN + INNER**2)


def test_finished_layers_are_kept_and_the_index_comes_last(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), sequences()
    settings = CalibrationSettings(tokens=120, sequence_tokens=20)
    passes: list[tuple[int, int]] = []
    calibrate_model(model, tokens, tmp_path, settings)
    kept = (tmp_path / layer_file(0)).read_bytes()
    (tmp_path / INDEX).unlink()
    (tmp_path / layer_file(1)).write_bytes(b"torn")
    with pytest.raises(CalibrationError, match="not finished"):
        CalibrationStats.open(tmp_path)
    calibrate_model(
        model, tokens, tmp_path, settings, progress=lambda done, total: passes.append((done, total))
    )
    assert passes[-1] == (120, 120)
    assert (tmp_path / layer_file(0)).read_bytes() == kept
    passes.clear()
    calibrate_model(
        model, tokens, tmp_path, settings, progress=lambda done, total: passes.append((done, total))
    )
    assert passes == []
    other = CalibrationSettings(tokens=120, sequence_tokens=20, weighting="gate")
    calibrate_model(
        model, tokens, tmp_path, other, progress=lambda done, total: passes.append((done, total))
    )
    assert passes, "another calibration must not reuse these layers"


def test_hooks_and_gradient_flags_are_gone_afterwards(tmp_path: Path) -> None:
    model, tokens = built("qwen2"), sequences()
    calibrate_model(model, tokens, tmp_path, CalibrationSettings(tokens=120, sequence_tokens=20))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_an_expert_that_saw_no_token_has_damage_of_its_layers_mean(tmp_path: Path) -> None:
    settings = CalibrationSettings(tokens=2, sequence_tokens=2)
    stats = calibrate_model(built("qwen2"), sequences(1, 2), tmp_path, settings)
    counts = stats.routed_tokens(0)
    empty = int(counts.argmin())
    assert counts[empty] == 0, "two tokens reach at most four of five experts"
    assert stats.mass(0, empty) > 0.0
    assert (0, empty) in stats.thin_experts()
    for module in (0, 1):
        moment = stats.input_second_moment(0, empty, module)
        assert np.linalg.eigvalsh(moment).min() > 0.0
        assert np.count_nonzero(moment - np.diag(np.diagonal(moment))) == 0
        assert (stats.row_weight(0, empty, module) >= 0).all()
        assert stats.row_weight(0, empty, module).sum() > 0


def saved(model: Any, folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def text_file(folder: Path, words: int = 400) -> Path:
    path = folder / "text.txt"
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, words)
    path.write_text(" ".join(f"w{i}" for i in drawn), encoding="utf-8")
    return path


def test_a_checkpoint_on_disk_is_calibrated_on_text_files(tmp_path: Path) -> None:
    source = saved(built("qwen2"), tmp_path / "model")
    settings = CalibrationSettings(tokens=160, sequence_tokens=32)
    out = tmp_path / "stats"
    stats = calibrate_checkpoint(source, [text_file(tmp_path)], out, settings)
    assert (stats.layers, stats.experts) == (LAYERS, EXPERTS)
    assert stats.index["tokens"] == 160
    assert int(stats.routed_tokens(0).sum()) == 2 * 160
    stats.require(layers=LAYERS, experts=EXPERTS, hidden=HIDDEN, intermediate=INNER)
    with pytest.raises(CalibrationError, match="experts is 5, the model has 6"):
        stats.require(layers=LAYERS, experts=6, hidden=HIDDEN, intermediate=INNER)


def dense_model() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def interleaved_model() -> Any:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_local_experts=4,
        )
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [(dense_model, "not a mixture of experts"), (interleaved_model, "has_bias is True")],
)
def test_models_of_another_form_are_refused(build: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        find_experts(build())


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="activation 'relu'"):
        find_experts(qwen2(hidden_act="relu"))


def test_bad_input_is_one_line_that_names_it(tmp_path: Path) -> None:
    source, text = saved(built("qwen2"), tmp_path / "model"), text_file(tmp_path, 30)
    settings = CalibrationSettings(tokens=64, sequence_tokens=64)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"abc\xff")
    for call, message in (
        (lambda: calibrate_checkpoint(source, [text], tmp_path / "o", settings), "no text fills"),
        (lambda: calibrate_checkpoint(source, [tmp_path / "x"], tmp_path / "o"), "No such file"),
        (lambda: calibrate_checkpoint(source, [binary], tmp_path / "o"), "not UTF-8"),
        (lambda: calibrate_checkpoint(tmp_path, [text], tmp_path / "o"), "no config.json"),
        (
            lambda: calibrate_checkpoint(source, [text], tmp_path / "o", dtype="int8"),
            "found 'int8'",
        ),
        (lambda: CalibrationSettings(tokens=4, sequence_tokens=8), "at least sequence_tokens"),
        (lambda: CalibrationSettings(sequence_tokens=1), "sequence_tokens must be >= 2"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


def test_damaged_statistics_are_refused(tmp_path: Path) -> None:
    calibrate_model(
        built("qwen2"), sequences(), tmp_path, CalibrationSettings(tokens=120, sequence_tokens=20)
    )
    path = tmp_path / layer_file(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    stats = CalibrationStats.open(tmp_path)
    assert stats.scale(0) > 0.0
    with pytest.raises(CalibrationError, match=r"layer_001.*checksum"):
        stats.scale(1)
    path.unlink()
    with pytest.raises(CalibrationError, match=r"layer_001.*No such file"):
        CalibrationStats.open(tmp_path).scale(1)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | {"format_version": 9}))
    with pytest.raises(CalibrationError, match="format_version 9, must be 1"):
        CalibrationStats.open(tmp_path)
