"""Published models by name: their configurations, where those come from, and their shapes."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from models.hf_config import HfConfigError, read_hf_config
from models.llm_shape import LlmShape

PAGEDWEIGHT_MODELS = ("Qwen1.5-MoE-A2.7B", "Mixtral-8x7B", "Gemma-4-26B-A4B")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """One published model.

    Attributes:
        name: What reports call it.
        source: Where the configuration comes from.
        published: Sizes its makers state, and where.
        config: The configuration, as a Hugging Face ``config.json`` has it.
    """

    name: str
    source: str
    published: str
    config: Mapping[str, Any]

    def shape(self) -> LlmShape:
        """Its shape."""
        return read_hf_config(self.config, name=self.name, where=f"{self.name}: config")


@functools.cache
def catalog() -> Mapping[str, CatalogEntry]:
    """Name -> model, by name."""
    folder = resources.files("models") / "llms"
    entries = []
    for file in folder.iterdir():
        if file.name.endswith(".json"):
            table = json.loads(file.read_bytes())
            entries.append(
                CatalogEntry(
                    name=table["name"],
                    source=table["source"],
                    published=table["published"],
                    config=table["config"],
                )
            )
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name.lower())}


def find_llm(name: str) -> CatalogEntry:
    """The catalog's model of that name, in any case.

    Raises:
        HfConfigError: If there is none; the message lists all.
    """
    by_lower = {known.lower(): entry for known, entry in catalog().items()}
    if found := by_lower.get(name.lower()):
        return found
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    raise HfConfigError(
        f"{name}: is no model of the catalog and no file; known: {', '.join(catalog())}"
        + (f" (did you mean {by_lower[close[0]].name}?)" if close else "")
    )


def load_llm(name_or_path: str | Path) -> LlmShape:
    """The shape of a catalog's model, or of a ``config.json`` or a folder with one.

    A name of the catalog comes first; ``./NAME`` is always a path.

    Raises:
        HfConfigError: If it is neither, or the file cannot be used.
    """
    text = str(name_or_path)
    if text.lower() in {known.lower() for known in catalog()}:
        return find_llm(text).shape()
    path = Path(name_or_path)
    if path.exists() or path.suffix == ".json" or len(path.parts) > 1:
        return read_hf_config(path)
    return find_llm(text).shape()
