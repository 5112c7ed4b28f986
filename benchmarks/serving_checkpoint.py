"""The checkpoint of ``serving_throughput.py``: a random Qwen2-MoE of 170 M parameters; its GGUF.

    python benchmarks/serving_checkpoint.py CKPT
    python benchmarks/serving_checkpoint.py CKPT --gguf moe-q8_0.gguf --type q8_0

The first writes it with transformers (seed 0, float32, a byte-level tokenizer); the second puts the
same weights into llama.cpp's container, expert matrices and all others in the type asked for,
routers and norms in float32.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from safetensors.numpy import load_file

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_checkpoint(folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=2048,
        moe_intermediate_size=704,
        shared_expert_intermediate_size=1408,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog "], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    writer = gguf.GGUFWriter(path, "qwen2moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    _add_tokenizer(writer, folder, config["vocab_size"])

    def add(name: str, matrix: Any, *, keep_float: bool = False) -> None:
        if kind == "f32" or keep_float or matrix.ndim == 1:
            writer.add_tensor(name, matrix.astype(np.float32))
        else:
            packed = gguf.quants.quantize(matrix, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", weights["model.embed_tokens.weight"])
    add("output_norm.weight", weights["model.norm.weight"])
    add("output.weight", weights["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        block, place = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{block}.attn_norm.weight", weights[f"{place}.input_layernorm.weight"])
        add(f"{block}.ffn_norm.weight", weights[f"{place}.post_attention_layernorm.weight"])
        for part in "qkv":
            for what in ("weight", "bias"):
                ours = weights[f"{place}.self_attn.{part}_proj.{what}"]
                add(f"{block}.attn_{part}.{what}", ours)
        add(f"{block}.attn_output.weight", weights[f"{place}.self_attn.o_proj.weight"])
        mlp = f"{place}.mlp"
        add(f"{block}.ffn_gate_inp.weight", weights[f"{mlp}.gate.weight"], keep_float=True)
        for part in ("gate", "up", "down"):
            experts = [
                weights[f"{mlp}.experts.{expert}.{part}_proj.weight"]
                for expert in range(config["num_experts"])
            ]
            add(f"{block}.ffn_{part}_exps.weight", np.stack(experts))
            add(
                f"{block}.ffn_{part}_shexp.weight",
                weights[f"{mlp}.shared_expert.{part}_proj.weight"],
            )
        add(f"{block}.ffn_gate_inp_shexp.weight", weights[f"{mlp}.shared_expert_gate.weight"][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    token_by_id = {i: token for token, i in (tokenizer["model"]["vocab"] | special).items()}
    tokens = [token_by_id.get(i, f"[PAD{i}]") for i in range(vocabulary)]
    kinds = [
        TokenType.CONTROL
        if token in special
        else TokenType.NORMAL
        if i in token_by_id
        else TokenType.UNUSED
        for i, token in enumerate(tokens)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gguf", type=Path, help="write this from the checkpoint")
    parser.add_argument("--type", default="f32", choices=["f32", "q8_0"])
    a = parser.parse_args()
    if a.gguf is None:
        write_checkpoint(a.checkpoint)
    else:
        write_gguf(a.checkpoint, a.gguf, a.type)


if __name__ == "__main__":
    main()
