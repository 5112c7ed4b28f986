"""The store beside Mooncake Store and LMCache's local backend, on the same machine in the same run.

    python benchmarks/store_peers.py [--lmcache PYTHON] [--mooncake PYTHON] [--out FILE]

Each peer lives in an environment of its own (``pip install lmcache``; ``pip install
mooncake-transfer-engine-non-cuda``, which needs libibverbs1); give its interpreter. One process
per system and round, rounds interleaved; every process measures memcpy too, and shares of it are
compared. Reads are into the caller's buffers (one copy); ours are checked by CRC32C, the peers' are
not. LMCache runs in the caller's process; ours and Mooncake's have a server beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
BLOCK_BYTES, NUM_BLOCKS, REPEATS = 2 << 20, 32, 5
MEASURES = ("memcpy", "put", "get", "lookup_us")


def measure(system: str, python: str) -> dict[str, list[float]]:
    """One process: GB/s of memcpy, put and get, microseconds of a lookup of 512 keys."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(python, str(HERE / f"store_peer_{system}.py"), folder),
                *(str(BLOCK_BYTES), str(NUM_BLOCKS), str(REPEATS)),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=HERE.parent,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"memcpy"')]
    if done.returncode or not lines:
        raise SystemExit(f"{system} failed ({done.returncode}): {done.stderr[-800:]}")
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lmcache", help="interpreter with lmcache")
    parser.add_argument("--mooncake", help="interpreter with mooncake")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "store_peers.json")
    args = parser.parse_args()
    systems = {"ours": sys.executable}
    systems |= {n: p for n in ("lmcache", "mooncake") if (p := getattr(args, n))}
    values: dict[str, dict[str, list[float]]] = {s: {m: [] for m in MEASURES} for s in systems}
    shares: dict[str, dict[str, list[float]]] = {s: {"put": [], "get": []} for s in systems}
    for _ in tqdm(range(args.rounds), desc="rounds"):
        for system, python in systems.items():
            found = measure(system, python)
            middle = {name: statistics.median(found[name]) for name in MEASURES}
            for name in MEASURES:
                values[system][name].append(middle[name])
            for name in ("put", "get"):
                shares[system][name].append(middle[name] / middle["memcpy"])
    result: dict[str, Any] = {
        "block_bytes": BLOCK_BYTES,
        "num_blocks": NUM_BLOCKS,
        "rounds": args.rounds,
        "systems": {
            s: {
                **{m: spread(values[s][m]) for m in MEASURES},
                **{f"{m}_share_of_memcpy": spread(shares[s][m]) for m in ("put", "get")},
            }
            for s in systems
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'':10}{'memcpy':>10}{'put':>10}{'get':>10}{'put share':>11}{'get share':>11}"
          f"{'lookup 512':>13}")  # fmt: skip
    for s in systems:
        row = result["systems"][s]
        print(
            f"{s:10}{row['memcpy'][1]:10.2f}{row['put'][1]:10.2f}{row['get'][1]:10.2f}"
            f"{row['put_share_of_memcpy'][1]:11.0%}{row['get_share_of_memcpy'][1]:11.0%}"
            f"{row['lookup_us'][1]:10.0f} us"
        )


def spread(values: list[float]) -> list[float]:
    """Least, median, most."""
    return [min(values), statistics.median(values), max(values)]


if __name__ == "__main__":
    main()
