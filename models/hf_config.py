"""The shape of a model from a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import hf_families, hf_gemma4
from models.hf_fields import ConfigFields, HfConfigError
from models.llm_shape import LlmShape

__all__ = ["FAMILIES", "HfConfigError", "read_hf_config"]

FAMILIES: Mapping[str, hf_families.FamilyReader] = {
    "deepseek_v3": hf_families.read_deepseek_v3,
    "gemma4": hf_gemma4.read_gemma4,
    "gemma4_text": hf_gemma4.read_gemma4_text,
    "llama": hf_families.read_llama,
    "mistral": hf_families.read_mistral,
    "mixtral": hf_families.read_mixtral,
    "olmoe": hf_families.read_olmoe,
    "qwen2": hf_families.read_qwen2,
    "qwen2_moe": hf_families.read_qwen2_moe,
    "qwen3": hf_families.read_qwen3,
    "qwen3_moe": hf_families.read_qwen3_moe,
}


def read_hf_config(
    source: str | Path | Mapping[str, Any], *, name: str | None = None, where: str | None = None
) -> LlmShape:
    """The shape of a model from its configuration.

    Sizes that tell models apart must be given (layers, widths, heads, experts, vocabulary); all
    else has the default of the transformers configuration class. Unknown fields are left alone.

    Args:
        source: A ``config.json``, a folder that holds one, or the parsed table.
        name: What reports call the model; without it the folder's or the file's name.
        where: What messages call a table; a file is called by its path.

    Raises:
        HfConfigError: If the file cannot be read, is no JSON object, has an unknown ``model_type``,
            or if a field is missing, of the wrong type or contradicts another.
    """
    if isinstance(source, Mapping):
        table, label = source, where or "configuration"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        table, label = _read_json(path), str(path)
        name = name or (path.resolve().parent.name if path.name == "config.json" else path.stem)
    fields = ConfigFields(table, label)
    family = FAMILIES[_model_type(fields)]
    if family is not hf_gemma4.read_gemma4_text and fields.has("per_layer_config"):
        raise fields.error("per_layer_config", "is understood for model_type 'gemma4_text' only")
    shape = family(fields, name or fields.text("_name_or_path") or fields.text("model_type"))
    if fields.has("quantization_config"):
        note = "the checkpoint is stored quantized; sizes here are those of the weights in 16 bits"
        shape = dataclasses.replace(shape, notes=(*shape.notes, note))
    return shape


def _model_type(fields: ConfigFields) -> str:
    found = fields.text("model_type")
    if found in FAMILIES:
        return found
    close = difflib.get_close_matches(found, FAMILIES, n=1)
    raise fields.error(
        "model_type",
        f"must be one of {', '.join(map(repr, FAMILIES))}; "
        + (f"found {found!r}" if found else "missing")
        + (f" (did you mean {close[0]!r}?)" if close else ""),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise HfConfigError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise HfConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:  # not JSON, not text, or a number beyond all sense
        raise HfConfigError(f"{path}: is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise HfConfigError(f"{path}: must hold a JSON object, found {type(table).__name__}")
    return table
