"""The tiny test model, as transformers and this program's own readers find it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from runtime.checkpoint_tensors import file_sha256
from runtime.demo_model_tiny import (
    EOS,
    FAMILIES,
    TinyFamily,
    TinyModelError,
    TinySizes,
    make_tiny_checkpoint,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_finds_every_tensor_and_computes_spread_logits(
    tmp_path: Path, family: TinyFamily
) -> None:
    folder = make_tiny_checkpoint(tmp_path / family, family)
    with contextlib.redirect_stderr(io.StringIO()):
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == family
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == EOS
    with torch.inference_mode():
        logits = model.eval()(torch.arange(30)[None] * 11 % 320).logits
    assert 0.1 < logits.std() < 10
    assert len(set(logits[0].argmax(-1).tolist())) > 5


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "olmoe"])
def test_our_own_reader_takes_it(
    tmp_path: Path, family: TinyFamily, run_command: Callable[..., Any]
) -> None:
    folder = make_tiny_checkpoint(tmp_path / family, family, dtype="bfloat16")
    done = run_command("quantize", folder, tmp_path / "quantized", "--threads", 1)
    assert done.returncode == 0, done.stderr


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path: Path) -> None:
    folders = [
        make_tiny_checkpoint(tmp_path / str(i), seed=seed) for i, seed in enumerate((5, 5, 6))
    ]
    weights = [file_sha256(folder / "model.safetensors") for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert len({file_sha256(folder / "tokenizer.json") for folder in folders}) == 1


def test_its_tokenizer_spells_any_text_and_knows_a_chat(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the quick brown fox, naïve 你好 🙂\n\t"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < TinySizes().vocabulary == len(tokenizer)
    chat = [{"role": "user", "content": "hi"}]
    written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert written == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(written).input_ids.count(EOS) == 1


def test_it_is_made_without_torch_transformers_and_network(tmp_path: Path) -> None:
    code = (
        "import socket, sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['gguf'] = None\n"
        "socket.socket = None\n"
        "from pathlib import Path; from runtime.demo_model_tiny import make_tiny_checkpoint\n"
        "make_tiny_checkpoint(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "tiny"], check=True)
    assert (tmp_path / "tiny" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocabulary": 100}, "vocabulary must be >= 259, found 100"),
        ({"layers": 0}, "layers must be >= 1, found 0"),
        ({"heads": 3, "kv_heads": 2}, "heads must be a multiple of kv_heads, found 3"),
        ({"experts": 2, "top_k": 3}, "top_k must be <= 2 experts, found 3"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(TinyModelError, match=message):
        TinySizes(**sizes)


def test_a_width_that_the_family_cannot_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TinyModelError, match="olmoe needs heads"):
        make_tiny_checkpoint(tmp_path / "x", "olmoe", sizes=TinySizes(head_dim=64))
    with pytest.raises(TinyModelError, match="family must be one of"):
        make_tiny_checkpoint(tmp_path / "x", "gpt")  # type: ignore[arg-type]


def test_the_command_prints_the_folder_and_keeps_what_is_there(
    tmp_path: Path, run_command: Callable[..., Any]
) -> None:
    done = run_command("demo-model", "--tiny", "--out", tmp_path / "tiny")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'tiny'}\n")
    assert "test model" in done.stderr
    again = run_command("demo-model", "--tiny", "--out", tmp_path / "tiny")
    assert again.returncode == 2
    assert again.stderr == (
        f"error: {tmp_path / 'tiny'}: holds something; remove it or choose another folder\n"
    )
    assert run_command("demo-model", "--tiny", "--noise", "0.1").returncode == 2
