import pytest

from runtime.text.detokenizer import Detokenizer
from runtime.text.logprob_text import TextOffsets, chat_token, completion_token, token_id_string
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.text.conftest import TEXTS

SHARED = ["byte_level", "llama", "gemma"]


def opened(folder) -> TextTokenizer:
    tokenizer = TextTokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("form", SHARED)
def test_the_bytes_of_all_entries_are_the_text(folders, form):
    tokenizer = opened(folders[form])
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        entries = [chat_token(tokenizer, token) for token in tokens]
        raw = b"".join(bytes(numbers) for _, numbers in entries)
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        assert raw.decode().removeprefix(" " if form == "llama" else "") == whole
        assert all("\ufffd" not in string or "\ufffd" in text for string, _ in entries)


@pytest.mark.parametrize("form", ["byte_level", "llama"])
def test_a_part_of_a_character_is_escaped(folders, form):
    tokenizer = opened(folders[form])
    token = tokenizer.token_id("ð" if form == "byte_level" else "<0xF0>")
    assert token is not None
    assert chat_token(tokenizer, token) == ("\\xf0", [0xF0])
    assert completion_token(tokenizer, token) == "bytes:\\xf0"


def test_whole_tokens_are_their_text(folders):
    for form, name in (("byte_level", "Ġthe"), ("llama", "▁the")):
        tokenizer = opened(folders[form])
        token = tokenizer.token_id(name)
        assert token is not None
        assert chat_token(tokenizer, token) == (" the", list(b" the"))
        assert completion_token(tokenizer, token) == " the"


def test_without_a_tokenizer_the_id_is_the_string():
    assert chat_token(None, 7) == ("token_id:7", None)
    assert completion_token(None, 7) == "token_id:7" == token_id_string(7)
    assert TextOffsets(None, start=5).push([1, 2]) == [5, 5]


@pytest.mark.parametrize("form", SHARED)
def test_offsets_cut_the_text_into_the_tokens(folders, form):
    tokenizer = opened(folders[form])
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(tokens, skip_special_tokens=False)
        offsets = TextOffsets(tokenizer, skip_special_tokens=False).push(tokens)
        assert offsets == sorted(offsets)
        ends = [*offsets[1:], len(whole)]
        parts = [whole[a:b] for a, b in zip(offsets, ends, strict=False)]
        assert "".join(parts) == whole
        for index, (token, part) in enumerate(zip(tokens, parts, strict=True)):
            # A token's whole characters end its part, but for the space taken off the first one.
            inside = tokenizer.token_bytes(token).decode("utf-8", "ignore")
            assert part.endswith(inside.removeprefix(" ") if index == 0 else inside)


def test_tokens_of_one_character_have_one_offset(folders):
    tokenizer = opened(folders["byte_level"])
    tokens = [*tokenizer.encode("ab"), *tokenizer.encode("😀"), *tokenizer.encode("!")]
    offsets = TextOffsets(tokenizer, start=10).push(tokens)
    assert offsets[-1] == 13
    assert offsets.count(12) == len(tokenizer.encode("😀"))


def test_offsets_do_not_depend_on_how_tokens_come(folders):
    for form in SHARED:
        tokenizer = opened(folders[form])
        tokens = tokenizer.encode("".join(TEXTS))
        at_once = TextOffsets(tokenizer).push(tokens)
        one_by_one = TextOffsets(tokenizer)
        assert at_once == [offset for token in tokens for offset in one_by_one.push([token])]
        detokenizer = Detokenizer(tokenizer)
        assert at_once[-1] <= len(detokenizer.push(tokens) + detokenizer.finish())
