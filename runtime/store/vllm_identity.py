"""What names the blocks of an engine: its weights, how it packs pages, who asks.

Two engines find each other's blocks only if all of it agrees. Where something that shapes keys
and values cannot be named, the answer is None and nothing is stored: a miss, never a wrong hit.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from runtime.store.errors import StoreSetupError

LAYOUT_VERSION = 1
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NOT_SHAPING = ("_name_or_path", "transformers_version")
ADAPTER_FILES = ("adapter_config.json", *WEIGHT_SUFFIXES)
KNOWN_CACHE_TYPES = (
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
)
KNOWN_CACHE_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")


def files_sha256(paths: Iterable[Path]) -> str:
    """SHA-256 over names and contents of files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").digest()
        total.update(path.name.encode() + b"\0" + digest)
    return total.hexdigest()


def weights_digest(model: str, revision: str | None) -> str:
    """What tells a checkpoint's weights from others.

    Args:
        model: Folder of the checkpoint, a checkpoint file, or a name that was fetched from a hub.
        revision: Of the hub: the 40 hex digits of a commit.

    Raises:
        StoreSetupError: If neither the files nor a commit are at hand.
    """
    path = Path(model)
    if path.is_file():
        return files_sha256([path])
    weights = [f for f in path.iterdir() if f.suffix in WEIGHT_SUFFIXES] if path.is_dir() else []
    if weights:
        return files_sha256(weights)
    if revision and len(revision) == 40 and set(revision) <= set("0123456789abcdef"):
        return revision
    raise StoreSetupError(
        f"the weights of {model!r} cannot be named: give kv_connector_extra_config revision, "
        "or the engine a local checkpoint folder or --revision with a commit's 40 hex digits"
    )


def model_identity(vllm_config: Any, revision: str) -> tuple[str, str]:
    """Name and revision of the model as the engine runs it.

    Args:
        vllm_config: Of the engine.
        revision: From the settings; empty: worked out from the checkpoint.

    Returns:
        Architecture, and the weights' digest joined with everything of the configuration that
        changes what they compute: overrides, quantization, element types, how they were loaded.

    Raises:
        StoreSetupError: If the weights cannot be named.
    """
    model = vllm_config.model_config
    weights = revision or weights_digest(str(model.model), getattr(model, "revision", None))
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    is_random = "dummy" in load_format
    shaping = {
        "config": {k: v for k, v in model.hf_config.to_dict().items() if k not in NOT_SHAPING},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "seed": model.seed if is_random else None,
        "is_random": is_random,
    }
    text = json.dumps(shaping, sort_keys=True, default=str)
    name = ",".join(model.hf_config.architectures or ["unnamed"])
    return name, f"{weights}+{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def layout_text(
    signature: str, *, engine_version: str, backends: Iterable[str], device: str, page_tokens: int
) -> str:
    """How a page's bytes are to be read.

    The version of the engine is part of it, since packings have changed between versions, and on
    CPUs the instruction set, since it decides how tokens are interleaved inside a page.

    Args:
        signature: Types and shapes of all layers, see `KvBlocks.signature`.
        engine_version: As the engine tells it.
        backends: Attention backends in use.
        device: Device type, such as ``"cuda"`` or ``"cpu"``.
        page_tokens: Tokens of an engine block.
    """
    parts = [
        f"ptstore-vllm-{LAYOUT_VERSION}",
        engine_version,
        "+".join(sorted(set(backends))),
        device if device != "cpu" else f"cpu-{platform.machine()}-{_cpu_packing()}",
        f"page={page_tokens}",
        signature,
    ]
    return "|".join(parts)


def _cpu_packing() -> str:
    import torch

    cpu: Any = torch.cpu
    amx = getattr(cpu, "_is_amx_tile_supported", lambda: False)()
    return f"{torch.backends.cpu.get_cpu_capability()}{'-amx' if amx else ''}"


def joined_salt(own: str, request: str | None) -> str:
    """One salt from the engine's and the request's; either alone is used as it is."""
    if not own or not request:
        return own or request or ""
    text = f"{len(own.encode())}:{own}{request}"
    return "joined:" + hashlib.sha256(text.encode()).hexdigest()


def adapter_digest(lora_request: Any) -> str | None:
    """Names an adapter by its files; None if they are not at hand or may be replaced in place."""
    folder = Path(getattr(lora_request, "lora_path", "") or "")
    if getattr(lora_request, "load_inplace", False):
        return None
    try:
        files = [f for f in folder.iterdir() if f.name.endswith(ADAPTER_FILES)]
        return files_sha256(files) if files else None
    except OSError:
        return None


def extra_bytes(extra_keys: Iterable[Any] | None) -> bytes:
    """What shapes a block besides its tokens, as bytes: images, sound, soft prompts.

    The adapter and the salt are named elsewhere in the key and left out here.

    Args:
        extra_keys: Tagged tuples, as the engine works out for its own prefix cache.

    Raises:
        TypeError: For something that has no bytes of its own.
    """
    kept = [key for key in extra_keys or () if key[0] not in ("lora", "cache_salt")]
    return msgspec.msgpack.encode(kept) if kept else b""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what cannot be stored whole.

    Raises:
        StoreSetupError: With the setting to change.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.kv_load_failure_policy != "recompute":
        raise StoreSetupError(
            'kv_load_failure_policy: must be "recompute", so that a block which cannot be loaded '
            f"costs time and not the request; found {transfer.kv_load_failure_policy!r}"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise StoreSetupError(f"{name}: must be 1 with the prefix store")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in KNOWN_CACHE_TYPES:
        raise StoreSetupError(
            f"kv_cache_dtype: must be one of {', '.join(KNOWN_CACHE_TYPES)}, found {cache_dtype!r}"
        )
    if cache_dtype.startswith("fp8") and getattr(
        vllm_config.cache_config, "calculate_kv_scales", False
    ):
        raise StoreSetupError("calculate_kv_scales: must be off: scales of one run fit no other")
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in ("ngram", "suffix"):
        raise StoreSetupError(
            f"speculative method {speculative.method!r}: a draft model's cache is not stored; "
            "use ngram or suffix"
        )
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in _layer_specs(group.kv_cache_spec)]
    kinds = sorted({type(spec).__name__ for spec in specs})
    if len(groups) != 1 or not set(kinds) <= set(KNOWN_CACHE_SPECS):
        raise StoreSetupError(
            f"the model's cache has {len(groups)} groups of kind {', '.join(kinds)}: one group of "
            f"{' or '.join(KNOWN_CACHE_SPECS)} can be stored"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise StoreSetupError("a layer attends to later tokens: its prefixes cannot be stored")


def _layer_specs(spec: Any) -> list[Any]:
    """A group's specs, one if all its layers have the same."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return list(by_layer.values()) if by_layer is not None else [spec]


def is_latent(kv_cache_config: Any) -> bool:
    """Whether keys and values are one latent vector that every rank holds whole."""
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return any(type(each).__name__ == "MLAAttentionSpec" for each in _layer_specs(spec))


def heads_text(total_heads: int, ranks: int, rank: int) -> str:
    """Key-value heads of one tensor-parallel rank, such as ``"4-7"``.

    With fewer heads than ranks several ranks hold the same head, and so share its blocks.
    """
    if ranks > total_heads:
        head = rank * total_heads // ranks
        return f"{head}-{head}"
    each = total_heads // ranks
    return f"{rank * each}-{(rank + 1) * each - 1}"


def layers_text(names: Iterable[str]) -> str:
    """Layers by number and by name: two parts of a model never share a block."""
    names = list(names)
    numbers = [int(part) for name in names for part in name.split(".") if part.isdecimal()]
    span = f"{min(numbers)}-{max(numbers)}" if numbers else "unnumbered"
    return f"{span}/{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:16]}"
