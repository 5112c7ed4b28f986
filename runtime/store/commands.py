"""``runtime store``: serve a node's prefix store, look at it, check it, make room, measure it."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.store.options import (
    EvictionOption,
    FlushOption,
    OwnerOption,
    ReplicasOption,
    quotas,
)

store_app = typer.Typer(
    help="The prefix store: keys and values computed once are found again, on any node.",
    no_args_is_help=True,
)
_Folder = Annotated[Path, typer.Argument(help="Home of the store.")]
_Socket = Annotated[Path, typer.Argument(help="Socket of the server, or the folder of its store.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DEFAULT_SOCKET = "store.sock"
DEFAULT_DECISION_CALLS = 100_000


@store_app.command()
def serve(
    folder: _Folder,
    dram: Annotated[str, typer.Option("--dram", help="Shared memory for blocks.")] = "8GiB",
    ssd: Annotated[str, typer.Option("--ssd", help="Room for blocks on the folder's disk.")] = "0",
    block_bytes: Annotated[
        str, typer.Option("--block-bytes", help="Most bytes of a block.")
    ] = "2MiB",
    socket: Annotated[
        Path | None, typer.Option("--socket", help="Unix socket. Default: FOLDER/store.sock.")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Name in the pool. Default: the host's name.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", help="HOST:PORT for the other nodes of a pool. Default: loopback."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option("--peers", help="The pool: NAME=HOST:PORT\\[*WEIGHT],..., this node too."),
    ] = None,
    etcd: Annotated[
        str | None, typer.Option("--etcd", help="HOST:PORT of an etcd that lists the pool.")
    ] = None,
    advertise: Annotated[
        str | None, typer.Option("--advertise", help="Host that the others are told.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Name of the pool. Default: default.")
    ] = None,
    secret: Annotated[
        Path | None, typer.Option("--secret-file", help="Shared secret of the pool's nodes.")
    ] = None,
    weight: Annotated[
        float | None,
        typer.Option("--weight", help="Share of the blocks to own (with --etcd). Default: 1."),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option("--transport", help="How blocks are fetched: tcp (default), or nixl (RDMA)."),
    ] = None,
    heartbeat: Annotated[
        float | None,
        typer.Option("--heartbeat", help="Seconds between two signs of life. Default: 1."),
    ] = None,
    metrics: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65535, help="For Prometheus.")
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option("--metrics-host", help="Address for Prometheus. Default: 127.0.0.1."),
    ] = None,
    eviction: EvictionOption = "tree_hd",
    replicas: ReplicasOption = "unified",
    owner: OwnerOption = "rendezvous",
    flush: FlushOption = "on_commit",
    quota_file: Annotated[
        Path | None,
        typer.Option("--quotas", help="TOML: \\[\\[tenant]] with salt and quota, one per tenant."),
    ] = None,
    decision_log: Annotated[
        Path | None,
        typer.Option("--decision-log", help="Write the policy's calls here when the server ends."),
    ] = None,
    decision_calls: Annotated[
        int | None,
        typer.Option(
            "--decision-calls",
            help="Calls to keep for --decision-log. Default: 100,000. Until the end they are held "
            "in memory, about 10 bytes a block of each call: 5 kB a load of 512 blocks, 0.5 GB if "
            "all are such.",
        ),
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug to error.")] = "info",
) -> None:
    """Serve this node until SIGTERM or Ctrl-C. Listens on loopback unless told otherwise."""
    import socket as sockets

    from runtime.store.errors import StoreSetupError
    from runtime.store.logs import log_as_json
    from runtime.store.malloc_arenas import limit_malloc_arenas
    from runtime.store.pool_config import pool_config
    from runtime.store.store import store_config
    from runtime.store.store_server import ServerConfig, StoreServer

    if log_level not in ("debug", "info", "warning", "error"):
        raise StoreSetupError(
            f"--log-level: must be debug, info, warning or error, found {log_level!r}"
        )
    log_as_json(log_level)
    limit_malloc_arenas()
    if decision_calls is not None and decision_log is None:
        raise StoreSetupError("--decision-calls: is for --decision-log, which is not given")
    if decision_calls is not None and decision_calls < 1:
        raise StoreSetupError(f"--decision-calls: must be >= 1, found {decision_calls}")
    if metrics_host is not None and metrics is None:
        raise StoreSetupError("--metrics-host: is for --metrics-port, which is not given")
    name = sockets.gethostname() if node is None else node
    pool = pool_config(
        node=name,
        listen=listen,
        advertise=advertise,
        peers=peers,
        etcd=etcd,
        cluster=cluster,
        secret_file=secret,
        weight=weight,
        transport=transport,
        heartbeat_s=heartbeat,
    )
    config = ServerConfig(
        store=store_config(
            folder,
            dram=dram,
            ssd=ssd,
            block_bytes=block_bytes,
            node=name,
            eviction=eviction,
            replicas=replicas,
            owner_rule=owner,
            flush=flush,
            quota_bytes=quotas(quota_file),
            log_calls=(decision_calls or DEFAULT_DECISION_CALLS) if decision_log else 0,
            is_pooled=pool is not None,
        ),
        socket=socket or folder / DEFAULT_SOCKET,
        pool=pool,
        metrics_host=metrics_host or "127.0.0.1",
        metrics_port=metrics,
        decision_log=decision_log,
    )
    is_stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: is_stopping.set())
    server = StoreServer(config)
    try:
        _wait_until(is_stopping)
    finally:
        server.stop()


def _wait_until(is_stopping: threading.Event) -> None:
    while not is_stopping.wait(1.0):
        pass


@store_app.command()
def stats(socket: _Socket, as_json: _Json = False) -> None:
    """What the server of this node holds and has done."""
    found = _stats(socket)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    from runtime.store.stats_tables import render_stats

    sys.stdout.write(render_stats(found))


def _stats(socket: Path) -> dict[str, Any]:
    from runtime.store.errors import StoreSetupError, StoreUnavailableError
    from runtime.store.store import connect

    path = socket / DEFAULT_SOCKET if socket.is_dir() else socket
    try:
        with connect(path) as store:
            return dict(store.stats(deadline_s=5.0))
    except StoreUnavailableError as error:
        folder = socket if socket.is_dir() else socket.parent
        raise StoreSetupError(f"{error}; start one with: runtime store serve {folder}") from error


@store_app.command()
def verify(folder: _Folder, as_json: _Json = False) -> None:
    """Read every block on SSD and check it; exit code 1 if something is wrong. Bad ones go."""
    from dataclasses import asdict

    from runtime.command_progress import bar
    from runtime.store.offline import opened_ssd

    with opened_ssd(folder) as ssd, bar("verifying", "MB", 1e6) as show:
        report = ssd.verify(show)
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        from runtime.store.stats_tables import render_verify

        sys.stdout.write(render_verify(report))
    if not report.is_good:
        sys.exit(1)


@store_app.command()
def compact(
    folder: _Folder,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Most time to take.")] = 60,
    dead_share: Annotated[
        float, typer.Option("--dead-share", min=0.01, max=1.0, help="Of a file worth rewriting.")
    ] = 0.05,
) -> None:
    """Rewrite SSD files that are partly dead, and give the room back."""
    from runtime.store.deadline import Deadline
    from runtime.store.offline import opened_ssd

    with opened_ssd(folder) as ssd:
        freed = ssd.compact(Deadline.after(seconds), min_dead_share=dead_share)
        sys.stdout.write(
            f"{freed / 2**20:,.1f} MiB freed; {ssd.used_bytes / 2**20:,.1f} MiB used, "
            f"{ssd.live_bytes / 2**20:,.1f} MiB live\n"
        )


@store_app.command()
def bench(
    folder: Annotated[
        Path | None, typer.Argument(help="Where to work. Default: a temporary folder.")
    ] = None,
    block_bytes: Annotated[str, typer.Option("--block-bytes", help="Bytes of a block.")] = "2MiB",
    blocks: Annotated[int, typer.Option("--blocks", min=4, max=4096, help="Of a prefix.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Repetitions.")] = 9,
    as_json: _Json = False,
) -> None:
    """Measure this machine: hand-over, copies, lookups, SSD; beside memcpy in the same run."""
    from runtime.store.bench import bench_store
    from runtime.store.sizes import size_bytes

    found = bench_store(
        folder,
        block_bytes=size_bytes(block_bytes, "--block-bytes"),
        num_blocks=blocks,
        rounds=rounds,
    )
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    from runtime.store.stats_tables import render_bench

    sys.stdout.write(render_bench(found))
