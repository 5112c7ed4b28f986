import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from runtime.text.tokenizer import TextTokenizer, TokenizerError
from tests.runtime.text.conftest import CONFIG, MAKERS, TEXTS, byte_level, llama, write_folder

FORMS = sorted(MAKERS)


def opened(folder: Path) -> TextTokenizer:
    tokenizer = TextTokenizer.open(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [True, False])
def test_texts_become_the_tokens_that_transformers_makes(folders, form, special):
    ours = opened(folders[form])
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[form])
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=special) == theirs.encode(
            text, add_special_tokens=special
        ), text


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("skip", [True, False])
def test_tokens_become_the_texts_that_transformers_makes(folders, form, skip):
    ours = opened(folders[form])
    theirs = AutoTokenizer.from_pretrained(folders[form])
    for text in TEXTS:
        tokens = ours.encode(text)
        assert ours.decode(tokens, skip_special_tokens=skip) == theirs.decode(
            tokens, skip_special_tokens=skip
        )


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=60))
def test_any_unicode_text_is_tokenized_as_by_transformers(folders, form, text):
    theirs = reference(folders[form])
    assert cached(folders[form]).encode(text) == theirs.encode(text)


_CACHE: dict[Path, TextTokenizer] = {}
_THEIRS: dict[Path, PreTrainedTokenizerFast] = {}


def cached(folder: Path) -> TextTokenizer:
    if folder not in _CACHE:
        _CACHE[folder] = opened(folder)
    return _CACHE[folder]


def reference(folder: Path) -> PreTrainedTokenizerFast:
    if folder not in _THEIRS:
        _THEIRS[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    return _THEIRS[folder]


@pytest.mark.parametrize("form", ["byte_level", "gemma"])
def test_the_texts_come_back_whole(folders, form):
    ours = opened(folders[form])
    for text in TEXTS:
        tokens = ours.encode(text, add_special_tokens=False)
        # U+2581 is a space to these tokenizers, as it is to SentencePiece.
        whole = text.replace("▁", " ") if form == "gemma" else text
        assert ours.decode(tokens, skip_special_tokens=False) == whole


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_bytes_of_byte_level_tokens_together_are_the_text(folders, data):
    ours = cached(folders["byte_level"])
    tokens = data.draw(st.lists(st.integers(0, ours.vocabulary + 3), max_size=30))
    joined = b"".join(map(ours.token_bytes, tokens))
    assert joined.decode("utf-8", "replace") == ours.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("form", ["llama", "gemma"])
def test_the_bytes_of_pieces_together_are_the_text(folders, form):
    ours = opened(folders[form])
    for text in TEXTS:
        tokens = ours.encode(text, add_special_tokens=False)
        joined = b"".join(map(ours.token_bytes, tokens)).decode()
        assert joined.removeprefix(" " if form == "llama" else "") == ours.decode(
            tokens, skip_special_tokens=False
        )


def test_a_token_of_a_part_of_a_character_gives_its_own_bytes(folders):
    byte_tokens = opened(folders["byte_level"])
    tokens = byte_tokens.encode("😀")
    assert len(tokens) > 1
    assert b"".join(map(byte_tokens.token_bytes, tokens)) == b"\xf0\x9f\x98\x80"
    pieces = opened(folders["llama"])
    token = pieces.token_id("<0xF0>")
    assert token is not None
    assert pieces.token_bytes(token) == b"\xf0"
    assert pieces.token_text(token) == "<0xF0>"


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"add_bos_token": True, "add_eos_token": True},
        {"split_special_tokens": True},
        {"eos_token": "<|im_end|>", "pad_token": "<new pad>", "image_token": "<image>"},
        {"additional_special_tokens": ["<one more>", "<|im_start|>"]},
        {"extra_special_tokens": {"audio_token": "<audio>"}},
        {
            "added_tokens_decoder": {
                "0": {"content": "<unk>", "special": True},
                "900": {"content": "<late>", "special": True, "lstrip": True},
                "899": {"content": "<earlier>", "special": False},
            }
        },
    ],
    ids=["plain", "add_bos", "split", "names", "more", "named", "decoder"],
)
@pytest.mark.parametrize("make", [byte_level, llama])
def test_the_configuration_counts_as_in_transformers(tmp_path, make, change):
    folder = write_folder(tmp_path, make(), CONFIG | change)
    ours = opened(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = "a <new pad> <image> b <one more><|im_start|>  <late> <earlier></s><|im_end|><audio>"
    tokens = theirs.encode(text)
    assert ours.encode(text) == tokens
    assert ours.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    assert ours.vocabulary == len(theirs)
    assert ours.named_tokens == theirs.special_tokens_map
    assert ours.eos_id == theirs.eos_token_id
    assert ours.bos_id == theirs.bos_token_id


def test_special_tokens_of_the_old_files_are_read(tmp_path):
    folder = write_folder(tmp_path, byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<s>", "pad_token": {"content": "<old pad>", "lstrip": False}})
    )
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = opened(folder)
    assert ours.named_tokens == theirs.special_tokens_map
    assert ours.encode("x<old pad>y") == theirs.encode("x<old pad>y")


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_cut_prompts(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    ours = opened(write_folder(tmp_path, tokenizer, CONFIG))
    assert ours.decode(ours.encode("a long text of many words")) == "a long text of many words"
    assert ours.encode("a") == [ours.token_id("a")]


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert TextTokenizer.open(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", "no json", "not a tokenizer"),
        ("tokenizer_config.json", "[1]", "must be a JSON object, found list"),
        ("tokenizer_config.json", "{", "not readable as JSON"),
        ("tokenizer_config.json", '{"bos_token": {"lstrip": true}}', "bos_token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "integer, found 'x'"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "added_tokens_decoder"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text, says):
    folder = write_folder(tmp_path, byte_level(), CONFIG)
    (folder / name).write_text(text)
    with pytest.raises(TokenizerError, match=says) as caught:
        TextTokenizer.open(folder)
    assert str(folder / name) in str(caught.value)


def test_half_a_surrogate_pair_is_refused_with_its_place(folders):
    with pytest.raises(TokenizerError, match=r"U\+D83D at character 3"):
        opened(folders["byte_level"]).encode("abc\ud83d")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_can_be_none_is_refused(folders, token):
    with pytest.raises(TokenizerError, match=f"token id {token}"):
        opened(folders["byte_level"]).decode([token])


def test_tokens_of_a_padded_vocabulary_add_nothing(folders):
    for folder in folders.values():
        ours = opened(folder)
        assert ours.decode([ours.vocabulary + 5]) == ""
        assert ours.token_bytes(ours.vocabulary + 5) == b""
        assert ours.token_text(ours.vocabulary + 5) == ""


def test_many_threads_use_one_tokenizer(folders):
    ours = opened(folders["llama"])
    alone = {text: (ours.encode(text), ours.decode(ours.encode(text))) for text in TEXTS}

    def work(seed: int) -> bool:
        order = TEXTS[seed % len(TEXTS) :] + TEXTS[: seed % len(TEXTS)]
        return all(
            (ours.encode(text), ours.decode(ours.encode(text))) == alone[text]
            and all(ours.token_bytes(token) is not None for token in alone[text][0])
            for text in order
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_the_longest_token_is_measured_in_bytes(folders):
    ours = opened(folders["byte_level"])
    assert ours.longest_token_bytes >= len("<plain added>")
    for text in TEXTS:
        assert len(ours.encode(text)) * ours.longest_token_bytes >= len(text.encode())


def test_a_panic_of_the_library_is_an_error_like_others(tmp_path):
    tokenizer = byte_level()
    # Looks for the last character of nothing.
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    ours = opened(write_folder(tmp_path, tokenizer, CONFIG))
    with pytest.raises(TokenizerError, match="cannot decode the tokens"):
        ours.decode([])
