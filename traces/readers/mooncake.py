"""Traces with ids of prompt blocks: Mooncake's and Qwen-Bailian's.

Mooncake, JSON Lines: timestamp in milliseconds, input_length, output_length, hash_ids (one per 512
prompt tokens; an equal id means an equal prompt up to the end of that block).
Qwen-Bailian, JSON Lines: the same keys with timestamp in seconds and blocks of 16 tokens, and
chat_id, parent_chat_id (-1 for the first of a conversation), turn, type.

Source:
    github.com/kvcache-ai/Mooncake (FAST25-release);
    github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from traces.readers.json_rows import JsonHead, read_json_columns
from traces.readers.layout import Layout, Names, Options
from traces.request import Trace

MOONCAKE = "mooncake-jsonl"
QWEN = "qwen-jsonl"
MOONCAKE_BLOCK_TOKENS = 512
QWEN_BLOCK_TOKENS = 16


def matches_mooncake(names: Names) -> bool:
    """Whether the keys are Mooncake's."""
    return names.has("timestamp", "input_length", "output_length") and not matches_qwen(names)


def matches_qwen(names: Names) -> bool:
    """Whether the keys are Qwen-Bailian's."""
    return names.has("timestamp", "input_length", "output_length", "chat_id", "parent_chat_id")


def read_mooncake(head: JsonHead, options: Options) -> Trace:
    """Read a file of Mooncake; hash_ids may be absent from all rows."""
    names = head.names
    blocks = names.find("hash_ids")
    layout = Layout(
        format=MOONCAKE,
        prompt=names.need("input_length", MOONCAKE),
        output=names.need("output_length", MOONCAKE),
        arrival=names.need("timestamp", MOONCAKE),
        time_unit="ms",
        block_ids=blocks,
        block_tokens=(options.block_tokens or MOONCAKE_BLOCK_TOKENS) if blocks else 0,
    )
    return read_json_columns(head, layout, options).trace


def read_qwen(head: JsonHead, options: Options) -> Trace:
    """Read a file of Qwen-Bailian; a conversation is named by its first chat id."""
    names = head.names
    chat, parent = names.need("chat_id", QWEN), names.need("parent_chat_id", QWEN)
    blocks = names.find("hash_ids")
    layout = Layout(
        format=QWEN,
        prompt=names.need("input_length", QWEN),
        output=names.need("output_length", QWEN),
        arrival=names.need("timestamp", QWEN),
        time_unit="s",
        block_ids=blocks,
        block_tokens=(options.block_tokens or QWEN_BLOCK_TOKENS) if blocks else 0,
        numbers=(chat, parent),
    )
    columns = read_json_columns(head, layout, options)
    roots = _first_chats(columns.numbers[chat], columns.numbers[parent])
    return replace(columns.trace, session_ids=roots)


def _first_chats(chat: NDArray[np.float64], parent: NDArray[np.float64]) -> NDArray[np.object_]:
    """The first chat of each row's conversation, [n] names; None where the row names no chat."""
    root_by_chat: dict[float, float] = {}
    roots: list[str | None] = []
    for this, before in zip(chat.tolist(), parent.tolist(), strict=True):
        root = root_by_chat.get(before, before if before >= 0 else this)
        root_by_chat.setdefault(this, root)
        roots.append(f"{root:.0f}" if np.isfinite(root) else None)
    return np.array(roots, dtype=np.object_)
