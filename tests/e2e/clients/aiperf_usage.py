"""aiperf counts tokens by itself: `python aiperf_usage.py URL MODEL CHECKPOINT_FOLDER`.

Needs aiperf. Each request's `usage` must be aiperf's own count of prompt and answer, answers must
be as long as asked for, and aiperf must have no warning about either. Exit code 1 if not.

Answers are bound to capital letters, each of which is one token of the tiny model: the bytes that a
random model likes to say are no text, so no client could count them from what it reads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

REQUESTS = 20
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8
EXACT = (
    "usage_prompt_tokens_diff_pct",
    "usage_completion_tokens_diff_pct",
    "osl_mismatch_diff_pct",
)
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def main(url: str, model: str, checkpoint: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        subprocess.run(
            [
                *(str(Path(sys.executable).parent / "aiperf"), "profile"),
                *("--model", model, "--url", url, "--tokenizer", checkpoint),
                *("--endpoint-type", "completions", "--streaming", "--concurrency", "4"),
                *("--request-count", str(REQUESTS), "--ui", "simple"),
                *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
                *("--output-tokens-mean", str(ANSWER_TOKENS)),
                *("--extra-inputs", "ignore_eos:true", "guided_regex:[A-Z]{200}"),
                *("--artifact-dir", name),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            # Told to stay offline, it takes the folder of a tokenizer for a name in a hub's cache.
            env={k: v for k, v in os.environ.items() if k not in OFFLINE} | {"HF_HOME": name},
        )
        lines = (out / "profile_export.jsonl").read_text().splitlines()
        console = (out / "profile_export_console.txt").read_text()
        scraped = json.loads((out / "server_metrics_export.json").read_text())["metrics"]
    records = [json.loads(line) for line in lines]
    assert len(records) == REQUESTS, len(records)
    for record in records:
        assert not record.get("error"), record
        found = {name: value["value"] for name, value in record["metrics"].items()}
        assert all(found[name] == 0 for name in EXACT), found
        assert found["usage_prompt_tokens"] == PROMPT_TOKENS, found
        assert found["usage_completion_tokens"] == ANSWER_TOKENS, found
    assert "Warning" not in console, console
    assert any(name.startswith("vllm:") for name in scraped), sorted(scraped)
    print(
        f"ok, aiperf {metadata.version('aiperf')}: {REQUESTS} requests, usage and lengths exact,"
        f" no warning, {len(scraped)} metrics scraped"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
