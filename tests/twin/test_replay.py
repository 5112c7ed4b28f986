"""Decision logs: an honest one replays, a damaged one is refused, a changed order is found."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from models.streams import stream
from policies.catalog import routing_policy
from traces.decisions import DecisionLog
from traces.errors import TraceError
from twin.logged_routing import LoggedRouting
from twin.replay import replay_log

RECIPE = {
    "kind": "routing",
    "name": "power_of_two",
    "seed": 5,
    "stream": "routing",
    "replication": 0,
}
NUM_CALLS = 6


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    """The log of six calls of a random policy on three workers, one of them full."""
    log = DecisionLog(policies={"routing": dict(RECIPE)})
    policy = LoggedRouting(routing_policy("power_of_two", stream(5, "routing", 0)), log)
    for call in range(NUM_CALLS):
        policy.assign(
            np.array([10 + call, 700]),
            free_slots=np.array([3, 0, 2]),
            token_loads=np.array([100 * call, 50, 90]),
            now=0.5 * call,
        )
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewrite(path: Path, content: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in content)
    path.write_bytes(gzip.compress(text.encode()))


def test_an_honest_log_replays_without_difference(log_path):
    found = replay_log(log_path)
    assert (found.num_calls, found.num_left_out, found.difference) == (NUM_CALLS, 0, None)


def test_a_changed_order_is_found_at_its_call(log_path):
    content = lines(log_path)
    content[4]["orders"]["workers"] = [2 - worker for worker in content[4]["orders"]["workers"]]
    rewrite(log_path, content)
    found = replay_log(log_path)
    assert found.difference is not None
    assert (found.difference.n, found.num_calls) == (3, 4)


# what is done to the six calls, and what the message must say
TAMPERED = {
    "a call removed": (lambda calls: calls.pop(3), "holds 5 calls, but its first line says 6"),
    "all calls removed": (lambda calls: calls.clear(), "holds 0 calls"),
    "a call repeated": (lambda calls: calls.append(calls[-1]), "holds 7 calls"),
    "two calls swapped": (lambda calls: calls.insert(2, calls.pop(3)), ":4: n: must be 2, found 3"),
    "an unknown call": (lambda calls: calls[2].update(call="explode"), "no call 'explode'"),
    "another policy": (lambda calls: calls[2].update(policy="placement"), "no recipe for"),
    "a time before the start": (lambda calls: calls[0].update(now=-1), ":2: now: must be >= 0"),
    "a time that goes back": (lambda calls: calls[3].update(now=0.1), ":5: now: must be >= 1"),
    "a time that is none": (lambda calls: calls[3].update(now="soon"), ":5: now: damaged"),
    "a time without end": (lambda calls: calls[5].update(now=float("inf")), ":7: now: must be"),
    "an unknown field": (lambda calls: calls[1].update(mood="good"), ":3: mood: missing or unk"),
    "a missing field": (lambda calls: calls[1].pop("orders"), ":3: orders: missing or unknown"),
    "arguments as a list": (lambda calls: calls[1].update(args=[1]), ":3: args: damaged"),
}
BAD_ARGUMENTS = {
    "text": ({"free_slots": "x"}, "free_slots must be a list of whole numbers"),
    "no room": ({"free_slots": [0, 0, 0]}, "only 0 free slots"),
    "fewer workers": ({"free_slots": [3, 2]}, "name 2 and 3 workers"),
    "no workers": ({"free_slots": [], "token_loads": []}, "name 0 and 0 workers"),
    "a table": ({"prompt_tokens": {"a": 1}}, "prompt_tokens must be a list"),
    "fractions": ({"prompt_tokens": [1.5, 2]}, "prompt_tokens must be a list"),
    "negative": ({"token_loads": [1, 2, -3]}, "token_loads must be a list"),
    "huge": ({"token_loads": [1, 2, 10**30]}, "too large"),
    "nested": ({"token_loads": [[1], [2], [3]]}, "token_loads must be a list"),
}
BAD_HEADERS = {
    "seed": ({"policies": {"routing": {**RECIPE, "seed": "a"}}}, "recipe"),
    "stream": ({"policies": {"routing": {**RECIPE, "stream": None}}}, "recipe"),
    "name": ({"policies": {"routing": {**RECIPE, "name": ["random"]}}}, "recipe"),
    "kind": ({"policies": {"routing": {**RECIPE, "kind": "oracle"}}}, "unknown recipe"),
    "recipes": ({"policies": [1]}, "policies: missing or damaged"),
    "calls": ({"calls": "six"}, "calls: missing or damaged"),
    "left out": ({"calls_left_out": None}, "calls_left_out: missing or damaged"),
    "version": ({"version": 1}, "version: must be 2, found 1"),
}


def refused(path: Path, content: list[dict], said: str) -> None:
    rewrite(path, content)
    with pytest.raises(TraceError) as caught:
        replay_log(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TAMPERED)
def test_a_log_that_lacks_swaps_or_invents_calls_is_refused(log_path, name):
    change, said = TAMPERED[name]
    header, *calls = lines(log_path)
    change(calls)
    refused(log_path, [header, *calls], said)


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_damaged_arguments_are_refused(log_path, name):
    change, said = BAD_ARGUMENTS[name]
    content = lines(log_path)
    content[3]["args"].update(change)
    refused(log_path, content, said)


def test_a_missing_argument_is_refused(log_path):
    content = lines(log_path)
    del content[3]["args"]["free_slots"]
    refused(log_path, content, "call 2: arguments of assign are damaged: 'free_slots'")


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_damaged_header_is_refused(log_path, name):
    change, said = BAD_HEADERS[name]
    header, *calls = lines(log_path)
    refused(log_path, [{**header, **change}, *calls], said)


def test_a_cut_or_corrupt_file_is_refused(log_path):
    whole = log_path.read_bytes()
    for damaged in (whole[:-20], whole[:40] + b"\xff\xff\xff" + whole[43:], b"", b"\x1f\x8b"):
        log_path.write_bytes(damaged)
        with pytest.raises(TraceError, match=r"decisions\.jsonl\.gz"):
            replay_log(log_path)


BATCHING = {
    "kind": "batching",
    "name": "first_come",
    "settings": {"max_running": 4, "prefill_tokens": 16},
    "paging": {"block_tokens": 16, "whole_pages": 2, "windows": []},
}
BAD_RECIPES = {
    "no paging": ({"paging": None}, "'paging' is missing"),
    "a text for a number": (
        {"settings": {"max_running": "4", "prefill_tokens": 16}},
        "settings: max_running: must be a whole number, found '4'",
    ),
    "an unknown field": (
        {"settings": {"max_running": 4, "prefill_tokens": 16, "speed": 1}},
        "settings: speed: missing or unknown",
    ),
    "a number for a table": ({"paging": 3}, "a value is of the wrong type"),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_what_is_wrong_with_a_recipe_is_said_in_words(tmp_path, name):
    change, said = BAD_RECIPES[name]
    recipe = {key: value for key, value in {**BATCHING, **change}.items() if value is not None}
    log = DecisionLog(policies={"batching": recipe})
    log.record("batching", "cancel", {"sequence": 1}, None, now=0.0)
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(log.to_bytes())
    refused(path, lines(path), f"recipe of 'batching': {said}")
