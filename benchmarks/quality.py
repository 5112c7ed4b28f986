"""Quality at equal bytes: perplexity of a real small MoE under every planner and signal.

    python benchmarks/small_moe_training.py          # once, about 15 CPU minutes
    python benchmarks/quality.py [--sequences 24] [--calibration-sequences 48]

The model of ``small_moe_training`` is calibrated on training text, its experts quantized to nested
planes, and judged on held-out text of all eight kinds: at full precision, at uniform 2..8 bits, and
at equal bytes for the hull planner, greedy, uniform, and every signal left out. Increases of
perplexity are over full precision; errors are paired over sequences; ratios have paired bootstrap
95 % intervals. Two accountings: ``planes`` (codes alone: "3.0 bits" is three planes everywhere) and
``resident`` (codes and the fp16 tables of 2..q that a drop leaves in place).

Written: ``results/quality.json`` and ``results/quality.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from quality_model import BITS, Increase, MixedPrecisionModel, sequence_losses
from quality_online import Calibrated, corrections, fit_on_prompts, observed_prompts, per_kind
from quality_plans import measure, measure_uniform, planned
from small_moe_text import read_domains
from small_moe_training import DEFAULT_OUT, SEQUENCE_TOKENS, token_ids, windows

from runtime.calibration import CalibrationSettings, calibrate_model
from runtime.calibration_damage import DamageSignals, damage_table, squared_error_table
from runtime.calibration_stats import CalibrationStats

RESULTS = Path(__file__).parent / "results"
AVERAGES = (2.5, 3.0, 3.5, 4.0)
ONLINE_AVERAGES = (3.0, 3.5)
MISMATCHED = ("wikipedia", "perl")
PROMPT_WINDOWS = 12


class Report:
    """Rows printed as they come and kept in one file; rows of earlier parts stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, table: str, row: str, values: dict[str, Any]) -> None:
        self.content.setdefault(table, {})[row] = values
        shown = "  ".join(f"{k} {v:.5g}" for k, v in values.items() if isinstance(v, float))
        print(f"[{table}] {row}: {shown}", flush=True)
        self.path.write_text(json.dumps(self.content, indent=1))


def compared(found: Increase, uniform: Increase) -> dict[str, Any]:
    ratio, low, high = found.ratio_to(uniform)
    return found.record() | {"to_uniform": ratio, "to_uniform_95": [low, high]}


class Study:
    """The model, its texts and its calibrations."""

    def __init__(self, a: argparse.Namespace, report: Report) -> None:
        self.report, self.arguments = report, a
        self.cache = a.model.parent / f"{a.model.name}-calibration"
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
        self.model.set_experts_implementation("eager")
        self.model.eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(a.model)
        self.train, self.prompts, self.judged = {}, {}, {}
        for domain in read_domains():
            held = token_ids(tokenizer, domain.held_out)
            rows = windows(held, a.sequences + PROMPT_WINDOWS)
            chosen = np.zeros(len(rows), dtype=bool)
            chosen[np.linspace(0, len(rows) - 1, PROMPT_WINDOWS).round().astype(int)] = True
            self.prompts[domain.name] = list(rows[torch.from_numpy(chosen)])
            self.judged[domain.name] = rows[torch.from_numpy(~chosen)]
            trained = token_ids(tokenizer, domain.train)
            self.train[domain.name] = windows(trained, a.calibration_sequences)
        self.text = torch.cat(list(self.judged.values()))
        self.full = sequence_losses(self.model, self.text)
        first = self.calibrate("gate", self.all_train(), weighting="gate")
        experts = first.experts

        def moment(block: int) -> np.ndarray:
            place = block // 2 // experts, block // 2 % experts, block % 2
            return first.input_second_moment(*place)

        self.mixed = MixedPrecisionModel(
            self.model,
            lambda block: np.diagonal(moment(block)).copy(),
            moment=None if a.plain_centroids else moment,
            fitted=a.fitted_tables,
        )
        self.planes = self.mixed.bytes_table("planes")

    def all_train(self) -> torch.Tensor:
        return torch.cat(list(self.train.values()))

    def calibrate(self, name: str, text: torch.Tensor, **settings: Any) -> CalibrationStats:
        chosen = CalibrationSettings(
            tokens=text.numel(), sequence_tokens=SEQUENCE_TOKENS, **settings
        )
        identity = {"model": str(self.arguments.model), "curve": self.training_mark()}
        return calibrate_model(self.model, text, self.cache / name, chosen, provenance=identity)

    def training_mark(self) -> str:
        return (self.arguments.model / "training.json").read_text()[-400:]

    def table(self, stats: CalibrationStats, **signals: Any) -> np.ndarray:
        self.mixed.hold(16)
        return damage_table(
            stats,
            self.mixed.weights,
            self.mixed.reconstructions,
            signals=DamageSignals(**signals),
        )

    def full_losses(self) -> dict[str, np.ndarray]:
        parts = np.cumsum([len(x) for x in self.judged.values()])[:-1]
        return dict(zip(self.judged, np.split(self.full, parts), strict=True))

    def uniform_widths(self, damage: np.ndarray) -> None:
        """Uniform 2..8 bits, with the increase that half the summed damage predicts."""
        for level, bits in enumerate(BITS):
            found = measure(self.mixed, bits, self.text, self.full)
            predicted = 0.5 * float(damage[:, level].sum())
            self.report.add("uniform", str(bits), found.record() | {"predicted_nats": predicted})

    def equal_bytes(self, damages: dict[str, np.ndarray], averages: tuple[float, ...]) -> None:
        """Every planner and every set of offline signals at the same bytes."""
        for accounting in ("planes", "resident"):
            table = self.mixed.bytes_table(accounting)
            for average in averages:
                name = f"{accounting} {average}"
                uniform, each = measure_uniform(self.mixed, table, average, self.text, self.full)
                more = {"mixtures": each}
                self.report.add(name, "uniform", uniform.record() | more)
                rows = (
                    damages if accounting == "planes" else {"all signals": damages["all signals"]}
                )
                for signals, damage in rows.items():
                    bits = planned(table, damage, average)
                    found = measure(self.mixed, bits, self.text, self.full)
                    counts = {"blocks_at_2_to_8": np.bincount(bits, minlength=9)[2:].tolist()}
                    self.report.add(name, f"hull, {signals}", compared(found, uniform) | counts)
                bits = planned(table, damages["all signals"], average, planner="greedy")
                found = measure(self.mixed, bits, self.text, self.full)
                self.report.add(name, "greedy, all signals", compared(found, uniform))

    def prompts_to_fit(self, names: tuple[str, ...], count: int) -> list[torch.Tensor]:
        """Training prompts of these kinds, 64 to 256 tokens long."""
        rng = np.random.default_rng(5)
        each = -(-count // len(names))
        rows = [row for name in names for row in self.train[name][:each]]
        return [row[: rng.integers(64, SEQUENCE_TOKENS + 1)] for row in rows]

    def online(self) -> None:
        """Plans for one kind of text at a time, with and without online signals."""
        full = self.full_losses()
        kinds = {name: (text, full[name]) for name, text in self.judged.items()}
        own = {
            name: self.table(self.calibrate(f"oracle-{name}", text))
            for name, text in self.judged.items()
        }
        seen: dict[str, Any] = {}
        for label, names in (("all kinds", tuple(self.train)), ("+".join(MISMATCHED), MISMATCHED)):
            text = torch.cat([self.train[name] for name in names])
            stats = self.calibrate(f"online-{label.replace(' ', '-')}", text)
            fitted = observed_prompts(self.mixed, stats, self.prompts_to_fit(names, 160))
            calibrated = Calibrated(stats, self.table(stats), *fit_on_prompts(fitted))
            r2 = calibrated.heads.leave_one_out_r2
            self.report.add(
                "prompt heads",
                label,
                {
                    "prompts": float(len(fitted.tokens)),
                    "median_r2": float(np.median(r2)),
                    "share_on": float(calibrated.heads.is_on.mean()),
                },
            )
            served = {n: kinds[n] for n in kinds if len(names) == len(kinds) or n not in names}
            for name in served:
                prompts = observed_prompts(self.mixed, stats, self.prompts[name])
                seen[name] = corrections(calibrated, prompts)
            for average in ONLINE_AVERAGES:
                table = f"served by kind, calibrated on {label}, planes {average}"
                bits = int(average)
                if average == bits:
                    losses, base = [], []
                    self.mixed.hold(bits)
                    for text, losses_full in served.values():
                        losses.append(sequence_losses(self.model, text))
                        base.append(losses_full)
                    uniform = Increase(np.concatenate(losses), np.concatenate(base))
                else:
                    whole = torch.cat([text for text, _ in served.values()])
                    base_all = np.concatenate([x for _, x in served.values()])
                    uniform, _ = measure_uniform(self.mixed, self.planes, average, whole, base_all)
                self.report.add(table, "uniform", uniform.record())
                for signals in next(iter(seen.values())):
                    found = per_kind(
                        self.mixed,
                        self.planes,
                        average,
                        served,
                        lambda n, s=signals, c=calibrated: (c.damage, seen[n][s]),
                    )
                    self.report.add(table, signals, compared(found, uniform))
                found = per_kind(self.mixed, self.planes, average, served, lambda n: (own[n], {}))
                self.report.add(
                    table, "oracle (calibrated on the judged text)", compared(found, uniform)
                )


def picture(report: Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    widths = sorted(int(x) for x in report.content["uniform"])
    increase = [report.content["uniform"][str(b)]["perplexity_increase"] for b in widths]
    averages = [float(a) for a in AVERAGES]

    def rows(kind: str) -> list[float]:
        return [report.content[f"planes {a}"][kind]["perplexity_increase"] for a in averages]

    points = sorted(
        {
            **dict(zip(averages, rows("uniform"), strict=True)),
            **dict(zip(widths, increase, strict=True)),
        }.items()
    )
    points = [p for p in points if p[0] <= 5]
    axes.plot(*zip(*points, strict=True), "o-", color="0.4", label="uniform")
    for kind, style in (
        ("hull, weight error", "v--"),
        ("hull, no routing mass", "s:"),
        ("hull, all signals", "D-"),
    ):
        axes.plot(averages, rows(kind), style, label=kind)
    axes.set_yscale("log")
    axes.set_xlabel("bits per expert weight (planes)")
    axes.set_ylabel("perplexity above full precision")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def offline(study: Study) -> None:
    """Uniform widths, planners and offline signals."""
    gradient = study.calibrate("gradient", study.all_train())
    fisher = study.calibrate("fisher", study.all_train(), labels="model")
    gate = study.calibrate("gate", study.all_train(), weighting="gate")
    output = study.calibrate("output", study.all_train(), weighting="gate", layer_gradients=False)
    mixed = study.mixed
    damages = {
        "all signals": study.table(gradient),
        "gradients of drawn labels": study.table(fisher),
        "tokens weighed by gate": study.table(gate),
        "tokens weighed by gate, no gradients": study.table(output),
        "diagonal moments": study.table(gradient, moment="diagonal"),
        "no row weights": study.table(gradient, row_weight=False),
        "no layer scale": study.table(gradient, layer_scale=False),
        "no routing mass": study.table(gradient, mass=False),
        "weight error": squared_error_table(mixed.num_blocks, mixed.weights, mixed.reconstructions),
    }
    study.uniform_widths(damages["all signals"])
    study.equal_bytes(damages, AVERAGES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--sequences", type=int, default=24, help="judged sequences of a kind")
    parser.add_argument("--calibration-sequences", type=int, default=48, help="of a kind")
    parser.add_argument(
        "--plain-centroids", action="store_true", help="tables without the gain of the exact rows"
    )
    parser.add_argument(
        "--fitted-tables", action="store_true", help="tables fitted to the outputs of each block"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "quality.json")
    parser.add_argument(
        "--parts", nargs="+", choices=("offline", "online"), default=["offline", "online"]
    )
    a = parser.parse_args()
    started = time.process_time()
    report = Report(a.out)
    study = Study(a, report)
    base = Increase(study.full, study.full)
    report.add(
        "model",
        "full precision",
        {
            "perplexity": base.perplexity,
            "tokens_judged": float(study.text.numel()),
            "tokens_of_calibration": float(study.all_train().numel()),
        },
    )
    if "offline" in a.parts:
        offline(study)
        picture(report, a.out.with_suffix(".png"))
    if "online" in a.parts:
        study.online()
    report.add("run", "cpu", {"cpu_seconds": time.process_time() - started})


if __name__ == "__main__":
    main()
