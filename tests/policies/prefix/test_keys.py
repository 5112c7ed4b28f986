import hashlib
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.prefix.keys import Namespace, block_keys, root_key, tenant_tag

NAMESPACE = Namespace(
    model="mistral-7b", revision="a1", dtype="bf16", layout="v1", layers="0-31", kv_heads="0-7",
    block=4,
)  # fmt: skip
ROOT = root_key(NAMESPACE)
prompts = st.lists(st.integers(0, 3), max_size=24)


@given(prompts, prompts, st.integers(1, 5))
def test_equal_keys_are_exactly_the_common_prefix_of_the_tokens(
    one: list[int], other: list[int], block: int
) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    a, b = block_keys(ROOT, one, block), block_keys(ROOT, other, block)
    same = [x == y for x, y in zip(a, b, strict=False)]
    assert same == [i < common // block for i in range(len(same))]


@given(prompts, st.integers(1, 5))
def test_only_full_blocks_have_keys_and_a_longer_prompt_keeps_them(
    ids: list[int], block: int
) -> None:
    keys = block_keys(ROOT, ids, block)
    assert len(keys) == len(ids) // block
    assert block_keys(ROOT, [*ids, 1, 2, 3], block)[: len(keys)] == keys
    assert len(dict.fromkeys(keys)) == len(keys)


def test_the_chain_is_the_written_formula() -> None:
    first = hashlib.sha256(ROOT + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    last_id = bytes([255, 255, 255, 255])
    second = hashlib.sha256(first + bytes(4) + last_id + hashlib.sha256(b"x").digest()).digest()
    assert block_keys(ROOT, [1, 256, 0, 2**32 - 1, 9], 2, extras={1: b"x"}) == (first, second)


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<u4", ">u4", "i8", "u8"])
def test_lists_and_arrays_of_any_whole_type_give_the_same_keys(dtype: str) -> None:
    ids = [5, 0, 127, 9, 1, 2, 3, 4]
    strided = np.repeat(np.array(ids, dtype=dtype), 2)[::2]
    assert block_keys(ROOT, strided, 4) == block_keys(ROOT, ids, 4)
    assert block_keys(ROOT, tuple(np.int64(i) for i in ids), 4) == block_keys(ROOT, ids, 4)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.5, None, "7"])
def test_a_token_outside_the_range_is_named_by_position_and_not_by_value(bad: object) -> None:
    with pytest.raises(ValueError, match=r"token_ids\[2\] must be .* 0\.\.4294967295$") as caught:
        block_keys(ROOT, [1, 2, bad, 3], 4)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_outside_the_range_of_an_array_is_named_by_position(bad: int) -> None:
    with pytest.raises(ValueError, match=r"token_ids\[2\] must be"):
        block_keys(ROOT, np.array([1, 2, bad, 3]), 4)


@pytest.mark.parametrize(
    "ids", [np.array([1.0, 2.0]), np.array([[1, 2]]), np.array([True, False]), b"ab", "ab", 7]
)
def test_what_is_no_row_of_whole_numbers_is_refused(ids: object) -> None:
    with pytest.raises(ValueError, match="token_ids must be"):
        block_keys(ROOT, ids, 1)


def test_bad_roots_block_sizes_and_extras_are_named() -> None:
    with pytest.raises(ValueError, match="root must be 32 bytes, found 8 bytes"):
        block_keys(ROOT[:8], [1], 1)
    with pytest.raises(ValueError, match="block_tokens must be a whole number >= 1, found 0"):
        block_keys(ROOT, [1], 0)
    with pytest.raises(ValueError, match=r"extras are by position of the block, >= 0, found -1"):
        block_keys(ROOT, [1], 1, extras={-1: b""})
    with pytest.raises(ValueError, match=r"extras\[0\] must be bytes, found str"):
        block_keys(ROOT, [1], 1, extras={0: "image"})


def test_an_extra_is_hashed_apart_so_that_it_cannot_imitate_tokens() -> None:
    digest = hashlib.sha256(b"x").digest()
    as_tokens = [1, 2, 3, 4, *np.frombuffer(digest, "<u4").tolist()]
    assert block_keys(ROOT, [1, 2, 3, 4], 4, extras={0: digest}) != block_keys(ROOT, as_tokens, 12)
    assert block_keys(ROOT, [1, 2, 3, 4], 4, extras={0: b""}) != block_keys(ROOT, [1, 2, 3, 4], 4)
    assert block_keys(ROOT, [1, 2, 3, 4, 5], 4, extras={1: b"x"}) == block_keys(
        ROOT, [1, 2, 3, 4], 4
    )


def test_every_field_of_the_namespace_changes_every_key() -> None:
    changed = [
        replace(NAMESPACE, **{f.name: 8 if f.name == "block" else getattr(NAMESPACE, f.name) + "x"})
        for f in fields(Namespace)
    ]
    keys = [block_keys(root_key(n), range(8), 8)[0] for n in (NAMESPACE, *changed)]
    assert len(dict.fromkeys(keys)) == len(keys)


def test_fields_that_run_into_each_other_give_different_digests() -> None:
    one, other = replace(NAMESPACE, model="a", revision="bc"), replace(NAMESPACE, model="ab")
    assert one.digest() != replace(other, revision="c").digest()


def test_names_outside_ascii_are_escaped() -> None:
    text = (
        '{"adapter":"","block":4,"dtype":"bf16","kv_heads":"0-7","layers":"0-31","layout":"v1",'
        '"model":"m\\u00fc\\ud83d\\ude00\\"","revision":"a1"}'
    )
    digest = hashlib.sha256(b"ptstore-ns-v1\0" + text.encode("ascii")).digest()
    assert replace(NAMESPACE, model='mü\U0001f600"').digest() == digest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", 7, "model must be of type str, found int"),
        ("block", "16", "block must be of type int, found str"),
        ("block", True, "block must be of type int, found bool"),
        ("block", 16.0, "block must be of type int, found float"),
        ("block", 0, "block must be >= 1 token, found 0"),
        ("adapter", None, "adapter must be of type str, found NoneType"),
    ],
)
def test_a_wrong_field_of_the_namespace_is_named(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"namespace {message}"):
        replace(NAMESPACE, **{field: value})


@given(prompts.filter(lambda ids: len(ids) >= 4), st.text(min_size=1, max_size=4))
def test_two_salts_share_no_key(ids: list[int], salt: str) -> None:
    ours, theirs = block_keys(root_key(NAMESPACE, salt), ids, 4), block_keys(ROOT, ids, 4)
    assert not dict.fromkeys(ours).keys() & dict.fromkeys(theirs).keys()


def test_a_salt_that_is_no_text_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="salt must be text that UTF-8 can encode") as caught:
        root_key(NAMESPACE, "secret\ud800")
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="salt must be text, found bytes"):
        tenant_tag(b"secret")


def test_a_tenant_tag_tells_tenants_apart_and_is_neither_salt_nor_part_of_a_key() -> None:
    assert tenant_tag("") == b""
    tags = [tenant_tag(f"tenant-{i}") for i in range(100)]
    assert len(dict.fromkeys(tags)) == 100
    assert all(len(tag) == 16 for tag in tags)
    plain = hashlib.sha256(b"tenant-0").digest()
    assert tags[0] not in plain + root_key(NAMESPACE, "tenant-0")
