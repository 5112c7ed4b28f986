"""Settings of the store's commands: what is wrong is named in one line before anything is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from policies.prefix.store_settings import StoreSettings
from runtime import cli
from runtime.store import commands
from runtime.store.commands import DEFAULT_DECISION_CALLS
from runtime.store.config import StoreConfig
from runtime.store.deadline import Deadline
from runtime.store.errors import StoreSetupError
from runtime.store.metrics import StoreCollector
from runtime.store.node import opened
from runtime.store.node_stats import node_stats
from runtime.store.pool_config import pool_config
from runtime.store.sizes import size_bytes
from runtime.store.stats_tables import render_stats
from runtime.store.store import open_store, store_config
from runtime.store.store_server import ServerConfig, StoreServer
from traces.decisions import read_decisions


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # a command sends them to the error stream of its own test


def refusal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The one line that a refused command leaves."""
    monkeypatch.setattr(sys, "argv", ["runtime", "store", *words])
    monkeypatch.setattr(commands, "_wait_until", lambda is_stopping: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 2, said
    assert said.out == ""
    assert said.err.count("\n") == 1 and said.err.startswith("error: "), said.err
    return said.err


POOLED = ("--peers", "a=127.0.0.1:7001,b=127.0.0.1:7002", "--node", "a")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--eviction", "foo"), ("eviction", "tree_hd", "'foo'")),
        (("--replicas", "foo"), ("replicas", "unified", "'foo'")),
        (("--flush", "foo"), ("flush", "on_commit", "'foo'")),
        (("--owner", "foo"), ("owner", "rendezvous", "'foo'")),
        (("--block-bytes", "0"), ("block_bytes", ">= 64")),
        (("--block-bytes", "8GiB"), ("block_bytes", "1 GiB")),
        (("--dram", "99999999999999999999999999TiB"), ("dram", "must be at most")),
        (("--dram", "9" * 400), ("dram", "must be at most")),
        (("--dram", "1000TiB"), ("DRAM size",)),
        (("--ssd", "900PiB"), ("ssd", "must be a size")),
        (("--ssd", "100000TiB"), ("ssd", "disk")),
        (("--node", ""), ("node",)),
        (("--log-level", "loud"), ("--log-level", "'loud'")),
        (("--decision-log", "/proc/x/log"), ("--decision-log", "/proc/x/log")),
        (("--decision-log", "/"), ("--decision-log", "/")),
        (("--decision-calls", "0", "--decision-log", "x"), ("--decision-calls",)),
        (("--decision-calls", "5"), ("--decision-calls", "--decision-log")),
        (("--metrics-port", "70000"), ("--metrics-port", "65535")),
        # What only a pool needs is refused without one.
        (("--weight", "2"), ("--weight", "--peers")),
        (("--transport", "nixl"), ("--transport", "--peers")),
        (("--listen", "0.0.0.0:7421"), ("--listen", "--peers")),
        (("--heartbeat", "2"), ("--heartbeat", "--peers")),
        (("--cluster", "mine"), ("--cluster", "--peers")),
        (("--advertise", "h"), ("--advertise", "--peers")),
        (("--metrics-host", "0.0.0.0"), ("--metrics-host", "--metrics-port")),
        # In a pool it is checked.
        ((*POOLED, "--weight", "-1"), ("--weight", "-1")),
        ((*POOLED, "--weight", "2"), ("--weight", "--peers")),
        ((*POOLED, "--listen", "foo"), ("--listen", "'foo'")),
        ((*POOLED, "--transport", "smoke"), ("--transport", "'smoke'")),
        ((*POOLED, "--heartbeat", "0"), ("--heartbeat",)),
        ((*POOLED, "--cluster", ""), ("--cluster",)),
        (("--peers", "a=h:7001,b=h:7001", "--node", "a"), ("'a'", "'b'", "h:7001")),
        (("--peers", "a=h:7001,a=h:7002", "--node", "a"), ("'a'", "twice")),
        (("--peers", "a=10.0.0.1:7001,b=10.0.0.2:7001", "--node", "a"), ("--listen", "10.0.0.1")),
        (("--peers", "a=127.0.0.1:7001,b=127.0.0.1:7002", "--node", "c"), ("--node", "'c'")),
    ],
)
def test_a_wrong_option_of_serve_is_named_in_one_line(
    words: tuple[str, ...],
    parts: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "store"
    small = () if "--dram" in words else ("--dram", "64MiB")
    said = refusal(["serve", str(folder), *small, *words], capsys, monkeypatch)
    assert all(part in said for part in parts), said
    assert not list(tmp_path.glob("store/arena*"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[[tenant]]\nsalt = "a"\nquota = 0\n', ("quota", "> 0")),
        ('[[tenant]]\nsalt = "a"\nquota = "64MiB"\n', ("quota", "sum")),
        (
            '[[tenant]]\nsalt = "a"\nquota = "40MiB"\n[[tenant]]\nsalt = "b"\nquota = "30MiB"\n',
            ("quota", "sum"),
        ),
    ],
)
def test_quotas_that_leave_nothing_are_refused(
    text: str,
    parts: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "q.toml").write_text(text)
    words = ["serve", str(tmp_path / "s"), "--dram", "64MiB", "--quotas", str(tmp_path / "q.toml")]
    said = refusal(words, capsys, monkeypatch)
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"eviction": "foo"}, "eviction"),
        ({"ssd_eviction": "foo"}, "ssd_eviction"),
        ({"replicas": "foo"}, "replicas"),
        ({"replica_share": 1.0}, "replica_share"),
        ({"flush": "foo"}, "flush"),
        ({"owner_rule": "foo"}, "owner_rule"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"dram": 1}, "dram"),
        ({"dram": 2**80}, "dram"),
        ({"ssd": 2**59}, "ssd"),
        ({"quota_bytes": {b"t" * 16: 0}}, "quota"),
        ({"quota_bytes": {b"t" * 16: 2**40}}, "quota"),
        ({"quota_bytes": {b"short": 100}}, "quota"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"reservation_s": float("inf")}, "reservation_s"),
        ({"segment_bytes": 0}, "segment_bytes"),
        ({"log_calls": -1}, "log_calls"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_setting_of_a_store_is_a_setup_error_that_names_it(
    settings: dict[str, object], name: str, tmp_path: Path
) -> None:
    with pytest.raises(StoreSetupError, match=name):
        open_store(tmp_path / "s", **{"dram": "1MiB", "block_bytes": 4096} | settings)  # type: ignore[arg-type]


def test_quotas_are_checked_against_the_memory_that_the_policy_gets(tmp_path: Path) -> None:
    config = StoreConfig(folder=tmp_path, dram_bytes=100 * 4096, block_bytes=4096)
    with opened(config) as node:
        assert node.state.policy.settings.memory_bytes == config.policy_memory_bytes
    quota = {b"t" * 16: config.policy_memory_bytes}
    with pytest.raises(ValueError, match="leave nothing"):
        StoreSettings(memory_bytes=config.policy_memory_bytes, quota_bytes=quota)
    with pytest.raises(StoreSetupError, match="leave nothing"):
        StoreConfig(folder=tmp_path, dram_bytes=100 * 4096, block_bytes=4096, quota_bytes=quota)


def test_a_loopback_pool_needs_no_listen_and_another_address_listens_when_told() -> None:
    common = {
        "node": "a",
        "advertise": None,
        "etcd": None,
        "cluster": None,
        "secret_file": None,
        "weight": None,
    }
    near = pool_config(listen=None, peers="a=localhost:7001,b=localhost:7002", **common)  # type: ignore[arg-type]
    assert near is not None and (near.host, near.port) == ("127.0.0.1", 0)
    far = "a=10.0.0.1:7001,b=10.0.0.2:7001"
    told = pool_config(listen="0.0.0.0:7001", peers=far, **common)  # type: ignore[arg-type]
    assert told is not None and (told.host, told.port) == ("0.0.0.0", 7001)
    assert pool_config(listen=None, peers=None, **common) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 400, "99999999999999999999TiB", "2000000TiB"])
def test_a_size_beyond_an_exbibyte_is_none(text: str) -> None:
    with pytest.raises(StoreSetupError, match="at most"):
        size_bytes(text, "ssd")
    assert size_bytes("1048576TiB") == 2**60


@pytest.mark.parametrize("command", ["verify", "compact"])
def test_a_folder_that_is_no_store_is_refused_and_left_as_it_is(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "d" / "ssd").mkdir(parents=True)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "readme.txt").write_text("hi")
    (tmp_path / "f").mkdir()
    for name in ("d", "e", "f", "none", "e/readme.txt"):
        before = sorted(tmp_path.rglob("*"))
        assert str(tmp_path / name) in refusal([command, str(tmp_path / name)], capsys, monkeypatch)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["verify", "compact"])
def test_a_store_is_checked_by_its_folder_or_its_ssd_folder(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_store(tmp_path, dram="1MiB", ssd="16MiB", block_bytes=4096).close()
    for folder in (tmp_path, tmp_path / "ssd"):
        monkeypatch.setattr(sys, "argv", ["runtime", "store", command, str(folder)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 0
        assert capsys.readouterr().out != ""


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["bench", "/proc/x"], ["/proc/x"]),
        (["bench", "/no/such/folder"], ["/no/such/folder"]),
        (["bench", "--block-bytes", "0"], ["block_bytes", ">= 64"]),
        (["bench", "--blocks", "1"], ["--blocks", "4"]),
        (["compact", "x", "--seconds", "0"], ["--seconds", "0.1"]),
        (["stats", "--colour"], ["--colour"]),
        (["stats"], ["socket"]),
    ],
)
def test_other_commands_refuse_in_one_line(
    words: list[str],
    parts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = refusal(words, capsys, monkeypatch)
    assert all(part in said for part in parts), said


def test_the_advice_of_stats_names_the_folder_of_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path, tmp_path / "store.sock"):
        assert f"serve {tmp_path}\n" in refusal(["stats", str(place)], capsys, monkeypatch)


def test_the_decision_log_is_written_even_if_closing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    config = ServerConfig(
        store=store_config(
            tmp_path / "s", dram="1MiB", ssd=0, block_bytes=4096, log_calls=DEFAULT_DECISION_CALLS
        ),
        socket=tmp_path / "s" / "store.sock",
        decision_log=log,
    )
    server = StoreServer(config)
    close = server.node.close

    def fails(deadline: Deadline) -> None:
        close(deadline)
        raise OSError(5, "the disk went away")

    monkeypatch.setattr(server.node, "close", fails)
    with pytest.raises(OSError, match="went away"):
        server.stop()
    recipes, _ = read_decisions(log)
    assert recipes["policies"]["prefix"]["kind"] == "prefix"


def test_stats_show_what_happened_and_not_what_did_not() -> None:
    shown = render_stats(
        {
            "node": "a",
            "gauges": {"slots": 7},
            "counters": {"blocks_stored": 3},
            "ssd_counters": {"torn_records": 0, "written_blocks": 2},
            "pool_counters": {"peer_put_blocks": 0, "peer_handshakes_refused": 1},
        }
    )
    assert "torn" not in shown and "put blocks" not in shown
    assert "written blocks" in shown and "handshakes refused" in shown


def test_every_metric_has_a_sentence(tmp_path: Path) -> None:
    config = store_config(tmp_path, dram="1MiB", ssd="16MiB", block_bytes=4096)
    with opened(config) as node:
        families = list(StoreCollector(lambda: node_stats(node)).collect())
    helps = {family.name: family.documentation for family in families}
    assert helps["prefix_store_ssd_used_bytes"] == "SSD used: size in bytes at the moment."
    assert all(len(said.split()) >= 5 and said.endswith(".") for said in helps.values()), helps
