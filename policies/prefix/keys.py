"""Names of blocks of keys and values, worked out from nothing but what the blocks hold.

Every key is a SHA-256 over what came before it, so equal keys mean equal prefixes, in every
process and on every node, and a key cannot be guessed without the tokens and the tenant's salt:

    N    = SHA-256("ptstore-ns-v1" 00, canonical JSON of the namespace)
    K0   = SHA-256("ptstore-root-v1" 00, N, SHA-256(salt))
    K(i) = SHA-256(K(i-1), tokens of block i as u32 little endian, extra of block i)

where the extra is nothing, or the SHA-256 of other bytes that shape the block (an image, a soft
prompt). Keys keep all 32 bytes: 64 bits are within reach of a forger in a store of many tenants.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 32
TENANT_TAG_BYTES = 16
TOKEN_BYTES = 4
MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What must be equal for two blocks of the same tokens to hold the same numbers.

    Attributes:
        model: Name of the model.
        revision: Digest of its weights.
        dtype: Logical type of the cached numbers; each fp8 variant is a type of its own.
        layout: Byte order and version of the block's layout.
        layers: Layers held, e.g. ``"0-31"``.
        kv_heads: Heads held by this tensor-parallel slice, e.g. ``"0-7"``.
        block: Tokens per block, >= 1.
        adapter: Digest of the adapter; empty without one.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    layers: str
    kv_heads: str
    block: int
    adapter: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), int if field.name == "block" else str
            if type(value) is not wanted:
                raise ValueError(
                    f"namespace {field.name} must be of type {wanted.__name__},"
                    f" found {type(value).__name__}"
                )
        if self.block < 1:
            raise ValueError(f"namespace block must be >= 1 token, found {self.block}")

    def digest(self) -> bytes:
        """N, 32 bytes: the same for equal fields, whatever the machine."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"ptstore-ns-v1\0" + text.encode("ascii")).digest()


def root_key(namespace: Namespace, salt: str = "") -> bytes:
    """K0, 32 bytes: where the chains of one tenant in one namespace begin.

    Args:
        namespace: Of the blocks.
        salt: Of the tenant; empty for what all tenants share.

    Raises:
        ValueError: If the salt is not text that UTF-8 can encode.
    """
    salted = hashlib.sha256(_salt_bytes(salt)).digest()
    return hashlib.sha256(b"ptstore-root-v1\0" + namespace.digest() + salted).digest()


def tenant_tag(salt: str) -> bytes:
    """16 bytes that tell tenants apart and do not give the salt away; empty for the empty salt.

    Raises:
        ValueError: If the salt is not text that UTF-8 can encode.
    """
    if salt == "":
        return b""
    digest = hashlib.sha256(b"ptstore-tenant-v1\0" + _salt_bytes(salt)).digest()
    return digest[:TENANT_TAG_BYTES]


def block_keys(
    root: bytes,
    token_ids: Sequence[int] | NDArray[Any],
    block_tokens: int,
    *,
    extras: Mapping[int, bytes] | None = None,
) -> tuple[bytes, ...]:
    """Keys of the full blocks of a prompt, first block first; tokens behind them get no key.

    Args:
        root: K0 of the tenant and namespace, 32 bytes.
        token_ids: [n] ids in 0..2^32-1.
        block_tokens: Tokens per block, >= 1.
        extras: By position of the block: other bytes that shape it. A block that is not full yet
            has no key, so an extra of it has no effect yet.

    Raises:
        ValueError: If an argument is none of these. The text tells positions, never tokens.
    """
    if type(root) is not bytes or len(root) != KEY_BYTES:
        raise ValueError(f"root must be {KEY_BYTES} bytes, found {_described(root)}")
    if type(block_tokens) is not int or block_tokens < 1:
        raise ValueError(f"block_tokens must be a whole number >= 1, found {block_tokens!r}")
    data = _little_endian(token_ids)
    suffixes = _extra_digests(extras) if extras else {}
    step = block_tokens * TOKEN_BYTES
    sha256, key, keys = hashlib.sha256, root, []
    for i, start in enumerate(range(0, len(data) - step + 1, step)):
        content = key + data[start : start + step]
        key = sha256(content + suffixes[i] if i in suffixes else content).digest()
        keys.append(key)
    return tuple(keys)


def _salt_bytes(salt: str) -> bytes:
    if not isinstance(salt, str):
        raise ValueError(f"salt must be text, found {type(salt).__name__}")
    try:
        return salt.encode()
    except UnicodeEncodeError:
        # The cause would carry the salt.
        raise ValueError("salt must be text that UTF-8 can encode") from None


def _described(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__


def _extra_digests(extras: Mapping[int, bytes]) -> dict[int, bytes]:
    digests = {}
    for position, extra in extras.items():
        if type(position) is not int or position < 0:
            raise ValueError(f"extras are by position of the block, >= 0, found {position!r}")
        if not isinstance(extra, bytes | bytearray | memoryview):
            raise ValueError(f"extras[{position}] must be bytes, found {type(extra).__name__}")
        digests[position] = hashlib.sha256(extra).digest()
    return digests


def _little_endian(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    """The ids as u32, little endian."""
    if isinstance(token_ids, np.ndarray):
        return _array_bytes(token_ids)
    if isinstance(token_ids, str | bytes | bytearray | memoryview):
        raise ValueError(f"token_ids must be whole numbers, found {type(token_ids).__name__}")
    try:
        ids = array("I", token_ids)
    except (TypeError, OverflowError):
        raise ValueError(_first_fault(token_ids)) from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _array_bytes(ids: NDArray[Any]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"shape {ids.shape} of {ids.dtype}"
        raise ValueError(f"token_ids must be one row of whole numbers, found {found}")
    bad = (ids < 0) | (ids > MAX_TOKEN_ID)
    if bad.any():
        raise ValueError(_outside(int(bad.argmax())))
    return ids.astype("<u4").tobytes()


def _outside(position: int) -> str:
    return f"token_ids[{position}] must be a whole number in 0..{MAX_TOKEN_ID}"


def _first_fault(token_ids: Sequence[int]) -> str:
    for position, token in enumerate(token_ids if isinstance(token_ids, Iterable) else ()):
        try:
            array("I", (token,))
        except (TypeError, OverflowError):
            return _outside(position)
    return f"token_ids must be a row of whole numbers, found {type(token_ids).__name__}"
