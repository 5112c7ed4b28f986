import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.stops import StopFinder, StopStrings


def run(finder: StopFinder, parts: list[str]) -> tuple[list[str], str | None]:
    out, found = [], None
    for part in parts:
        text, found = finder.push(part)
        out.append(text)
        if found is not None:
            break
    return [*out, finder.finish()], found


def brute(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that is complete first, the longest of those, by looking everywhere."""
    places = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
    if not places:
        return text, None
    end = min(end for end, _ in places)
    stop = max((stop for at, stop in places if at == end), key=len)
    return text[: end if include else end - len(stop)], stop


LETTERS = "ab\nc😀"


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_text_in_any_pieces_ends_where_looking_everywhere_says(data):
    few = st.text(st.sampled_from(LETTERS), max_size=40)
    text = data.draw(few)
    stops = data.draw(
        st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=5), max_size=4)
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=15)))
    include = data.draw(st.booleans())
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out, found = run(StopFinder(stops, include), parts)
    assert ("".join(out), found) == brute(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_text_waits_only_while_it_may_begin_a_stop_string(data):
    stops = data.draw(
        st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=3)
    )
    finder, seen, given_out = StopFinder(stops), "", ""
    for character in data.draw(st.text(st.sampled_from("abc"), max_size=20)):
        text, found = finder.push(character)
        if found:
            return
        seen, given_out = seen + character, given_out + text
        held = seen[len(given_out) :]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if n and seen.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest
        assert seen == given_out + held


def test_a_stop_string_split_over_pieces_is_held_back():
    finder = StopFinder(["END"])
    assert finder.push("text E") == ("text ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("D and more") == ("", "END")
    assert finder.push("again") == ("", "END")
    assert finder.finish() == ""
    assert finder.found == "END"


def test_a_beginning_that_leads_nowhere_comes_out():
    finder = StopFinder(["END"])
    assert finder.push("E") == ("", None)
    assert finder.push("N") == ("", None)
    assert finder.push("x") == ("ENx", None)
    assert finder.push("E") == ("", None)
    assert finder.finish() == "E"


@pytest.mark.parametrize(
    ("stops", "text", "out", "found"),
    [
        (["aab", "aaab"], "xaaab", "x", "aaab"),
        (["aaab", "aab"], "xaaab", "x", "aaab"),
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["\n"], "one\ntwo", "one", "\n"),
        (["👨‍👩‍👧"], "a👨‍👩‍👧b", "a", "👨‍👩‍👧"),
        (["x", "x"], "axb", "a", "x"),
        (["aa"], "aaaa", "", "aa"),
        (["abab"], "abaabab", "aba", "abab"),
        ([], "anything", "anything", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_overlapping_stop_strings(stops, text, out, found, size):
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    pieces, which = run(StopFinder(stops), parts)
    assert ("".join(pieces), which) == (out, found)


def test_the_stop_string_can_be_part_of_the_answer():
    finder = StopFinder(["END"], include_stop=True)
    assert finder.push("a E") == ("a ", None)
    assert finder.push("NDx") == ("END", "END")


def test_empty_pieces_change_nothing():
    finder = StopFinder(["ab"])
    assert finder.push("") == ("", None)
    assert finder.push("a") == ("", None)
    assert finder.push("") == ("", None)
    assert finder.push("b") == ("", "ab")
    assert finder.push("") == ("", "ab")


def test_looking_ahead_changes_nothing():
    finder = StopFinder(["ab"])
    finder.push("a")
    assert finder.would_stop("b")
    assert not finder.would_stop("c")
    assert finder.push("c") == ("ac", None)
    assert not finder.would_stop("b")


def test_text_passed_over_does_not_stop():
    finder = StopFinder(["ab"])
    assert finder.push("a") == ("", None)
    assert finder.pass_over("bxab a") == "abxab a"
    assert finder.push("b") == ("b", None)
    assert finder.push("ab") == ("", "ab")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        StopFinder(["a", ""])


def test_finders_share_one_automaton():
    stops = StopStrings(["END", "STOP"])
    first, second = StopFinder(stops), StopFinder(stops)
    assert first.push("EN") == ("", None)
    assert second.push("STO") == ("", None)
    assert first.push("D") == ("", "END")
    assert second.push("P") == ("", "STOP")


def test_a_very_long_stop_string_is_followed_step_by_step():
    stop = "ab" * 5_000 + "c"
    finder = StopFinder([stop])
    out = "".join(finder.push("ab")[0] for _ in range(10_000))
    assert out == "ab" * 5_000
    assert finder.push("c") == ("", stop)
