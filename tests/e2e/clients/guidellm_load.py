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

REQUESTS = 20
PROMPT_TOKENS, ANSWER_TOKENS = 32, 8


def main(url: str, model: str, checkpoint: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.json"
        subprocess.run(
            [
                *(str(Path(sys.executable).parent / "guidellm"), "run"),
                *("--backend", f"kind=openai_http,target={url},model={model}"),
                *("--profile", "kind=concurrent,streams=4"),
                *("--constraint", f"kind=max_requests,count={REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={checkpoint}"),
                "--data",
                f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}",
                *("--output", f"kind=json,path={out}", "--disable-console-interactive"),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"HF_HOME": name},
        )
        found = json.loads(out.read_text())
    (benchmark,) = found["benchmarks"]
    print(json.dumps(benchmark)[:3000])
    print(f"ok, guidellm {metadata.version('guidellm')}")


if __name__ == "__main__":
    main(*sys.argv[1:])
