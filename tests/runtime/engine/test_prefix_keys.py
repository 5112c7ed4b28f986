"""Keys of growing sequences: those of the whole, at the cost of what is new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.prefix.keys import block_keys, root_key, tenant_tag
from runtime.engine import prefix_keys
from runtime.engine.prefix_keys import PrefixKeys
from tests.runtime.engine.prefix_cases import layout, namespace, prompt

SPACE = namespace(layout())


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=120),
    st.lists(st.integers(0, 40), max_size=12),
    st.text(st.characters(codec="utf-8"), max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_keys_of_a_growing_sequence_are_those_of_every_prefix(
    tokens: list[int], steps: list[int], salt: str
) -> None:
    keys = PrefixKeys(SPACE, salt)
    stop = 0
    for step in [*steps, len(tokens)]:
        stop = min(stop + step, len(tokens))
        want = block_keys(root_key(SPACE, salt), tokens[:stop], SPACE.block)
        assert keys.update(tokens[:stop]) == len(want)
        assert keys.leading(len(keys)) == want
    assert keys.tenant == tenant_tag(salt)


def test_tokens_that_have_a_key_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given_tokens = []

    def counted(root: bytes, tokens: list[int], size: int) -> tuple[bytes, ...]:
        given_tokens.append(len(tokens))
        return block_keys(root, tokens, size)

    monkeypatch.setattr(prefix_keys, "block_keys", counted)
    keys, tokens = PrefixKeys(SPACE), prompt(2000)
    for stop in range(1001, 2001):
        keys.update(tokens[:stop])
    assert given_tokens[0] == 1001
    assert all(count == 16 for count in given_tokens[1:])
    assert len(given_tokens) == 1 + (2000 - 1001 + 9) // 16


def test_a_sequence_that_shrinks_and_blocks_that_are_not_there_are_refused() -> None:
    keys = PrefixKeys(SPACE)
    keys.update(prompt(40))
    with pytest.raises(ValueError, match="32 tokens have keys, found 31"):
        keys.update(prompt(31))
    with pytest.raises(IndexError, match="2 full blocks, not 3"):
        keys.leading(3)


def test_rows_of_numbers_have_the_keys_of_lists() -> None:
    first, second = PrefixKeys(SPACE), PrefixKeys(SPACE)
    first.update(prompt(50))
    second.update(np.array(prompt(50)))  # type: ignore[arg-type]
    assert first.leading(3) == second.leading(3)
