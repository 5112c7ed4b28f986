"""The connector's halves under an engine that checks every page, and inside vLLM itself.

The tests inside vLLM run with the Python of ``$SERVING_TWIN_VLLM_PYTHON``; see docs/vllm.md.
"""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from runtime.store.errors import StoreSetupError, StoreUnavailableError
from runtime.store.store import open_store
from runtime.store.vllm_identity import (
    check_supported,
    extra_bytes,
    heads_text,
    joined_salt,
    layers_text,
    layout_text,
    weights_digest,
)
from runtime.store.vllm_settings import ConnectorSettings
from tests.runtime.store.vllm_engine import NUM_PAGES, PAGE_TOKENS, Engine, Request, lora

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", dram="1MiB", block_bytes="1KiB") as store:
        yield store


@pytest.fixture
def new_engine():
    engines = []

    def make(opener, **settings):
        engines.append(Engine(opener, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(name, count=30, seed=0, **fields):
    return Request(name, [(seed * 97 + i * i) % 501 for i in range(count)], **fields)


# --- what is loaded is what was stored ---------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [0, 4, 8])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_a_second_engine_loads_what_the_first_computed(store, new_engine, block_tokens, chunk):
    first, second = (new_engine(lambda: store, block_tokens=block_tokens) for _ in range(2))
    assert first.serve(prompt("a"), chunk=chunk) == 0
    first.settle()
    size = block_tokens or PAGE_TOKENS
    assert second.serve(prompt("b"), chunk=chunk) == 29 // size * size
    assert second.count("loaded_blocks") == 29 // size


def test_one_token_is_always_left_to_compute(store, new_engine):
    engine = new_engine(lambda: store)
    engine.serve(prompt("a", 32))
    engine.settle()
    assert engine.serve(prompt("b", 32)) == 28
    assert engine.serve(prompt("c", 33)) == 32


def test_blocks_that_filled_while_decoding_are_found_by_the_next_turn(store, new_engine):
    engine = new_engine(lambda: store)
    turn = prompt("a", 10)
    engine.serve(turn, answer_tokens=12)  # the keys of the last token are never computed
    engine.settle()
    following = Request("b", [*turn.all_token_ids, 7, 8, 9])
    assert engine.serve(following) == 20


def test_answers_are_not_stored_when_asked_not_to(store, new_engine):
    engine = new_engine(lambda: store, stores_generated=False)
    turn = prompt("a", 10)
    engine.serve(turn, answer_tokens=12)
    engine.settle()
    assert engine.serve(Request("b", [*turn.all_token_ids, 7, 8, 9])) == 8


def test_pages_of_the_engines_own_cache_are_stored_and_never_written(store, new_engine):
    engine = new_engine(lambda: store)
    engine.serve(prompt("a"), local_tokens=16)
    engine.settle()
    other = new_engine(lambda: store, block_tokens=8)
    other.serve(prompt("c"))
    other.settle()
    assert engine.serve(prompt("b"), local_tokens=12) == 16
    assert other.serve(prompt("d"), local_tokens=12) == 12  # its first block is half local
    assert engine.count("loaded_blocks") == 4


def test_what_is_stored_already_is_not_copied_again(store, new_engine):
    engine = new_engine(lambda: store)
    for name in "abc":
        engine.serve(prompt(name))
        engine.settle()
    assert engine.count("saved_blocks") == 7
    assert store.stats()["counters"]["blocks_stored"] == 7


def test_a_preempted_request_loads_its_own_blocks(store, new_engine):
    engine = new_engine(lambda: store)
    request = prompt("a")
    engine.admit(request)
    engine.compute(request, 22)
    engine.settle()
    engine.preempt(request)
    assert engine.admit(request) == 20
    engine.compute(request, 8)
    engine.finish(request)
    engine.settle()
    assert engine.serve(prompt("b", 40)) == 28


def test_requests_of_many_lengths_steps_and_preemptions_always_get_their_own_blocks(
    store, new_engine
):
    rng = np.random.default_rng(0)
    engines = [new_engine(lambda: store, block_tokens=size) for size in (4, 8)]
    loaded = 0
    for i in range(60):
        engine = engines[i % 2]
        request = prompt(f"{i}", int(rng.integers(1, 60)), int(rng.integers(3)))
        cut = int(rng.integers(0, 3))
        if cut == 0:
            engine.admit(request)
            engine.compute(request, 1)
            engine.preempt(request)
        local = PAGE_TOKENS * int(rng.integers(0, (len(request.all_token_ids) - 1) // 4 + 1))
        loaded += engine.serve(
            request,
            int(rng.integers(0, 10)),
            chunk=int(rng.integers(1, 20)),
            local_tokens=local if cut == 1 else 0,
        )
    assert loaded > 200
    assert all(len(engine.free_pages) == NUM_PAGES for engine in engines)


def test_a_block_that_fills_in_the_last_step_is_stored_before_its_pages_go(store, new_engine):
    engine = new_engine(lambda: store)
    request = prompt("a", 10)
    engine.admit(request)
    engine.compute(request, 10)
    for token in range(6):
        engine.compute_ahead(request, token)
    engine.finish(request)
    engine.settle()
    assert engine.serve(Request("b", [*request.all_token_ids, 9])) == 16


def test_tokens_that_are_scheduled_and_not_known_are_in_no_block(store, new_engine):
    engine = new_engine(lambda: store)
    request = prompt("a", 10)
    engine.admit(request)
    engine.compute(request, 10)
    for token in range(8):
        engine.compute_ahead(request, token)
        engine.settle()
        known = 10 + token  # when the step was scheduled
        assert store.stats()["gauges"]["memory_blocks"] == known // PAGE_TOKENS
    engine.finish(request)


# --- who shares with whom ----------------------------------------------------------------------


def test_two_salts_share_nothing_and_one_salt_shares_with_itself(store, new_engine):
    engine = new_engine(lambda: store)
    engine.serve(prompt("a", cache_salt="x"))
    engine.settle()
    assert engine.serve(prompt("b", cache_salt="y")) == 0
    assert engine.serve(prompt("c")) == 0
    assert engine.serve(prompt("d", cache_salt="x")) == 28
    assert new_engine(lambda: store, salt="x").serve(prompt("e")) == 28
    assert new_engine(lambda: store, salt="x").serve(prompt("f", cache_salt="x")) == 0


def test_joined_salts_of_other_pairs_differ():
    pairs = [("ab", "c"), ("a", "bc"), ("abc", None), ("", "abc")]
    assert len({joined_salt(*pair) for pair in pairs}) == 3  # either alone is used as it is


def test_an_image_in_a_block_tells_prompts_apart_from_there_on(store, new_engine):
    def extra_keys(request, start, end, media):
        return (request.media if start <= 9 < end else None), media

    engine = new_engine(lambda: store, extra_keys=extra_keys)
    engine.serve(prompt("a", media=(("mm", "cat", 1),)))
    engine.settle()
    assert engine.serve(prompt("b", media=(("mm", "dog", 1),))) == 8
    assert engine.serve(prompt("c", media=(("mm", "cat", 1),))) == 28


def test_what_has_no_bytes_is_not_stored(store, new_engine):
    engine = new_engine(lambda: store)
    engine.serve(prompt("a", media=(("sound", object()),)))
    engine.settle()
    assert store.stats()["gauges"]["memory_blocks"] == 0
    assert engine.count("requests_not_stored") == 1


def test_the_salt_and_the_adapters_name_are_no_part_of_a_blocks_extra():
    assert extra_bytes([("lora", "n", "p"), ("cache_salt", "s")]) == extra_bytes(None) == b""
    assert extra_bytes([("mm", "a", 1), ("lora", "n", "p")]) == extra_bytes([("mm", "a", 1)]) != b""


def test_adapters_are_told_apart_by_their_files(store, new_engine, tmp_path):
    for name, weights in (("one", b"1"), ("two", b"2"), ("copy", b"1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
    engine = new_engine(lambda: store)
    engine.serve(prompt("a", lora_request=lora(tmp_path / "one")))
    engine.settle()
    assert engine.serve(prompt("b", lora_request=lora(tmp_path / "two", number=2))) == 0
    assert engine.serve(prompt("c", lora_request=lora(tmp_path / "copy", number=3))) == 28
    assert engine.serve(prompt("d")) == 0


@pytest.mark.parametrize("kind", ["absent", "in place", "session"])
def test_a_request_that_cannot_be_named_is_served_and_not_stored(store, new_engine, tmp_path, kind):
    engine = new_engine(lambda: store)
    fields = {
        "absent": {"lora_request": lora(tmp_path / "nowhere")},
        "in place": {"lora_request": lora(tmp_path, load_inplace=True)},
        "session": {"resumable": True},
    }[kind]
    for name in "ab":
        assert engine.serve(prompt(name, **fields)) == 0
    assert store.stats()["gauges"]["memory_blocks"] == 0


def test_all_ranks_load_as_much_as_the_rank_that_holds_least(store, new_engine):
    pair = new_engine(lambda: store, ranks=2)
    pair.serve(prompt("a"))
    pair.settle()
    assert pair.serve(prompt("b")) == 28
    new_engine(lambda: store, ranks=1).serve(prompt("c", seed=1))  # rank 0's part alone
    assert new_engine(lambda: store, ranks=1).serve(prompt("d", seed=1)) == 28
    assert pair.serve(prompt("e", seed=1)) == 0
    assert pair.count("load_failed_blocks") == 0  # nothing was promised


def test_after_a_reset_nothing_stored_before_is_saved_or_loaded_under_way(store, new_engine):
    engine = new_engine(lambda: store)
    request = prompt("a")
    engine.admit(request)
    engine.scheduler.forget()
    engine.compute(request, 30)
    engine.finish(request)
    engine.settle()
    assert store.stats()["gauges"]["memory_blocks"] == 0


# --- faults ------------------------------------------------------------------------------------


class Faulty:
    """A store in front of another, with one fault.

    Attributes:
        hang: Set once a load hangs.
        go_on: To be set for what hangs to go on.
        fault: What is wrong now.
        next_store: Takes the place of the other when the next load begins.
        calls: How many there were.
    """

    def __init__(self, store):
        self._store = store
        self.hang = threading.Event()
        self.go_on = threading.Event()
        self.fault = ""
        self.next_store = None
        self.calls = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def _fail_if(self, fault):
        if self.fault == fault:
            raise ZeroDivisionError

    def lookup(self, keys, **options):
        self.calls += 1
        self._fail_if("lookups fail")
        if self.fault == "lookups hang":
            self.go_on.wait(30)
        return self._store.lookup(keys, **options)

    def load(self, keys, **options):
        self.calls += 1
        self._fail_if("loads fail")
        if self.next_store is not None:
            self._store, self.next_store = self.next_store, None
        found = self._store.load(keys[:2] if self.fault == "loads are short" else keys, **options)
        if self.fault == "leases are short":
            return SimpleNamespace(
                views=found.views,
                leading=found.leading,
                still_valid=lambda: 1,
                close=found.close,
            )
        if self.fault == "loads hang":
            self.hang.set()
            self.go_on.wait(30)
        return found

    def put(self, keys, blocks, **options):
        self.calls += 1
        self._fail_if("puts fail")
        if self.fault == "gone":
            self._store.counters.add("unavailable")
            return SimpleNamespace(stored=0, reason="unavailable")
        return self._store.put(keys, blocks, **options)


@pytest.fixture
def faulty(store):
    faulty = Faulty(store)
    yield faulty
    faulty.go_on.set()


def test_a_load_that_finds_less_than_was_promised_is_computed_from_there(faulty, new_engine):
    engine = new_engine(lambda: faulty)
    engine.serve(prompt("a"))
    engine.settle()
    faulty.fault = "loads are short"
    assert engine.serve(prompt("b")) == 8
    assert engine.count("load_failed_blocks") == 5


def test_blocks_held_longer_than_their_lease_are_computed(faulty, new_engine):
    engine = new_engine(lambda: faulty)
    engine.serve(prompt("a"))
    engine.settle()
    faulty.fault = "leases are short"
    assert engine.serve(prompt("b")) == 4


def test_blocks_that_were_lost_are_stored_again(store, new_engine, tmp_path):
    faulty = Faulty(store)
    engine = new_engine(lambda: faulty)
    engine.serve(prompt("a"))
    engine.settle()
    with open_store(tmp_path / "empty", dram="1MiB", block_bytes="1KiB") as empty:
        faulty.next_store = empty
        assert engine.serve(prompt("b")) == 0  # lost between lookup and load
        engine.settle()
        assert engine.serve(prompt("c")) == 28


def test_a_preempted_request_saves_from_its_new_pages_only(faulty, new_engine):
    engine, other = (new_engine(lambda: faulty, retry_s=0.01) for _ in range(2))
    request = prompt("a")
    engine.admit(request)
    faulty.fault = "gone"
    engine.compute(request, 22)
    engine.settle()
    engine.preempt(request)
    faulty.fault = ""
    other.serve(prompt("b", 13))
    other.settle()
    for guard in engine.guards:
        _wait(lambda guard=guard: not guard.is_suspended)
    assert engine.admit(request) == 12
    engine.compute(request, 18)
    engine.finish(request)
    engine.settle()
    assert other.serve(prompt("c")) == 28


def test_a_load_that_hangs_ends_by_its_deadline_and_writes_nothing_later(faulty, new_engine):
    engine = new_engine(lambda: faulty, deadline_s=0.2)
    engine.serve(prompt("a"))
    engine.settle()
    faulty.fault = "loads hang"
    assert engine.serve(prompt("b")) == 0
    assert faulty.hang.is_set()
    assert engine.count("loads_late") == 1
    before = {name: cache.clone() for name, cache in engine.caches[0].items()}
    faulty.go_on.set()
    engine.workers[0]._loader.submit(lambda: None).result(30)
    engine.close()
    assert all(bool((engine.caches[0][n] == cache).all()) for n, cache in before.items())


def test_a_lookup_that_hangs_ends_by_its_deadline_and_the_next_is_not_tried(faulty, new_engine):
    engine = new_engine(lambda: faulty, lookup_deadline_s=0.05, retry_s=60.0)
    faulty.fault = "lookups hang"
    assert engine.serve(prompt("a")) == 0
    assert engine.serve(prompt("b")) == 0
    assert (engine.count("lookups_late"), faulty.calls) == (1, 1)


@pytest.mark.parametrize("fault", ["lookups fail", "loads fail", "puts fail"])
def test_a_fault_nobody_thought_of_is_a_miss_and_is_counted(faulty, new_engine, fault):
    engine = new_engine(lambda: faulty, retry_s=0.01)
    engine.serve(prompt("a"))
    engine.settle()
    faulty.fault = fault
    assert engine.serve(prompt("b", 40), answer_tokens=8) == (28 if fault == "puts fail" else 0)
    engine.settle()
    assert engine.count("store_errors") >= 1


def test_an_absent_store_costs_one_attempt_and_no_request(new_engine):
    attempts = []

    def opener():
        attempts.append(time.monotonic())
        raise StoreUnavailableError("nobody there")

    engine = new_engine(opener, retry_s=60.0)
    for i in range(5):
        assert engine.serve(prompt(f"{i}"), answer_tokens=9) == 0
    assert len(attempts) <= len(engine.guards)
    assert engine.count("store_errors") == len(attempts)


def test_a_store_that_comes_back_is_used_again(store, new_engine):
    is_there = threading.Event()

    def opener():
        if not is_there.is_set():
            raise StoreUnavailableError("not yet")
        return store

    engine = new_engine(opener, retry_s=0.01)
    engine.serve(prompt("a"))
    is_there.set()
    for _ in range(200):
        engine.serve(prompt("b"))
        engine.settle()
        if engine.serve(prompt("c")) == 28:
            break
        time.sleep(0.01)
    assert engine.serve(prompt("d")) == 28


def test_blocks_not_taken_while_the_store_was_away_are_taken_later(faulty, new_engine):
    engine = new_engine(lambda: faulty, retry_s=0.01)
    request = prompt("a")
    engine.admit(request)
    faulty.fault = "gone"
    engine.compute(request, 13)
    engine.settle()
    faulty.fault = ""
    for guard in engine.guards:
        _wait(lambda guard=guard: not guard.is_suspended)
    engine.compute(request, 17)
    engine.finish(request)
    engine.settle()
    assert engine.count("unsaved_error") >= 3
    assert engine.serve(prompt("b")) == 28


def test_a_full_store_keeps_leading_blocks_and_the_engine_goes_on(tmp_path, new_engine):
    with open_store(tmp_path / "small", dram="4KiB", block_bytes="1KiB") as store:
        engine = new_engine(lambda: store)
        for i in range(12):
            loaded = engine.serve(prompt(f"{i}", 50, seed=i))
            engine.settle()
            assert loaded == 0
        assert store.stats()["gauges"]["memory_blocks"] <= 4
        assert store.stats()["gauges"]["pinned_blocks"] == 0


def test_a_request_aborted_while_loading_lets_its_pages_go_after_the_load(store, new_engine):
    engine = new_engine(lambda: store)
    engine.serve(prompt("a"))
    engine.settle()
    request = prompt("b")
    while (tokens := engine.scheduler.matched_tokens(request, 0)[0]) is None:
        engine.step({})
    engine.pages["b"] = [engine.free_pages.pop() for _ in range(9)]
    engine.scheduler.allocated(request, tokens)
    request.num_computed_tokens = tokens
    orders = engine.scheduler.step({}, is_idle=True)
    assert engine.scheduler.finished(request, engine.pages["b"]) is False
    engine.workers[0].start_loads(orders)
    received = set()
    for _ in range(2000):
        received |= engine.workers[0].poll(["b"], is_idle=True)[1]
        if received:
            break
    assert received == {"b"}


def _wait(check):
    for _ in range(3000):
        if check():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


# --- names and settings ------------------------------------------------------------------------


def test_one_bit_of_the_weights_makes_another_digest(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    before = weights_digest(str(tmp_path), None)
    weights.write_bytes(bytes(999) + b"\1")
    assert weights_digest(str(tmp_path), None) != before


def test_a_commit_names_a_checkpoint_that_is_not_at_hand():
    assert weights_digest("org/name", "a" * 40) == "a" * 40
    for revision in (None, "main"):
        with pytest.raises(StoreSetupError, match="revision"):
            weights_digest("org/name", revision)


@pytest.mark.parametrize(("heads", "ranks"), [(8, 1), (8, 2), (8, 8), (2, 8), (1, 4)])
def test_ranks_hold_all_heads_between_them(heads, ranks):
    held = [tuple(map(int, heads_text(heads, ranks, r).split("-"))) for r in range(ranks)]
    covered = [head for first, last in dict.fromkeys(held) for head in range(first, last + 1)]
    assert covered == list(range(heads))


def test_parts_of_a_model_and_packings_have_names_of_their_own():
    parts = [["m.0.attn", "m.1.attn"], ["m.2.attn"], ["draft.0.attn", "draft.1.attn"], ["x"]]
    assert len({layers_text(part) for part in parts}) == len(parts)
    usual = {
        "engine_version": "1",
        "backends": ["A"],
        "device": "cuda",
        "page_tokens": 16,
    }
    others = [
        {"engine_version": "2"},
        {"backends": ["B"]},
        {"device": "cpu"},
        {"page_tokens": 32},
    ]
    texts = {layout_text("s", **{**usual, **other}) for other in [{}, *others]}
    assert len(texts | {layout_text("t", **usual)}) == 6


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "either socket or directory"),
        ({"socket": "s", "directory": "d"}, "both"),
        ({"socket": "s", "sokcet": "s"}, "'sokcet'"),
        ({"socket": 3}, "socket: must be a str"),
        ({"socket": "s", "salt": 12345}, "salt: must be a str, found int"),
        ({"socket": "s", "deadline_s": 0}, "deadline_s"),
        ({"socket": "s", "deadline_s": "soon"}, "deadline_s"),
        ({"socket": "s", "staging_bytes": "much"}, "staging_bytes"),
        ({"socket": "s", "block_tokens": -4}, "block_tokens"),
        ({"socket": "s", "stores_generated": 1}, "stores_generated"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(extra, text):
    with pytest.raises(StoreSetupError, match=text) as caught:
        ConnectorSettings.from_extra(extra)
    assert "12345" not in str(caught.value)


def test_store_blocks_are_whole_engine_blocks():
    assert ConnectorSettings(socket="s", block_tokens=64).pages_per_block(16) == 4
    with pytest.raises(StoreSetupError, match="multiple of the engine's 16"):
        ConnectorSettings(socket="s", block_tokens=24).pages_per_block(16)


class FullAttentionSpec:
    non_causal = False


class SlidingWindowSpec:
    pass


def _config(**changes):
    groups = changes.pop("groups", [SimpleNamespace(kv_cache_spec=FullAttentionSpec())])
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        speculative_config=None,
    )
    for path, value in changes.items():
        section, _, name = path.partition("__")
        setattr(getattr(config, section) if name else config, name or section, value)
    return config, SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "recompute"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"cache_config__cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        (
            {"cache_config": SimpleNamespace(cache_dtype="fp8", calculate_kv_scales=True)},
            "calculate_kv_scales",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "eagle"),
        ({"groups": [SimpleNamespace(kv_cache_spec=SlidingWindowSpec())]}, "SlidingWindowSpec"),
        ({"groups": [SimpleNamespace(kv_cache_spec=FullAttentionSpec())] * 2}, "2 groups"),
    ],
)
def test_what_cannot_be_stored_whole_is_refused_with_the_setting_to_change(changes, text):
    check_supported(*_config())
    with pytest.raises(StoreSetupError, match=text):
        check_supported(*_config(**changes))


# --- inside vLLM -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def inside_vllm(tmp_path_factory):
    """``inside_vllm("server")``: what the scenario of vllm_inside.py wrote."""
    python = os.environ.get("SERVING_TWIN_VLLM_PYTHON", "")
    if not python and importlib.util.find_spec("vllm") is not None:
        python = sys.executable
    if not python:
        pytest.skip("no vLLM here: set SERVING_TWIN_VLLM_PYTHON to a Python that has it")

    def run(scenario):
        folder = tmp_path_factory.mktemp(scenario)
        script = Path(__file__).with_name("vllm_inside.py")
        with (folder / "log.txt").open("w") as log:
            code = subprocess.run(
                [python, script, folder, scenario],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=900,
                check=False,
            ).returncode
        assert code == 0, (folder / "log.txt").read_text()[-4000:]
        return json.loads((folder / "result.json").read_text())

    return run


def _count(run, name):
    return run["counts"].get(f"vllm:{name}", 0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_vllm_answers_alike_with_a_store_that_is_warm_salted_broken_hanging_or_dead(inside_vllm):
    result = inside_vllm("server")
    prompt_tokens, block_tokens = 200, 32
    hit = (prompt_tokens - 1) // block_tokens * block_tokens
    cold, warm = result["cold"], result["warm"]
    assert result["is_kept"]
    assert _count(cold, "external_prefix_cache_hits") == 0
    assert _count(warm, "external_prefix_cache_hits") == hit
    assert _count(warm, "ptstore_loaded_blocks") == hit // block_tokens
    assert result["store_after_warm"]["hits"] == hit // block_tokens
    # The answer's blocks are found too.
    assert _count(result["next_turn"], "external_prefix_cache_hits") == 256

    assert _count(result["salt_a"], "external_prefix_cache_hits") == 0
    assert _count(result["salt_b"], "external_prefix_cache_hits") == 0
    assert _count(result["salt_a_again"], "external_prefix_cache_hits") == hit

    assert result["flipped"] > 0
    assert result["broken"] > 0
    assert _count(result["corrupted"], "ptstore_load_failed_blocks") > 0
    assert _count(result["hanging"], "ptstore_store_errors") > 0
    assert _count(result["back"], "external_prefix_cache_hits") == hit
    after_kill = (result["killed_midway"], result["without"])
    assert sum(_count(run, "ptstore_store_errors") for run in after_kill) > 0
    assert _count(result["without"], "external_prefix_cache_hits") == 0

    computed = result["without"]["answers"]
    for name in ("cold", "warm", "salt_a", "salt_b", "salt_a_again", "corrupted"):
        assert result[name]["answers"] == computed[:1], name
    assert result["hanging"]["answers"] == computed[:2]
    assert result["killed_midway"]["answers"] == computed[2:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_restarted_vllm_finds_what_it_stored_in_its_own_folder(inside_vllm):
    result = inside_vllm("folder")
    assert _count(result["cold"], "external_prefix_cache_hits") == 0
    assert _count(result["after_restart"], "external_prefix_cache_hits") == 192
    assert result["after_restart"]["answers"] == result["cold"]["answers"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_of_a_vllm_find_the_parts_they_stored(inside_vllm):
    result = inside_vllm("ranks")
    assert result["blocks"] == 2 * (259 // 64)
    assert _count(result["cold"], "external_prefix_cache_hits") == 0
    assert _count(result["warm"], "external_prefix_cache_hits") == 192
    assert _count(result["warm"], "ptstore_loaded_blocks") == 2 * 3
    assert result["warm"]["answers"] == result["cold"]["answers"]
