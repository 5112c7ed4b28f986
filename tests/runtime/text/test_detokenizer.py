from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from runtime.text.detokenizer import Detokenizer
from runtime.text.tokenizer import TextTokenizer
from tests.runtime.text.conftest import CONFIG, MAKERS, TEXTS, byte_level, llama, write_folder

FORMS = sorted(MAKERS)
EXACT = [form for form in FORMS if form != "word_pieces"]
_CACHE: dict[Path, TextTokenizer] = {}


def opened(folder: Path) -> TextTokenizer:
    if folder not in _CACHE:
        tokenizer = TextTokenizer.open(folder)
        assert tokenizer is not None
        _CACHE[folder] = tokenizer
    return _CACHE[folder]


def test_each_form_of_decoder_is_recognised(folders):
    families = {form: opened(folder).form.family for form, folder in folders.items()}
    assert families == {
        "byte_level": "byte_level",
        "llama": "byte_fallback",
        "gemma": "byte_fallback",
        "metaspace": "byte_fallback",
        "word_pieces": "opaque",
    }


def pieces(tokenizer: TextTokenizer, tokens: list[int], cuts: list[int], skip: bool) -> list[str]:
    """What comes out when the tokens come in groups of the sizes ``cuts``."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    out, start = [], 0
    for cut in cuts:
        out.append(detokenizer.push(tokens[start : start + cut]))
        start += cut
    return [*out, detokenizer.push(tokens[start:]), detokenizer.finish()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_texts_come_out_whole_in_groups_of_tokens(folders, form, size):
    tokenizer = opened(folders[form])
    for text in TEXTS:
        for skip in (True, False):
            tokens = tokenizer.encode(text)
            out = pieces(tokenizer, tokens, [size] * (len(tokens) // size), skip)
            assert "".join(out) == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("form", EXACT)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_in_any_groups_are_the_text_of_all(folders, form, data):
    tokenizer = opened(folders[form])
    # The bytes are few among the tokens; drawn on their own, broken characters are met often.
    token = st.integers(0, tokenizer.vocabulary + 3) | st.integers(0, 261)
    tokens = data.draw(st.lists(token, max_size=25))
    cuts = data.draw(st.lists(st.integers(0, 4), max_size=12))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, tokens, cuts, skip)) == tokenizer.decode(
        tokens, skip_special_tokens=skip
    )


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_word_pieces_in_any_groups_are_the_text_of_all(folders, data):
    tokenizer = opened(folders["word_pieces"])
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocabulary), max_size=15))
    cuts = data.draw(st.lists(st.integers(0, 3), max_size=8))
    skip = data.draw(st.booleans())
    assert "".join(pieces(tokenizer, tokens, cuts, skip)) == tokenizer.decode(
        tokens, skip_special_tokens=skip
    )


@pytest.mark.parametrize("form", ["byte_level", "llama", "gemma"])
def test_no_part_of_a_character_is_ever_given_out(folders, form):
    tokenizer = opened(folders[form])
    for text in TEXTS:
        if "\ufffd" in text:
            continue
        tokens = tokenizer.encode(text, add_special_tokens=False)
        out = pieces(tokenizer, tokens, [1] * len(tokens), False)
        assert "\ufffd" not in "".join(out)


def test_a_character_comes_out_with_its_last_byte(folders):
    tokenizer = opened(folders["byte_level"])
    detokenizer = Detokenizer(tokenizer)
    tokens = [tokenizer.token_id(character) for character in "ðŁĺĢ"]
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "😀"]


def test_a_row_of_bytes_comes_out_with_the_token_after_it(folders):
    tokenizer = opened(folders["llama"])
    detokenizer = Detokenizer(tokenizer)
    tokens = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", ""]
    assert detokenizer.peek() == "😀"
    assert detokenizer.push([tokenizer.token_id("a")]) == "😀a"
    assert detokenizer.peek() == ""


def test_a_line_end_held_back_can_be_seen(folders):
    tokenizer = opened(folders["llama"])
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([tokenizer.token_id("a"), tokenizer.token_id("<0x0A>")]) == "a"
    assert detokenizer.peek() == "\n"
    assert detokenizer.finish() == "\n"
    assert detokenizer.finish() == ""


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_peek_shows_is_what_would_come_if_the_text_ended(folders, data):
    tokenizer = opened(folders["llama"])
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocabulary - 1), min_size=1, max_size=12))
    detokenizer = Detokenizer(tokenizer)
    given_out = detokenizer.push(tokens)
    shown = detokenizer.peek()
    if shown:
        assert given_out + shown == tokenizer.decode(tokens)


@pytest.mark.parametrize("form", ["byte_level", "llama"])
def test_a_character_that_stays_incomplete_is_one_replacement_per_place(folders, form):
    tokenizer = opened(folders[form])
    names = "ðŁĺ" if form == "byte_level" else ("<0xF0>", "<0x9F>", "<0x98>")
    tokens = [tokenizer.token_id(name) for name in names]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokens) == ""
    assert detokenizer.finish() == tokenizer.decode(tokens)
    assert set(tokenizer.decode(tokens)) == {"\ufffd"}


def test_an_invalid_byte_holds_nothing_back(folders):
    tokenizer = opened(folders["byte_level"])
    detokenizer = Detokenizer(tokenizer)
    broken = tokenizer.token_id("ÿ")  # 0xFF begins no character
    assert detokenizer.push([broken] * 3) == "\ufffd" * 3
    assert detokenizer.push(tokenizer.encode("on")) == "on"


def test_skipped_special_tokens_inside_a_character_do_not_break_it(folders):
    tokenizer = opened(folders["llama"])
    row = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    tokens = [row[0], tokenizer.token_id("</s>"), row[1]]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokens) + detokenizer.finish() == "é"
    assert tokenizer.decode(tokens) == "é"


@pytest.mark.parametrize("form", ["byte_level", "llama", "gemma"])
def test_characters_counts_what_is_complete(folders, form):
    tokenizer = opened(folders[form])
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        for i, token in enumerate(tokens):
            detokenizer.push([token])
            so_far = tokenizer.decode(tokens[: i + 1], skip_special_tokens=False)
            whole = tokenizer.decode(tokens, skip_special_tokens=False)
            if "\ufffd" not in whole and so_far == whole[: len(so_far)]:
                assert detokenizer.characters == len(so_far)


def test_other_decoders_are_told_apart(tmp_path):
    def family(decoder: object) -> str:
        tokenizer = Tokenizer(models.BPE({"a": 0, "▁a": 1}, [("▁", "a")][:0]))
        if decoder is not None:
            tokenizer.decoder = decoder
        opened_one = TextTokenizer.open(write_folder(tmp_path, tokenizer, CONFIG))
        assert opened_one is not None
        return opened_one.form.family

    one, fall, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    assert family(None) == "opaque"
    assert family(decoders.Sequence([decoders.ByteLevel(), fuse])) == "byte_level"
    assert family(decoders.Sequence([one, fall, fuse])) == "byte_fallback"
    assert family(decoders.Sequence([fall, one, fuse])) == "opaque"
    assert family(decoders.Sequence([one, fall, decoders.Strip(" ", 1, 0)])) == "opaque"
    assert family(decoders.Sequence([one, fall, fuse, decoders.Strip(" ", 1, 1)])) == "opaque"
    assert family(decoders.Sequence([fall, decoders.Metaspace()])) == "opaque"
    assert family(decoders.CTC()) == "opaque"


@pytest.mark.parametrize("strip", [0, 1, 3])
def test_as_many_spaces_are_taken_off_the_beginning_as_the_decoder_says(tmp_path, strip):
    tokenizer = llama()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", strip, 0),
        ]
    )
    ours = TextTokenizer.open(write_folder(tmp_path, tokenizer, CONFIG))
    assert ours is not None
    space, byte, letter = (ours.token_id(text) for text in ("▁", "<0x20>", "a"))
    for tokens in (
        [space] * 5,
        [space, byte, space, letter, space],
        [byte, byte, letter, byte],
        [letter, space],
        [byte] * 6,
    ):
        out = pieces(ours, tokens, [1] * len(tokens), True)
        assert "".join(out) == ours.decode(tokens)


def test_an_added_token_with_letters_of_the_byte_alphabet_is_decoded_alike(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("Ġé"), AddedToken("a b")])
    ours = TextTokenizer.open(write_folder(tmp_path, tokenizer, CONFIG))
    assert ours is not None
    tokens = ours.encode("x Ġé a b é y")
    assert ours.token_id("Ġé") in tokens
    assert "".join(pieces(ours, tokens, [1] * len(tokens), True)) == ours.decode(tokens)


def test_a_window_gives_up_waiting_for_a_character_that_never_ends(tmp_path):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("^", "^")])
    ours = TextTokenizer.open(write_folder(tmp_path, tokenizer, CONFIG))
    assert ours is not None
    assert ours.form.family == "opaque"
    detokenizer = Detokenizer(ours)
    out = [detokenizer.push([ours.token_id("ÿ")]) for _ in range(100)]
    assert "".join(out) + detokenizer.finish() == "\ufffd" * 100
    assert sum(map(bool, out)) == 3
