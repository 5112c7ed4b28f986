"""Nodes that hang, part, lie or leave while others need them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.store.deadline import Deadline
from runtime.store.errors import StoreUnavailableError
from runtime.store.store import PrefixStore, connect
from tests.runtime.store.conftest import BLOCK, blocks, chain
from tests.runtime.store.faults.accounts import counter, right, settled
from tests.runtime.store.peer_nodes import Proxy
from tests.runtime.store.test_pool import Member, all_see, free_ports, owned_by, wait_until


class Wired:
    """Nodes that reach each other by proxies only."""

    def __init__(self, folder: Path, count: int, **settings: Any) -> None:
        names = [f"n{i}" for i in range(count)]
        self.folder, self.settings = folder, settings
        self.ports = dict(zip(names, free_ports(count), strict=True))
        # One proxy per direction: (who asks, who is asked).
        self.proxies = {(a, b): Proxy(self.ports[b]) for a in names for b in names if a != b}
        self.members = {name: self.start(name) for name in names}
        wait_until(self.all_live, "all nodes live")

    def start(self, name: str) -> Member:
        ports = {
            other: port if other == name else self.proxies[name, other].port
            for other, port in self.ports.items()
        }
        peers = ",".join(f"{n}=127.0.0.1:{p}" for n, p in ports.items())
        return Member(self.folder, name, peers, **self.settings)

    def all_live(self) -> bool:
        count = len(self.members)
        return all(len(m.node.state.weights) == count for m in self.members.values())

    def part(self, name: str, how: str) -> None:
        """Cut one node off: connections break, or nothing arrives any more."""
        for pair, proxy in self.proxies.items():
            if name in pair:
                if how == "cut":
                    proxy.part()
                else:
                    proxy.is_stopped = True

    def heal(self) -> None:
        for proxy in self.proxies.values():
            proxy.is_stopped = False
            proxy.heal()

    def agree(self) -> bool:
        """Whether every node's directory says the same of every node."""
        seen = [
            {
                (name, h.key, h.tier, h.is_owned)
                for name in self.members
                for h in one.node.state.directory.holdings(name)
            }
            for one in self.members.values()
        ]
        return all(one == seen[0] for one in seen)

    def stop(self) -> None:
        self.heal()
        for member in self.members.values():
            with contextlib.suppress(Exception):
                member.stop()
        for proxy in self.proxies.values():
            proxy.close()


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[Callable[..., Wired]]:
    made: list[Wired] = []

    def make(count: int = 2, **settings: Any) -> Wired:
        made.append(Wired(tmp_path, count, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_parted_nodes_serve_on_and_agree_again_when_healed(
    wired: Callable[..., Wired], how: str
) -> None:
    """Rows 11, 12, 28: no master, so each side goes on with what it has."""
    net = wired(ssd_bytes=4 << 20)
    n0, n1 = net.members["n0"], net.members["n1"]
    shared = [owned_by(name, [n0, n1], 3, "s") for name in ("n0", "n1")]
    for keys in shared:
        n0.store.put(keys, blocks(keys))
    n0.store.flush()
    for keys in shared:
        wait_until(all_see([n0, n1], keys, 3), "the directory on both")
    net.part("n1", how)
    for number in range(6):  # also before the loss is noticed
        for member in (n0, n1):
            start = time.monotonic()
            keys = chain(f"{member.name}-{number}", 3)
            assert member.store.put(keys, blocks(keys), deadline_s=1).stored == 3
            assert right(member.store, keys, 1.0) == 3
            for old in shared:
                right(member.store, old, 0.3)
            assert time.monotonic() - start < 15
    for member in (n0, n1):
        wait_until(lambda m=member: len(m.node.state.weights) == 1, "the loss")  # type: ignore[misc]
        for old in shared:  # the writer's replicas are promoted, the owner has its own
            assert right(member.store, old, 1.0) == (3 if member is n0 or old is shared[1] else 0)
    net.heal()
    wait_until(net.all_live, "healed")
    wait_until(net.agree, "equal directories", 30)
    for number in range(6):
        for writer in (n0, n1):
            for reader in (n0, n1):
                keys = chain(f"{writer.name}-{number}", 3)
                # A node that was silent is left alone for a while, then asked again.
                wait_until(lambda r=reader, k=keys: right(r.store, k) == 3, "given", 30)  # type: ignore[misc]
    for member in (n0, n1):
        member.store.flush()
        settled(member.store)
        member.node.state.directory.check()


def test_an_owner_that_hangs_while_it_gives_costs_the_deadline_and_no_pin(
    wired: Callable[..., Wired],
) -> None:
    """Rows 21, 28: recompute instead of waiting."""
    net = wired(replicas="none")
    n0, n1 = net.members["n0"], net.members["n1"]
    keys = owned_by("n1", [n0, n1], 4)
    n1.store.put(keys, blocks(keys))
    wait_until(all_see([n0], keys, 4), "announced")
    net.proxies["n0", "n1"].is_stopped = True
    start = time.monotonic()
    assert right(n0.store, keys, 0.3) == 0
    assert time.monotonic() - start < 8
    assert counter(n0.store, "blocks_missed_remote") == 4
    settled(n0.store)
    net.heal()
    wait_until(lambda: right(n0.store, keys, 1.0) == 4, "asked again once it answers", 30)


def test_an_owner_that_hangs_while_it_takes_leaves_the_blocks_to_their_writer(
    wired: Callable[..., Wired], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 5, 28: the writer's pins end with the transfer's deadline."""
    monkeypatch.setattr("runtime.store.owner_sender.SEND_S", 0.3)
    net = wired()
    n0, n1 = net.members["n0"], net.members["n1"]
    net.proxies["n0", "n1"].is_stopped = True
    keys = owned_by("n1", [n0, n1], 4)
    assert n0.store.put(keys, blocks(keys)).stored == 4
    wait_until(lambda: n0.counters["blocks_taken_over"] == 4, "taken over")
    assert right(n0.store, keys) == 4
    settled(n0.store)
    net.heal()
    wait_until(net.all_live, "healed")
    wait_until(all_see([n1], keys, 4), "announced")
    wait_until(lambda: right(n1.store, keys, 1.0) == 4, "given to the other", 30)


def test_blocks_gone_between_the_look_up_and_the_load_are_misses(
    wired: Callable[..., Wired],
) -> None:
    """Rows 18, 20, 30: what the directory says is a hint, what arrives is the truth."""
    net = wired(replicas="none")
    n0, n1 = net.members["n0"], net.members["n1"]
    keys = owned_by("n1", [n0, n1], 5)
    n1.store.put(keys, blocks(keys))
    wait_until(all_see([n0], keys, 5), "announced")
    with n1.node.state.lock:  # evicted, but the others are not told yet
        for key in keys[2:]:
            n1.node.state.memory.forget(key, now=n1.node.state.now())
        assert n0.store.lookup(keys) == 5
        state = n1.node.state
    assert right(n0.store, keys, 2.0) == 2
    assert counter(n0.store, "blocks_missed_remote") == 3
    with state.lock:
        state.tell()
    wait_until(all_see([n0], keys, 2), "told")
    settled(n0.store)
    settled(n1.store)


def test_a_bit_flipped_in_the_owners_memory_is_a_miss_everywhere(
    wired: Callable[..., Wired],
) -> None:
    """Rows 1, 22: the checksum travels with the block."""
    net = wired(replicas="none")
    n0, n1 = net.members["n0"], net.members["n1"]
    keys = owned_by("n1", [n0, n1], 4)
    n1.store.put(keys, blocks(keys))
    wait_until(all_see([n0], keys, 4), "announced")
    memory = n1.node.state.memory
    room = memory.get(keys[2])
    assert room is not None
    memory.view(room)[77] ^= 4
    assert right(n0.store, keys, 2.0) == 2
    assert counter(n0.store, "blocks_missed_remote") >= 1
    assert right(n1.store, keys) == 2
    assert counter(n1.store, "blocks_broken_in_memory") == 1
    wait_until(all_see([n0], keys, 2), "the owner has told that it is gone")
    settled(n0.store)


def test_a_node_that_comes_late_learns_all_after_others_have_died(
    wired: Callable[..., Wired],
) -> None:
    """Rows 10, 11, 12, 15, 30: whoever dies takes only its own blocks along."""
    net = wired(3)
    members = net.members
    kept = [owned_by("n1", list(members.values()), 3, f"k{i}") for i in range(3)]
    lost = owned_by("n0", list(members.values()), 3, "l")
    for keys in kept:
        members["n1"].store.put(keys, blocks(keys))
    members["n0"].store.put(lost, blocks(lost))
    for keys in [*kept, lost]:
        wait_until(all_see(list(members.values()), keys, 3), "announced")
    members["n0"].stop()
    members["n2"].stop()
    wait_until(lambda: len(members["n1"].node.state.weights) == 1, "both lost")
    assert members["n1"].store.lookup(lost) == 0
    assert members["n1"].node.state.directory.copies(lost[0]) == ()
    members["n2"] = net.start("n2")
    for keys in kept:
        wait_until(all_see([members["n2"]], keys, 3), "read from the one that lives")
        assert right(members["n2"].store, keys) == 3
    assert members["n2"].store.lookup(lost) == 0
    members["n0"] = net.start("n0")
    wait_until(net.all_live, "all back")
    wait_until(net.agree, "equal directories", 30)
    for member in members.values():
        settled(member.store)


def test_requests_never_fail_while_nodes_come_and_go(wired: Callable[..., Wired]) -> None:
    """Rows 2, 29, 30: whatever the others do, a request is served or recomputed."""
    net = wired(3, ssd_bytes=4 << 20)
    first = net.members["n0"]
    for life in range(4):
        victim = ("n1", "n2")[life % 2]
        for number in range(12):
            keys = chain(f"r{life}-{number % 5}", 4)
            right(first.store, keys, 1.0)
            first.store.put(keys, blocks(keys))
            if number == 4:
                net.members[victim].stop()
            if number == 8:
                net.members[victim] = net.start(victim)
    wait_until(net.all_live, "all back")
    for life in range(4):
        for number in range(5):
            right(net.members["n1"].store, chain(f"r{life}-{number}", 4), 2.0)
    first.store.flush()
    for member in net.members.values():
        settled(member.store)


# --- network namespaces --------------------------------------------------------------------


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def namespaces() -> Iterator[Sequence[tuple[str, str]]]:
    """Two network namespaces with a cable between them: name and address."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    tag = f"{os.getpid() % 100000}"
    sides = [(f"ptA{tag}", "10.199.7.1"), (f"ptB{tag}", "10.199.7.2")]
    try:
        _run("ip", "netns", "add", sides[0][0])
        _run("ip", "netns", "add", sides[1][0])
        _run(
            *("ip", "link", "add", "pt0", "netns", sides[0][0], "type", "veth"),
            *("peer", "name", "pt0", "netns", sides[1][0]),
        )
        for name, address in sides:
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "pt0")
            for device in ("lo", "pt0"):
                _run("ip", "-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        for name, _ in sides:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()[:80]}")
    yield sides
    for name, _ in sides:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_a_pulled_cable_parts_two_servers_and_a_plugged_one_joins_them(
    namespaces: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    """Rows 12, 28: packets vanish, and nobody says so."""
    peers = ",".join(f"n{i}={address}:7070" for i, (_, address) in enumerate(namespaces))
    processes: list[subprocess.Popen[bytes]] = []
    stores: list[PrefixStore] = []
    try:
        for i, (namespace, address) in enumerate(namespaces):
            folder = tmp_path / f"n{i}"
            folder.mkdir()
            command = [
                *("ip", "netns", "exec", namespace, sys.executable, "-m", "runtime", "store"),
                *("serve", str(folder), "--dram", str(64 * BLOCK), "--block-bytes", str(BLOCK)),
                *("--node", f"n{i}", "--listen", f"{address}:7070", "--peers", peers),
                *("--heartbeat", "0.2", "--eviction", "lru"),
            ]
            with (folder / "log").open("wb") as log:
                processes.append(subprocess.Popen(command, stderr=log))
        stores += [_connected(tmp_path / f"n{i}", processes[i]) for i in range(2)]
        wait_until(lambda: all(_live(one) == 2 for one in stores), "both live", 60)
        before = [chain(f"before-{i}", 4) for i in range(2)]
        for store, keys in zip(stores, before, strict=True):
            assert store.put(keys, blocks(keys)).stored == 4
        wait_until(
            lambda: all(one.lookup(keys) == 4 for one in stores for keys in before), "announced"
        )
        _run("ip", "-n", namespaces[0][0], "link", "set", "pt0", "down")
        for number in range(4):
            for i, store in enumerate(stores):
                start = time.monotonic()
                keys = chain(f"apart-{i}-{number}", 3)
                assert store.put(keys, blocks(keys), deadline_s=2).stored == 3
                assert right(store, keys, 2.0) == 3
                right(store, before[1 - i], 0.5)
                assert time.monotonic() - start < 20
        wait_until(lambda: all(_live(one) == 1 for one in stores), "the loss", 60)
        _run("ip", "-n", namespaces[0][0], "link", "set", "pt0", "up")
        wait_until(lambda: all(_live(one) == 2 for one in stores), "healed", 60)
        apart = [chain(f"apart-{i}-{number}", 3) for i in range(2) for number in range(4)]
        for store in stores:
            for keys in apart:
                wait_until(lambda s=store, k=keys: s.lookup(k) == 3, "known", 60)  # type: ignore[misc]
                wait_until(lambda s=store, k=keys: right(s, k) == 3, "given", 30)  # type: ignore[misc]
            settled(store)
    finally:
        for store in stores:
            store.close()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _connected(folder: Path, process: subprocess.Popen[bytes]) -> PrefixStore:
    end = Deadline.after(60)
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return connect(folder / "store.sock")
        except StoreUnavailableError:
            assert not end.is_over
            time.sleep(0.05)


def _live(store: PrefixStore) -> int:
    return int(store.stats(deadline_s=5)["gauges"]["live_nodes"])
