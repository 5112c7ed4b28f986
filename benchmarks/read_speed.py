"""How fast a million requests are read, and how much memory that takes.

    python benchmarks/read_speed.py [NUM_ROWS]

Each format is written to a temporary directory and read by a fresh process of one thread, three
times. Printed: median and spread of the CPU seconds of ``read_trace`` (without the import of numpy
and Arrow) and the largest resident memory of the process. One in ten thousand rows of the file with
bad rows is left out; a file with lengths such as 12e0 is read row by row, without Arrow.
"""

import gzip
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

REPETITIONS = 3


def lengths(num_rows: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(7)
    prompts = rng.geometric(1 / 1155, num_rows)
    outputs = rng.geometric(1 / 211, num_rows)
    return prompts.tolist(), outputs.tolist()


def azure_rows(num_rows: int, zone: str = "") -> Iterator[str]:
    ns = np.cumsum(np.random.default_rng(8).integers(100, 10**7, num_rows))
    stamps = np.datetime64("2024-05-10T00:00:00", "ns") + ns.astype("timedelta64[ns]")
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for stamp, p, d in zip(stamps.astype(str).tolist(), *lengths(num_rows), strict=True):
        yield f"{stamp.replace('T', ' ')[:26]}{zone},{p},{d}\n"


def burstgpt_rows(num_rows: int) -> Iterator[str]:
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for i, (p, d) in enumerate(zip(*lengths(num_rows), strict=True)):
        yield f"{i * 0.25},ChatGPT,{p},{d},{p + d},Conversation log\n"


def with_bad_rows(rows: Iterator[str]) -> Iterator[str]:
    for i, row in enumerate(rows):
        yield row if i % 10_000 != 5_000 else row.rsplit(",", 1)[0] + ",0\n"


def quoted(rows: Iterator[str]) -> Iterator[str]:
    for row in rows:
        yield ",".join(f'"{field}"' for field in row.rstrip("\n").split(",")) + "\n"


def changed(rows: Iterator[str], ending: str) -> Iterator[str]:
    yield next(rows)
    for row in rows:
        yield row.rstrip("\n") + ending + "\n"


def splitwise_rows(num_rows: int) -> Iterator[str]:
    yield "request_id,request_type,application_id,arrival_timestamp,batch_size,"
    yield "prompt_size,token_size\n"
    for i, (p, d) in enumerate(zip(*lengths(num_rows), strict=True)):
        yield f"{i},2,0,{i * 0.125},1,{p},{d}\n"


def mooncake_rows(num_rows: int, with_blocks: bool) -> Iterator[str]:
    block = 10
    for i, (p, d) in enumerate(zip(*lengths(num_rows), strict=True)):
        prompt = p * 10  # long prompts: 23 blocks of 512 on average
        row = {"timestamp": i * 10, "input_length": prompt, "output_length": d}
        if with_blocks:
            fresh = -(-prompt // 512) - 1
            row["hash_ids"] = [i % 10, *range(block, block + fresh)]
            block += fresh
        yield json.dumps(row) + "\n"


CASES: dict[str, tuple[str, Callable[[int], Iterator[str]], dict[str, object]]] = {
    "Azure 2023 CSV": ("a.csv", azure_rows, {}),
    "Azure 2024 CSV, zones, gzip": ("b.csv.gz", lambda n: azure_rows(n, "+00:00"), {}),
    "Azure CSV, bad rows skipped": (
        "c.csv",
        lambda n: with_bad_rows(azure_rows(n)),
        {"skip_bad_rows": True},
    ),
    "Azure CSV, all fields quoted": ("d.csv", lambda n: quoted(azure_rows(n)), {}),
    "Azure CSV, lengths as 12.0": ("k.csv", lambda n: changed(azure_rows(n), ".0"), {}),
    "Azure CSV, 1e0: row by row": ("i.csv", lambda n: changed(azure_rows(n), "e0"), {}),
    "BurstGPT CSV": ("e.csv", burstgpt_rows, {}),
    "splitwise-sim CSV, unique ids": ("f.csv", splitwise_rows, {}),
    "Mooncake JSONL without ids": ("g.jsonl", lambda n: mooncake_rows(n, False), {}),
    "Mooncake JSONL with ids": ("h.jsonl", lambda n: mooncake_rows(n, True), {}),
}


def write(path: Path, rows: Iterator[str]) -> None:
    if path.suffix == ".gz":
        with gzip.open(path, "wt", compresslevel=1) as packed:
            packed.writelines(rows)
    else:
        with path.open("w") as file:
            file.writelines(rows)


def measure(path: Path, options: dict[str, object], answers: "multiprocessing.Queue") -> None:
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.json  # noqa: F401 - imported before the clock starts

    from traces.readers import read_trace

    start = time.process_time()
    trace = read_trace(path, **options)
    seconds = time.process_time() - start
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    answers.put((seconds, peak, len(trace)))


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"{platform.machine()}, Python {platform.python_version()}, Arrow {pa.__version__}")
    print(f"{'case':<34}{'MB':>7}{'rows':>10}{'CPU s':>8}{'spread':>8}{'MiB':>7}")
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        for case, (name, rows, options) in CASES.items():
            path = Path(directory) / name
            write(path, rows(num_rows))
            results = []
            for _ in range(REPETITIONS):
                answers = spawn.Queue()
                child = spawn.Process(target=measure, args=(path, options, answers))
                child.start()
                results.append(answers.get())
                child.join()
            seconds = sorted(result[0] for result in results)
            print(
                f"{case:<34}{path.stat().st_size / 1e6:>7.1f}{results[0][2]:>10,}"
                f"{seconds[1]:>8.2f}{seconds[-1] - seconds[0]:>8.2f}"
                f"{max(result[1] for result in results):>7.0f}",
                flush=True,
            )
            path.unlink()


if __name__ == "__main__":
    main()
