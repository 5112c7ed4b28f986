"""Mooncake Store with a segment in this process and a master beside it, in ``store_peers.py``."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import mooncake
import numpy as np
from mooncake.store import MooncakeDistributedStore
from store_peer_timing import LOOKUP_KEYS, arguments, report

folder, block_bytes, num_blocks, repeats = arguments()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
rpc, metrics = free_port(), free_port()
master = subprocess.Popen(
    [
        str(Path(mooncake.__file__).parent / "mooncake_master"),
        *("--rpc_address=127.0.0.1", f"--rpc_port={rpc}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}"),
    ],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
try:
    time.sleep(2.0)
    store = MooncakeDistributedStore()
    total = block_bytes * num_blocks
    done = store.setup(
        f"127.0.0.1:{free_port()}",
        "P2PHANDSHAKE",
        total * (repeats + 4),
        64 << 20,
        "tcp",
        "",
        f"127.0.0.1:{rpc}",
    )
    assert done == 0, f"setup answered {done}"
    names = [[f"{r}-{i}" for i in range(num_blocks)] for r in range(repeats)]
    many = (names[0] * LOOKUP_KEYS)[:LOOKUP_KEYS]
    registered: set[int] = set()

    def pointers(rows: np.ndarray) -> list[int]:
        if rows.ctypes.data not in registered:
            store.register_buffer(rows.ctypes.data, rows.nbytes)
            registered.add(rows.ctypes.data)
        return [rows.ctypes.data + i * block_bytes for i in range(num_blocks)]

    sizes = [block_bytes] * num_blocks

    def put(repeat: int, source: np.ndarray) -> None:
        done = store.batch_put_from(names[repeat], pointers(source), sizes)
        assert set(done) == {0}, done

    def get(repeat: int, target: np.ndarray) -> None:
        done = store.batch_get_into(names[repeat], pointers(target), sizes)
        assert set(done) == {block_bytes}, done

    report(put, get, lambda: store.batch_is_exist(many))
    store.close()
finally:
    master.terminate()
    master.wait(10)
