"""Decision logs of the precision policy: a random episode replays; a changed entry is found."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from models.streams import stream
from policies.precision import PrecisionPolicy
from policies.precision_log import LoggedPrecision
from policies.precision_state import PrecisionSettings, PrecisionState
from policies.precision_tables import block_tables
from traces.decisions import DecisionLog
from traces.errors import TraceError
from twin.replay import replay_log

BLOCKS, PAGE, ARENA = 60, 1024, 3600
BITS = np.arange(2, 9)
NUM_STEPS = 160


class Episode:
    """A KV cache that breathes, drops that commit at once, raises that land late or fail."""

    def __init__(self, seed: int, planner: str) -> None:
        self.rng = stream(seed, "episode")
        damage = self.rng.lognormal(0, 1, BLOCKS)[:, None] * 4.0**-BITS
        tables = block_tables(np.tile(8 * PAGE * BITS, (BLOCKS, 1)), damage, BITS)
        settings = PrecisionSettings(
            planner=planner, plan_interval_s=0.2, link_bytes_per_s=2e6, calm_steps=8
        )
        policy = PrecisionPolicy(tables, arena_pages=ARENA, page_bytes=PAGE, settings=settings)
        self.log = DecisionLog()
        self.policy = LoggedPrecision(policy, self.log)
        self.bits = np.full(BLOCKS, 4)
        self.desired = self.bits.copy()
        self.retry = np.zeros(BLOCKS, dtype=np.int64)
        self.mass = np.ones(BLOCKS)
        self.kv_pages = 1000
        self.reasons: list[str] = []

    def run(self) -> "Episode":
        for step in range(NUM_STEPS):
            self._live(step)
            now = 0.05 * step
            asked = int(self.rng.integers(0, 60))
            spare = ARENA - self.kv_pages - 8 * int(self.desired.sum())
            if asked > spare:
                decision = self.policy.on_allocation_failed(self._state(step), asked, now=now)
                self._carry_out(decision)
            self._carry_out(self.policy.decide(self._state(step), now=now))
        return self

    def _live(self, step: int) -> None:
        wave = 1000 + 700 * np.sin(step / 12) + self.rng.integers(-60, 60)
        self.kv_pages = min(int(wave), ARENA - 8 * int(self.desired.sum()))
        if step % 4 == 0:
            touched = self.rng.integers(0, BLOCKS, 8)
            self.mass[touched] = self.rng.lognormal(0, 1, 8)
        landed = (self.desired > self.bits) & (self.rng.random(BLOCKS) < 0.5)
        failed = landed & (self.rng.random(BLOCKS) < 0.1)
        self.retry[failed] = step + 4
        self.desired[failed] = self.bits[failed]
        self.bits[landed] = self.desired[landed]

    def _carry_out(self, decision) -> None:
        self.reasons.append(decision.reason)
        for blocks, bits in (decision.orders.drops, decision.orders.raises):
            self.desired[blocks] = bits
        self.bits = np.minimum(self.bits, self.desired)

    def _state(self, step: int) -> PrecisionState:
        return PrecisionState(
            step=step,
            bits=self.bits,
            desired_bits=self.desired,
            hot_floor_bits=np.where(self.mass > 3.0, 4, 2),
            pinned=np.arange(BLOCKS) == 7,
            retry_step=self.retry,
            mass_multiplier=self.mass,
            prompt_multiplier=np.ones(BLOCKS),
            kv_pages=self.kv_pages,
            forecast_pages=40,
            copying_bytes=8 * PAGE * int(np.maximum(self.desired - self.bits, 0).sum()),
        )


@pytest.fixture(scope="module")
def episode() -> Episode:
    return Episode(1, "hull").run()


@pytest.fixture
def log_path(episode: Episode, tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(episode.log.to_bytes())
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewrite(path: Path, content: list[dict]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in content)
    path.write_bytes(gzip.compress(text.encode()))


def test_the_episode_sees_every_kind_of_decision(episode):
    assert {"none", "shrink", "emergency", "restore", "exchange"} <= set(episode.reasons)
    assert episode.bits[7] == 4  # pinned
    assert (episode.bits >= 2).all()


@pytest.mark.parametrize("planner", ["hull", "greedy", "uniform"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_random_episode_replays_with_the_same_orders(tmp_path, planner, seed):
    path = tmp_path / "decisions.jsonl.gz"
    log = Episode(seed, planner).run().log
    path.write_bytes(log.to_bytes())
    found = replay_log(path)
    assert found.difference is None
    assert found.num_calls == len(log.decisions) >= NUM_STEPS


def test_a_log_holds_what_has_changed_not_whole_tables(episode):
    quiet = [d for d in episode.log.decisions[1:] if d.orders["reason"] == "none"]
    assert quiet
    sizes = sorted(len(json.dumps(dict(d.args))) for d in quiet)
    whole = len(json.dumps([0] * BLOCKS)) * 7
    assert sizes[len(sizes) // 2] < 7 * 200 + whole / 4
    pinned = [d.args["pinned"] for d in episode.log.decisions]
    assert [len(entry["changed"]) for entry in pinned] == [1] + [0] * (len(pinned) - 1)


@pytest.mark.parametrize("kind", ["drops", "raises"])
def test_one_changed_order_is_found_at_its_call(log_path, kind):
    content = lines(log_path)
    call = next(n for n, line in enumerate(content[1:]) if line["orders"]["orders"][kind][0])
    content[call + 1]["orders"]["orders"][kind][1][0] += 1
    rewrite(log_path, content)
    found = replay_log(log_path)
    assert found.difference is not None
    assert (found.difference.n, found.num_calls) == (call, call + 1)


def test_a_changed_expectation_is_found_too(log_path):
    content = lines(log_path)
    call = next(n for n, line in enumerate(content[1:]) if line["orders"]["damage"] is not None)
    content[call + 1]["orders"]["damage"] *= 1 + 1e-12
    rewrite(log_path, content)
    assert replay_log(log_path).difference.n == call


def changed(entry: dict) -> dict:
    return {**entry, "values": [value + 1 for value in entry["values"]] or [1]}


TAMPERED = {
    "an array entry": (lambda args: args.update(bits=changed(args["bits"])), "bits"),
    "a hash": (lambda args: args["bits"].update(sha256="0" * 64), "its hash says"),
    "no array": (lambda args: args.update(pinned=[True]), "pinned must be an array entry"),
    "another type": (lambda args: args["pinned"].update(dtype="object"), "dtype or size"),
    "an index outside": (
        lambda args: args["retry_step"].update(changed=[BLOCKS], values=[1]),
        "changed names no entries",
    ),
    "text for numbers": (
        lambda args: args["mass_multiplier"].update(values="x"),
        "must be a list of float64",
    ),
    "a fraction": (lambda args: args.update(kv_pages=1.5), "kv_pages must be a whole number"),
    "a missing count": (lambda args: args.pop("step"), "'step'"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_damaged_arguments_are_refused(log_path, name):
    change, said = TAMPERED[name]
    content = lines(log_path)
    change(content[1]["args"])
    rewrite(log_path, content)
    with pytest.raises(TraceError, match=r"call 0: arguments of decide are damaged") as caught:
        replay_log(log_path)
    assert said in str(caught.value)


def test_a_call_left_out_of_a_chain_of_changes_is_noticed(log_path):
    content = lines(log_path)
    call = next(n for n, line in enumerate(content[2:], 2) if line["args"]["bits"]["changed"])
    header, calls = content[0], [*content[1:call], *content[call + 1 :]]
    for n, line in enumerate(calls):
        line["n"] = n
    rewrite(log_path, [{**header, "calls": len(calls)}, *calls])
    try:
        assert replay_log(log_path).difference is not None
    except TraceError as error:
        assert "its hash says that it or one before it was changed" in str(error)


BAD_RECIPES = {
    "settings": ({"settings": {"planner": "hull"}}, "settings:"),
    "planner": ({"settings": None}, "recipe"),
    "damage": ({"damage": [[1.0]]}, "recipe"),
    "arena": ({"arena_pages": "many"}, "recipe"),
    "sizes": ({"size_of_block": [10**6]}, "recipe"),
    "bits": ({"bits": [8, 2]}, "bits must be ascending"),
}


@pytest.mark.parametrize("name", BAD_RECIPES)
def test_a_damaged_recipe_is_refused(log_path, name):
    change, said = BAD_RECIPES[name]
    header, *calls = lines(log_path)
    header["policies"]["precision"].update(change)
    rewrite(log_path, [header, *calls])
    with pytest.raises(TraceError, match=r"decisions\.jsonl\.gz:1: policies: recipe") as caught:
        replay_log(log_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_full_log_counts_the_calls_it_leaves_out(tmp_path):
    episode = Episode(3, "hull")
    episode.log.max_calls = 20
    episode.run()
    path = tmp_path / "decisions.jsonl.gz"
    path.write_bytes(episode.log.to_bytes())
    found = replay_log(path)
    assert (found.num_calls, found.difference) == (20, None)
    assert found.num_left_out == len(episode.reasons) - 20
