"""`vllm bench serve` against a server: `python vllm_bench_serve.py URL MODEL CHECKPOINT_FOLDER`.

Needs vllm in the same environment. All requests must succeed, with tokens as asked. Exit code 1 if
not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

REQUESTS = 16
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8


def main(url: str, model: str, checkpoint: str) -> None:
    for backend, endpoint in (("openai", "completions"), ("openai-chat", "chat/completions")):
        found = bench(url, model, checkpoint, backend, endpoint)
        assert found["completed"] == REQUESTS, found["completed"]
        assert found["failed"] == 0, found["failed"]
        assert found["total_output_tokens"] == REQUESTS * ANSWER_TOKENS, found
        print(
            f"{backend}: {REQUESTS} requests, {found['total_output_tokens']} tokens, mean TTFT"
            f" {found['mean_ttft_ms']:.1f} ms, mean TPOT {found['mean_tpot_ms']:.1f} ms"
        )
    print(f"ok, vllm {metadata.version('vllm')}")


def bench(url: str, model: str, checkpoint: str, backend: str, endpoint: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as out:
        subprocess.run(
            [
                *(str(Path(sys.executable).parent / "vllm"), "bench", "serve"),
                *("--backend", backend, "--base-url", url, "--endpoint", f"/v1/{endpoint}"),
                *("--model", model, "--tokenizer", checkpoint, "--dataset-name", "random"),
                *("--random-input-len", str(PROMPT_TOKENS)),
                *("--random-output-len", str(ANSWER_TOKENS), "--ignore-eos"),
                *("--num-prompts", str(REQUESTS), "--request-rate", "20", "--seed", "0"),
                *("--save-result", "--result-dir", out),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (result,) = Path(out).glob("*.json")
        return dict(json.loads(result.read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
