"""A checkpoint as calibration needs it: whole, finite, with a tokenizer, and able to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from runtime.calibration_stats import CalibrationError
from runtime.checkpoint_required import require_tensors
from runtime.checkpoint_scan import scan_weights
from runtime.checkpoint_source import CheckpointSource
from runtime.checkpoint_tensors import file_sha256

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


def open_source(folder: Path) -> CheckpointSource:
    """Open a checkpoint; headers and names of all tensors are checked.

    Raises:
        CalibrationError: If it has no configuration or no tokenizer.
        SourceError: If it is not understood or a tensor is missing.
    """
    if not (folder / "config.json").is_file():
        raise CalibrationError(f"{folder}: no config.json")
    source = CheckpointSource.open(folder)
    require_tensors(folder, source.shape, source.shards)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CalibrationError(
            f"{folder}: the tokenizer is missing; need one of {', '.join(TOKENIZER_FILES)}"
        )
    return source


def model_identity(source: CheckpointSource, on_read: Callable[[int, int], None]) -> dict[str, str]:
    """What tells a model from any other, wherever it lies; reads all weights.

    Args:
        source: The checkpoint.
        on_read: Told bytes read and bytes to read.

    Raises:
        SourceError: If a weight is not finite; names the tensor.
    """
    total, done = source.expert_bytes + source.other_bytes, 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_read(done, total)

    digest = scan_weights(source, experts_in_float16=False, on_bytes=advance)
    config = file_sha256(source.folder / "config.json")
    return {"config_sha256": config, "weights_sha256": digest}


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        CalibrationError: If it cannot be loaded.
    """
    import transformers

    try:
        with silent_transformers():
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers package raises plain Exception for bad files
        raise CalibrationError(f"{folder}: tokenizer: {_one_line(error)}") from error


def load_model(folder: Path, dtype: str) -> Any:
    """The checkpoint's model, its experts in plain loops; it has run a few tokens.

    Args:
        folder: The checkpoint.
        dtype: ``float32`` or ``bfloat16``.

    Raises:
        CalibrationError: If it cannot be loaded, or not be run.
    """
    import transformers

    try:
        with silent_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), local_files_only=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CalibrationError(f"{folder}: {_one_line(error)}") from error
    model.set_experts_implementation("eager")
    try:
        with torch.inference_mode():
            model.train(False)(input_ids=torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise CalibrationError(
            f"{folder / 'config.json'}: a model of this configuration does not run:"
            f" {_one_line(error)}"
        ) from error
    return model


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Neither bars nor warnings of transformers inside."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
