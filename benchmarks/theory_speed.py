"""CPU seconds of the closed forms: moments, worker law, and four levels over r = 1..64.

Usage: python benchmarks/theory_speed.py

Medians and ranges of 7 repetitions in one process, imports excluded.
"""

import statistics
import time

from models.attention_ffn import exact_law, predict_all, slot_moments
from models.bundle import Bundle
from models.calibration import load_calibration
from traces import length_laws
from traces.lengths import LengthPairs
from traces.workloads import bundled_lengths

REPETITIONS = 7
RATIOS = range(1, 65)


def cpu_s(function: object, *arguments: object) -> str:
    found = []
    for _ in range(REPETITIONS):
        begin = time.process_time()
        function(*arguments)  # type: ignore[operator]
        found.append(1e3 * (time.process_time() - begin))
    return f"{statistics.median(found):7.1f} ({min(found):.1f}..{max(found):.1f})"


def main() -> None:
    coefficients = load_calibration("deepseek-v3-ascend-910c").coefficients
    workloads: list[tuple[str, LengthPairs, int]] = [
        ("azure-2023-conversation, B = 256", bundled_lengths("azure-2023-conversation"), 256),
        ("geometric 100 + 500, B = 256", length_laws.geometric(100, 500), 256),
        ("pareto index 2.5, B = 64", length_laws.pareto(200, 300, 2.5, 200_000), 64),
    ]
    print("milliseconds of CPU, median (range)")
    for name, lengths, batch in workloads:
        print(name)
        print(f"  moments          {cpu_s(slot_moments, lengths)}")
        print(f"  exact worker law {cpu_s(exact_law, lengths, batch)}")
        for semantics, m in (("barrier", 1), ("pingpong", 2), ("pingpong", 3)):
            bundle = Bundle(
                coefficients=coefficients,
                batch_per_worker=batch,
                semantics=semantics,  # type: ignore[arg-type]
                microbatches=m,
            )
            label = f"{semantics} m = {m}"
            print(f"  {label:16} {cpu_s(predict_all, lengths, bundle, RATIOS)}")


if __name__ == "__main__":
    main()
