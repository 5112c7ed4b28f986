"""What ``kv_connector_extra_config`` may say to the connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.store.errors import StoreSetupError
from runtime.store.sizes import size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """The connector's settings, checked.

    Attributes:
        socket: Unix socket of a running store server.
        directory: Home of a store that the engine opens itself; exactly one of the two is given.
        dram: With ``directory``: shared memory, such as ``"8GiB"``.
        ssd: With ``directory``: SSD, such as ``"64GiB"``.
        salt: Of the tenant this engine works for; joined with the salt of each request.
        block_tokens: Tokens of a store block; 0: the engine's block. A multiple of it otherwise.
        deadline_s: Most seconds that one load or one save may take.
        lookup_deadline_s: Most seconds that a request waits to learn what is stored.
        retry_s: Seconds without calls after the store failed.
        staging_bytes: Host memory for blocks on their way to or from the store.
        revision: Names the weights; empty: the SHA-256 of the checkpoint's files.
        stores_generated: Whether blocks that fill while decoding are stored too.
    """

    socket: str = ""
    directory: str = ""
    dram: str = "1GiB"
    ssd: str = ""
    salt: str = ""
    block_tokens: int = 0
    deadline_s: float = 1.0
    lookup_deadline_s: float = 0.1
    retry_s: float = 1.0
    staging_bytes: int = 256 << 20
    revision: str = ""
    stores_generated: bool = True

    def __post_init__(self) -> None:
        if bool(self.socket) == bool(self.directory):
            raise StoreSetupError(
                "kv_connector_extra_config: needs either socket or directory, "
                f"found {'both' if self.socket else 'neither'}"
            )
        for name in ("deadline_s", "lookup_deadline_s", "retry_s", "staging_bytes"):
            if not getattr(self, name) > 0:
                raise StoreSetupError(_bad(name, "a number > 0", getattr(self, name)))
        if self.block_tokens < 0:
            raise StoreSetupError(_bad("block_tokens", "a number >= 0", self.block_tokens))

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Settings of a connector's extra configuration.

        Raises:
            StoreSetupError: For an unknown name, a value of another type or out of its range.
        """
        allowed = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in allowed:
                raise StoreSetupError(
                    f"kv_connector_extra_config: unknown name {name!r}; "
                    f"known are {', '.join(allowed)}"
                )
            default = allowed[name].default
            if name == "staging_bytes":
                value = size_bytes(value, f"kv_connector_extra_config {name}")
            elif isinstance(default, float) and type(value) is int:
                value = float(value)
            if type(value) is not type(default):
                # The salt's value is not shown.
                found = type(value).__name__ if name == "salt" else repr(value)
                raise StoreSetupError(_bad(name, f"a {type(default).__name__}", found))
            values[name] = value
        return cls(**values)

    def pages_per_block(self, page_tokens: int) -> int:
        """Engine blocks in one store block.

        Raises:
            StoreSetupError: If store blocks are not whole engine blocks.
        """
        if self.block_tokens % page_tokens:
            raise StoreSetupError(
                _bad("block_tokens", f"a multiple of the engine's {page_tokens}", self.block_tokens)
            )
        return max(1, self.block_tokens // page_tokens)


def _bad(name: str, wanted: str, found: object) -> str:
    return f"kv_connector_extra_config {name}: must be {wanted}, found {found}"
