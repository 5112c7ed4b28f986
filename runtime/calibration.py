"""Calibrate a checkpoint on text: what every expert block's quantization damage depends on.

Per layer and expert: second moments of the inputs of both matrices, row weights, routing masses;
per layer: how much the loss cares. Layers are taken in groups that fit the memory allowed, one
pass over the text for each group; a layer whose file is already there is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.streams import stream
from runtime.calibrate_folder import (
    STAGING,
    drop_empty_staging,
    is_complete,
    move_up,
    prepare,
    usable_state,
)
from runtime.calibrate_source import load_model, load_tokenizer, model_identity, open_source
from runtime.calibration_experts import ExpertsLayer, UnsupportedModelError, find_experts
from runtime.calibration_pass import Labels, accumulate
from runtime.calibration_stats import (
    INDEX,
    MODULES,
    CalibrationError,
    CalibrationStats,
    layer_file,
    layer_fingerprint,
    write_index,
    write_layer,
)
from runtime.calibration_sums import LayerSums, Weighting, moment_bytes
from runtime.quantize_folder import Existing, OutputError, made_and_locked, require_outside
from runtime.quantize_provenance import differences

__all__ = [
    "CalibrationError",
    "CalibrationSettings",
    "UnsupportedModelError",
    "calibrate_checkpoint",
    "calibrate_model",
    "calibration_sequences",
]

MAX_SEED = (1 << 63) - 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """How to calibrate.

    Attributes:
        tokens: Tokens of text to run, in whole sequences.
        sequence_tokens: Tokens of a sequence.
        seed: Chooses sequences and drawn labels.
        weighting: ``gradient`` or ``gate``, see ``LayerSums``.
        layer_gradients: With ``gate``: layer scale from gradients instead of 1/E||y||^2.
        labels: Next tokens of the loss: the text's, or drawn from the model.
        max_full_columns: Blocks with more columns keep the diagonal of their moment only.
        memory_bytes: Memory for accumulators; at least one layer is taken at a time.
        batch_sequences: Sequences run at a time.
    """

    tokens: int = 65_536
    sequence_tokens: int = 512
    seed: int = 0
    weighting: Weighting = "gradient"
    layer_gradients: bool = True
    labels: Labels = "text"
    max_full_columns: int = 8192
    memory_bytes: int = 8 << 30
    batch_sequences: int = 4

    def __post_init__(self) -> None:
        for name in ("sequence_tokens", "batch_sequences", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, found {getattr(self, name)}")
        if self.sequence_tokens < 2:
            raise ValueError(f"sequence_tokens must be >= 2, found {self.sequence_tokens}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be within 0..{MAX_SEED}, found {self.seed}")
        if self.tokens < self.sequence_tokens:
            raise ValueError(
                f"tokens must be at least sequence_tokens = {self.sequence_tokens}, "
                f"found {self.tokens}"
            )


def calibration_sequences(
    tokenizer: Any, texts: Sequence[str], settings: CalibrationSettings
) -> torch.Tensor:
    """[n, sequence_tokens] windows of the texts, drawn without repetition.

    Raises:
        CalibrationError: If the texts do not fill one sequence.
    """
    length = settings.sequence_tokens
    windows = []
    tokens = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        tokens += len(ids)
        windows += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if not windows:
        raise CalibrationError(
            f"no text fills one sequence of {length} tokens (sequence_tokens); all texts together"
            f" have {tokens}"
        )
    wanted = min(settings.tokens // length, len(windows))
    chosen = stream(settings.seed, "calibration sequences").permutation(len(windows))[:wanted]
    return torch.tensor([windows[i] for i in sorted(chosen)])


def accumulator_bytes(experts: ExpertsLayer, max_full_columns: int) -> int:
    """Memory of one layer's accumulators."""
    blocks = (experts.hidden, experts.intermediate)
    return experts.experts * sum(moment_bytes(k, k <= max_full_columns) for k in blocks)


def layer_groups(
    layers: Sequence[ExpertsLayer], settings: CalibrationSettings
) -> list[list[ExpertsLayer]]:
    """Layers in order, cut so that each group's accumulators fit ``memory_bytes``."""
    groups: list[list[ExpertsLayer]] = []
    used = 0
    for experts in layers:
        need = accumulator_bytes(experts, settings.max_full_columns)
        if not groups or used + need > settings.memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(experts)
        used += need
    return groups


def layer_arrays(sums: LayerSums) -> dict[str, NDArray[Any]]:
    """What is stored of one layer; moments and row weights as float32."""
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.array([sums.tokens], dtype=np.int64),
        "routed_tokens": sums.routed_tokens,
        "gate_sum": sums.gate_sum,
        "squared_gate_sum": sums.squared_gate_sum,
        "mass": sums.mass(),
        "scale": np.array([sums.scale()]),
    }
    for module, name in enumerate(MODULES):
        arrays[f"{name}.moment"] = sums.moment(module).astype(np.float32)
        arrays[f"{name}.row_weight"] = sums.row_weight(module).astype(np.float32)
    return arrays


def calibrate_model(
    model: Any,
    sequences: torch.Tensor,
    out: Path,
    settings: CalibrationSettings,
    *,
    provenance: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> CalibrationStats:
    """Calibrate a loaded model and write the statistics to ``out``.

    Args:
        model: A transformers causal language model.
        sequences: [n, T] token ids.
        out: Directory; made if absent. Layers of the same calibration that are there are kept.
        settings: How.
        provenance: What identifies the model and the text; part of the mark of a layer file.
        progress: Told tokens done and tokens to do, over all passes.

    Raises:
        UnsupportedModelError: If the model's experts are of an unknown form.
        CalibrationError: If a statistic is not finite; its layer is not written.
        OSError: If the disk refuses.
    """
    layers = find_experts(model)
    fingerprint = _fingerprint(sequences, settings, provenance or {})
    out.mkdir(parents=True, exist_ok=True)
    (out / INDEX).unlink(missing_ok=True)
    missing = [x for x in layers if layer_fingerprint(out / layer_file(x.layer)) != fingerprint]
    groups = layer_groups(missing, settings)
    total, done = sequences.numel() * len(groups), 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    for group in groups:
        sums = accumulate(
            model,
            group,
            sequences,
            weighting=settings.weighting,
            layer_gradients=settings.layer_gradients,
            labels=settings.labels,
            max_full_columns=settings.max_full_columns,
            batch_sequences=settings.batch_sequences,
            seed=settings.seed,
            progress=advance,
        )
        for experts, layer_sums in zip(group, sums, strict=True):
            write_layer(out, experts.layer, layer_arrays(layer_sums), fingerprint)
    first = layers[0]
    content = {
        "experts": first.experts,
        "hidden": first.hidden,
        "intermediate": first.intermediate,
        "decoder_layers": [x.decoder_layer for x in layers],
        "tokens": sequences.numel(),
        "settings": asdict(settings),
        "provenance": provenance or {},
        "fingerprint": fingerprint,
    }
    write_index(out, content, len(layers))
    return CalibrationStats.open(out)


def _fingerprint(
    sequences: torch.Tensor, settings: CalibrationSettings, provenance: dict[str, Any]
) -> str:
    """What must be the same for a layer's numbers to be the same."""
    identity = {"provenance": provenance, "settings": _identity(settings)}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    digest.update(sequences.numpy().tobytes())
    return digest.hexdigest()


def _identity(settings: CalibrationSettings) -> dict[str, Any]:
    """Settings that change the numbers; how many layers a pass takes does not."""
    return {key: value for key, value in asdict(settings).items() if key != "memory_bytes"}


def calibrate_checkpoint(
    source: Path,
    text_files: Sequence[Path],
    out: Path,
    settings: CalibrationSettings | None = None,
    *,
    dtype: str = "float32",
    existing: Existing = "refuse",
    progress: Progress = lambda done, total: None,
    on_read: Progress = lambda done, total: None,
) -> CalibrationStats:
    """Calibrate a checkpoint directory in Hugging Face form (with its tokenizer) on text files.

    Memory: the model in ``dtype``, plus ``settings.memory_bytes`` of accumulators (at least one
    layer's: E (H^2 + I^2) 8 bytes), plus half as much again while a layer is written.

    Args:
        source: The checkpoint.
        text_files: UTF-8 text.
        out: Directory for the statistics.
        settings: How; defaults if None.
        dtype: float32 or bfloat16, in which the model runs.
        existing: What to do about earlier statistics in ``out``: refuse; resume, keeping the
            layers that are there (finished statistics of the same run are left as they are); or
            overwrite. Finished ones are kept until those that replace them are complete.
        progress: Told tokens done and tokens to do.
        on_read: Told bytes read and bytes to read while the weights are checked.

    Raises:
        SourceError: If the checkpoint is not whole, or a weight is not finite.
        CalibrationError: If the source cannot be loaded or run, a text cannot be read, or is too
            short, or a statistic is not finite.
        UnsupportedModelError: If the model's experts are of an unknown form.
        OutputError: If ``out`` holds something else, or is in use.
        OSError: If the disk refuses.
    """
    settings = settings or CalibrationSettings()
    if dtype not in ("float32", "bfloat16"):
        raise CalibrationError(f"dtype must be float32 or bfloat16, found {dtype!r}")
    texts = [_text(path) for path in text_files]
    checkpoint = open_source(source)
    require_outside(out, source)
    usable_state(out, existing)
    sequences = calibration_sequences(load_tokenizer(source), texts, settings)
    largest = int(sequences.max())
    if largest >= checkpoint.shape.vocab_size:
        raise CalibrationError(
            f"{source}: the tokenizer gives token {largest}, the model knows"
            f" {checkpoint.shape.vocab_size}"
        )
    provenance = {
        **model_identity(checkpoint, on_read),
        "texts": [
            [path.name, hashlib.sha256(text.encode()).hexdigest()]
            for path, text in zip(text_files, texts, strict=True)
        ],
        "dtype": dtype,
    }
    fingerprint = _fingerprint(sequences, settings, provenance)
    with made_and_locked(out):
        state = usable_state(out, existing)
        if existing == "resume" and is_complete(out):
            move_up(out)  # was cut off in doing so
            state = "finished"
        if existing == "resume" and state == "finished" and not (out / STAGING).exists():
            return _same_statistics(out, fingerprint, settings, provenance)
        model = load_model(source, dtype)
        find_experts(model)
        folder = prepare(out, state, existing, fingerprint)
        try:
            stats = calibrate_model(
                model, sequences, folder, settings, provenance=provenance, progress=progress
            )
        except BaseException:
            drop_empty_staging(out)
            raise
        if folder != out:
            move_up(out)
            stats = CalibrationStats.open(out)
        return stats


def _same_statistics(
    out: Path, fingerprint: str, settings: CalibrationSettings, provenance: dict[str, Any]
) -> CalibrationStats:
    """Finished statistics, if they are those that are asked for."""
    stats = CalibrationStats.open(out)
    if stats.index.get("fingerprint") == fingerprint:
        return stats
    found = {key: dict(stats.index.get(key, {})) for key in ("settings", "provenance")}
    found["settings"].pop("memory_bytes", None)
    wanted = {"settings": _identity(settings), "provenance": provenance}
    different = differences(found, wanted) or ["tokenizer"]
    raise OutputError(
        f"{out}: finished, with another {', '.join(different)}; replace it with --overwrite"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 (byte {error.start})") from None
