"""A worker of ``serving_throughput.py``: ``generate`` of transformers, greedy.

python benchmarks/serving_transformers.py CHECKPOINT [--dtype float32] [--experts eager]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--experts", default="eager", choices=["eager", "batched_mm", "grouped_mm"])
    a = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        a.checkpoint, dtype=getattr(torch, a.dtype), experts_implementation=a.experts
    ).eval()
    for line in sys.stdin:
        question = json.loads(line)
        ids, new = torch.tensor(question["prompts"]), question["new"]
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                min_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens = answer.shape[1] - ids.shape[1]
        sys.stdout.write(json.dumps({"tokens": [tokens] * len(ids)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
