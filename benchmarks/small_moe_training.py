"""Train a small Qwen2-MoE language model on offline text of eight domains.

    python benchmarks/small_moe_training.py [--cpu-seconds 900] [--out DIR]

4 layers, 16 experts (top 2), hidden and intermediate 256, 14.6 M parameters, 86 % in experts.
The budget is in process CPU seconds on one thread, so that other load does not change it; the
learning rate follows the budget. Written: a checkpoint in Hugging Face form (safetensors) with
its tokenizer, and ``training.json`` (settings, loss curve, held-out loss by domain), by default
under ``$XDG_CACHE_HOME/serving-twin/small-moe``. Nothing is trained where that is already there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from small_moe_text import CACHE, Domain, read_domains
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DEFAULT_OUT = CACHE / "small-moe"
SEQUENCE_TOKENS = 256
BOS, EOS = 1, 2


def train_tokenizer(texts: list[str], vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            show_progress=False,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def token_ids(tokenizer: Any, documents: tuple[str, ...]) -> torch.Tensor:
    """All documents of one domain in one row, each between BOS and EOS."""
    rows = tokenizer.backend_tokenizer.encode_batch(list(documents))
    return torch.tensor([t for row in rows for t in (BOS, *row.ids, EOS)])


def windows(ids: torch.Tensor, limit: int) -> torch.Tensor:
    """At most ``limit`` windows of SEQUENCE_TOKENS, spread evenly over the row."""
    count = len(ids) // SEQUENCE_TOKENS
    all_windows = ids[: count * SEQUENCE_TOKENS].view(count, SEQUENCE_TOKENS)
    keep = torch.linspace(0, count - 1, min(limit, count)).round().long()
    return all_windows[keep]


@torch.inference_mode()
def mean_loss(model: Any, inputs: torch.Tensor) -> float:
    total = 0.0
    for start in range(0, len(inputs), 8):
        x = inputs[start : start + 8]
        total += model(input_ids=x, labels=x).loss.item() * len(x)
    return total / len(inputs)


def build_model(a: argparse.Namespace) -> Any:
    config = transformers.Qwen2MoeConfig(
        vocab_size=a.vocabulary,
        hidden_size=a.hidden,
        num_hidden_layers=a.layers,
        num_attention_heads=a.hidden // 32,
        num_key_value_heads=a.hidden // 64,
        intermediate_size=4 * a.intermediate,
        moe_intermediate_size=a.intermediate,
        shared_expert_intermediate_size=a.intermediate // 2,
        num_experts=a.experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = transformers.Qwen2MoeForCausalLM(config)
    model.set_experts_implementation("eager")
    return model


def balance_loss(router_logits: tuple[torch.Tensor, ...], experts: int) -> torch.Tensor:
    """Mean over layers of E sum_e f_e P_e (Switch Transformer, arXiv 2101.03961).

    f: share of routed tokens, P: mean router probability. transformers' own loss pools the layers,
    so that one layer may leave most experts unused if another uses them.
    """
    total = torch.zeros(())
    for logits in router_logits:
        probability = torch.softmax(logits.float(), dim=-1)
        chosen = probability.topk(2, dim=-1).indices
        share = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        total = total + experts * (share * probability.mean(0)).sum()
    return total / len(router_logits)


def train(model: Any, rows: list[torch.Tensor], a: argparse.Namespace) -> list[dict[str, float]]:
    """AdamW with warm-up and cosine decay over the CPU budget; every domain equally often."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    generator = torch.Generator().manual_seed(a.seed)
    model.train()
    start_cpu, start_wall = time.process_time(), time.perf_counter()
    step, seen, average, curve = 0, 0, math.nan, []
    while (used := time.process_time() - start_cpu) < a.cpu_seconds:
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * used / a.cpu_seconds))
        for group in optimizer.param_groups:
            group["lr"] = a.learning_rate * min(1.0, (step + 1) / 50) * decay
        chosen = torch.randint(0, len(rows), (a.batch,), generator=generator).tolist()
        inputs = []
        for domain in chosen:
            row = rows[domain]
            at = int(torch.randint(0, len(row) - SEQUENCE_TOKENS, (1,), generator=generator))
            inputs.append(row[at : at + SEQUENCE_TOKENS])
        x = torch.stack(inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=a.bf16):
            output = model(input_ids=x, labels=x, output_router_logits=True)
        loss = output.loss.detach()
        balance = balance_loss(output.router_logits, a.experts)
        (output.loss + a.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + x.numel()
        average = loss.item() if math.isnan(average) else 0.95 * average + 0.05 * loss.item()
        if step % 25 == 0:
            wall = time.perf_counter() - start_wall
            print(
                f"step {step} tokens {seen} loss {average:.3f} cpu {used:.0f} s wall {wall:.0f} s "
                f"({seen / max(used, 1e-9):.0f} tokens per cpu s)",
                flush=True,
            )
            curve.append({"step": step, "tokens": seen, "loss": average, "cpu_s": used})
    return curve


def settings(a: argparse.Namespace, domains: tuple[Domain, ...]) -> dict[str, Any]:
    sizes = {
        d.name: [sum(len(t.encode()) for t in s) for s in (d.train, d.held_out)] for d in domains
    }
    kept = {key: value for key, value in vars(a).items() if key not in ("out", "again")}
    return {"arguments": kept, "domain_bytes_train_and_held_out": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--again", action="store_true", help="train although there is a checkpoint")
    parser.add_argument("--cpu-seconds", type=float, default=900)
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    a = parser.parse_args()
    record = a.out / "training.json"
    if record.exists() and not a.again:
        print(f"{record} exists; nothing to do (--again trains anew)")
        return
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    domains = read_domains()
    tokenizer = train_tokenizer([text for d in domains for text in d.train], a.vocabulary)
    rows = [token_ids(tokenizer, d.train) for d in domains]
    for domain, row in zip(domains, rows, strict=True):
        print(f"{domain.name}: {len(domain.train)} documents, {len(row)} tokens to train on")
    model = build_model(a)
    parameters = sum(p.numel() for p in model.parameters())
    in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    print(
        f"{parameters / 1e6:.2f} M parameters, {in_experts / parameters:.1%} in experts", flush=True
    )
    curve = train(model, rows, a)
    model.eval()
    held_out = {
        d.name: mean_loss(model, windows(token_ids(tokenizer, d.held_out), 16)) for d in domains
    }
    model.save_pretrained(a.out)
    tokenizer.save_pretrained(a.out)
    summary = settings(a, domains) | {
        "parameters": parameters,
        "expert_share": in_experts / parameters,
        "held_out_nats_per_token": held_out,
        "curve": curve,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    record.write_text(json.dumps(summary, indent=1))
    print(json.dumps(held_out, indent=1))


if __name__ == "__main__":
    main()
