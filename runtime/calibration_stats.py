"""Calibration statistics on disk: one safetensors file per layer and ``calibration.json``.

The index is written last, so a directory with an index is complete. Statistics are stored as
measured; what is read is made safe for experts that saw few tokens: they lean on their layer's
mean, and their moments on the diagonal, so no block ever has zero damage.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from models.quality import RIDGE, required_tokens, shrinkage, shrunk_moment
from runtime.checkpoint_tensors import named
from traces.whole_file import write_whole

FORMAT_VERSION = 1
INDEX = "calibration.json"
MODULES = ("gate_up", "down")
FloatArray = NDArray[np.float64]


class CalibrationError(ValueError):
    """Calibration files that cannot be used; says which and why."""


def layer_file(layer: int) -> str:
    """Name of one layer's file."""
    return f"layer_{layer:03d}.safetensors"


def write_layer(
    folder: Path, layer: int, arrays: Mapping[str, NDArray[Any]], fingerprint: str
) -> None:
    """Write one layer's arrays whole, marked with what they were measured on.

    Raises:
        CalibrationError: If a number is not finite; nothing is written.
        OSError: If the disk refuses.
    """
    _require_finite(str(folder / layer_file(layer)), arrays)
    content = save(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        metadata={"fingerprint": fingerprint},  # one entry: more come in no fixed order
    )
    with named(folder / layer_file(layer)):
        write_whole(folder / layer_file(layer), content)


def _require_finite(place: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if not finite.all():
            first = [int(i) for i in np.unravel_index(int(finite.argmin()), array.shape)]
            raise CalibrationError(f"{place}: {name} is not finite at {first}")


def layer_fingerprint(path: Path) -> str | None:
    """The mark of a layer file; None if there is no readable one."""
    try:
        with path.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError):
        return None
    mark = header.get("__metadata__", {}).get("fingerprint")
    return mark if isinstance(mark, str) else None


def write_index(folder: Path, content: Mapping[str, Any], layers: int) -> None:
    """Write ``calibration.json`` with the checksum of every layer file.

    Raises:
        OSError: If the disk refuses, or a layer file is absent.
    """
    files = {}
    for layer in range(layers):
        with (folder / layer_file(layer)).open("rb") as stream:
            files[layer_file(layer)] = hashlib.file_digest(stream, "sha256").hexdigest()
    index = {"format_version": FORMAT_VERSION, **content, "layers": layers, "sha256": files}
    with named(folder / INDEX):
        write_whole(folder / INDEX, json.dumps(index, indent=1).encode())


class CalibrationStats:
    """Statistics of every block, read layer by layer.

    Attributes:
        folder: Where they lie.
        index: The content of ``calibration.json``.
        layers: Number of MoE layers.
        experts: Experts per layer.
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder = folder
        self.index = dict(index)
        self.layers = int(index["layers"])
        self.experts = int(index["experts"])
        self._load = lru_cache(maxsize=1)(self._load_layer)
        self._mean = lru_cache(maxsize=4)(self._layer_mean)

    @classmethod
    def open(cls, path: Path | str) -> CalibrationStats:
        """Open a calibration directory.

        Raises:
            CalibrationError: If the index is absent, of another version, or incomplete.
        """
        folder = Path(path)
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CalibrationError(
                f"{folder}: no {INDEX} (calibration absent or not finished)"
            ) from None
        except ValueError as error:
            raise CalibrationError(f"{folder / INDEX}: not JSON: {error}") from None
        version = index.get("format_version") if isinstance(index, dict) else None
        if version != FORMAT_VERSION:
            raise CalibrationError(
                f"{folder / INDEX}: format_version {version}, must be {FORMAT_VERSION}"
            )
        for key in ("layers", "experts", "hidden", "intermediate", "sha256"):
            if key not in index:
                raise CalibrationError(f"{folder / INDEX}: {key} is missing")
        return cls(folder, index)

    def require(self, *, layers: int, experts: int, hidden: int, intermediate: int) -> None:
        """Check that the statistics are of a model of this shape.

        Raises:
            CalibrationError: If they are of another one.
        """
        wanted = {
            "layers": layers,
            "experts": experts,
            "hidden": hidden,
            "intermediate": intermediate,
        }
        for name, value in wanted.items():
            if self.index[name] != value:
                raise CalibrationError(
                    f"{self.folder / INDEX}: {name} is {self.index[name]}, the model has {value}"
                )

    def require_model(self, *, weights_sha256: str, config_sha256: str) -> None:
        """Check that the statistics were measured on these very weights.

        Args:
            weights_sha256: Digest of the model's tensors, see ``checkpoint_scan``.
            config_sha256: Of its ``config.json``.

        Raises:
            CalibrationError: If they are of another model, or do not say of which.
        """
        found = self.index.get("provenance")
        wanted = {"weights_sha256": weights_sha256, "config_sha256": config_sha256}
        for name, value in wanted.items():
            if not isinstance(found, dict) or name not in found:
                raise CalibrationError(
                    f"{self.folder / INDEX}: provenance.{name} is missing, so the model they were"
                    " measured on is not known; calibrate again"
                )
            if found[name] != value:
                what = "weights" if name == "weights_sha256" else "config.json"
                raise CalibrationError(
                    f"{self.folder}: statistics of another model: its {what} had SHA-256"
                    f" {str(found[name])[:12]}..., this model's has {value[:12]}..."
                )

    def check(self) -> None:
        """Read all layers.

        Raises:
            CalibrationError: If one is damaged or not finite.
        """
        for layer in range(self.layers):
            self._load(layer)

    def input_second_moment(self, layer: int, expert: int, module: int) -> FloatArray:
        """[K, K] H of a block, positive definite; [K], its diagonal, if only that was kept.

        Args:
            layer: MoE layer, from 0.
            expert: Expert, from 0.
            module: 0 gate_up, 1 down.

        Raises:
            CalibrationError: If the layer's file is damaged.
        """
        arrays = self._load(layer)
        moments = arrays[f"{MODULES[module]}.moment"]
        tokens = int(arrays["routed_tokens"][expert])
        own = np.asarray(moments[expert], dtype=np.float64)
        rho = shrinkage(tokens, own.shape[-1])
        if rho > 0.0:
            own = (1.0 - rho) * own + rho * self._mean(layer, f"{MODULES[module]}.moment")
        if own.ndim == 1:
            return np.asarray(own + RIDGE * own.mean())
        return shrunk_moment(own, rho)

    def row_weight(self, layer: int, expert: int, module: int) -> FloatArray:
        """[N] a_r of a block.

        Raises:
            CalibrationError: If the layer's file is damaged.
        """
        arrays = self._load(layer)
        name = f"{MODULES[module]}.row_weight"
        own = np.asarray(arrays[name][expert], dtype=np.float64)
        columns = arrays[f"{MODULES[module]}.moment"].shape[-1]
        rho = shrinkage(int(arrays["routed_tokens"][expert]), columns)
        if rho == 0.0:
            return own
        return np.asarray((1.0 - rho) * own + rho * self._mean(layer, name))

    def scale(self, layer: int) -> float:
        """c_l of a layer."""
        return float(self._load(layer)["scale"][0])

    def mass(self, layer: int, expert: int) -> float:
        """M2 of an expert per token seen, > 0."""
        return float(self._load(layer)["mass"][expert])

    def first_mass(self, layer: int, expert: int) -> float:
        """M1 of an expert: mean gate weight per token seen."""
        arrays = self._load(layer)
        return float(arrays["gate_sum"][expert] / arrays["tokens"][0])

    def routed_tokens(self, layer: int) -> NDArray[np.int64]:
        """[E] tokens that reached each expert."""
        return np.asarray(self._load(layer)["routed_tokens"], dtype=np.int64)

    def thin_experts(self) -> list[tuple[int, int]]:
        """(layer, expert) of all experts with fewer tokens than their moments require."""
        needed = required_tokens(max(int(self.index["hidden"]), int(self.index["intermediate"])))
        return [
            (layer, int(expert))
            for layer in range(self.layers)
            for expert in np.flatnonzero(self.routed_tokens(layer) < needed)
        ]

    def _layer_mean(self, layer: int, name: str) -> FloatArray:
        """Mean over experts, weighted by routed tokens."""
        arrays = self._load(layer)
        weight = arrays["routed_tokens"].astype(np.float64)
        mean = np.zeros(arrays[name].shape[1:])
        for expert in np.flatnonzero(weight):
            mean += weight[expert] / weight.sum() * arrays[name][expert]
        return mean

    def _load_layer(self, layer: int) -> dict[str, NDArray[Any]]:
        name = layer_file(layer)
        try:
            content = (self.folder / name).read_bytes()
        except OSError as error:
            raise CalibrationError(f"{self.folder / name}: {error.strerror}") from None
        if hashlib.sha256(content).hexdigest() != self.index["sha256"].get(name):
            raise CalibrationError(f"{self.folder / name}: checksum differs from {INDEX}")
        arrays: dict[str, NDArray[Any]] = load(content)
        _require_finite(str(self.folder / name), arrays)
        return arrays
