"""guidellm against a server: `python guidellm_load.py URL MODEL CHECKPOINT_FOLDER`.

Needs guidellm. All requests must succeed, with tokens as asked. Exit code 1 if not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

REQUESTS = 20
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8


def main(url: str, model: str, checkpoint: str) -> None:
    for route in ("/v1/completions", "/v1/chat/completions"):
        found = benchmark(url, model, checkpoint, route)
        totals = found["metrics"]["request_totals"]
        assert totals["successful"] == totals["total"] == REQUESTS, totals
        done = found["requests"]["successful"]
        for request in done:
            assert request["output_metrics"]["text_tokens"] == ANSWER_TOKENS, request
            assert json.loads(request["request_args"])["body"]["stream"]
        first_ms = found["metrics"]["time_to_first_token_ms"]["successful"]["mean"]
        print(f"{route}: {len(done)} requests, mean TTFT {first_ms:.1f} ms")
    print(f"ok, guidellm {metadata.version('guidellm')}")


def benchmark(url: str, model: str, checkpoint: str, route: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.json"
        subprocess.run(
            [
                *(str(Path(sys.executable).parent / "guidellm"), "run"),
                *(
                    "--backend",
                    f"kind=openai_http,target={url},model={model},request_format={route}",
                ),
                *("--profile", "kind=concurrent,streams=4"),
                *("--constraint", f"kind=max_requests,count={REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={checkpoint}"),
                "--data",
                f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
                *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HF_HOME": name},
        )
        (found,) = json.loads(out.read_text())["benchmarks"]
    return dict(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
