"""lm-eval through the API against lm-eval on the checkpoint, equal to 4 digits.

`python lm_eval_scores.py URL MODEL CHECKPOINT_FOLDER [KEY]`. Needs lm-eval[api] and torch. The
tasks are local: a perplexity of texts and a multiple choice. Exit code 1 if a number differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

DIGITS = 4
TEXTS = [
    "the quick brown fox jumps over the lazy dog while some other words are there to be merged",
    "a model of the world has layers, experts, tokens and a long memory of what was said before",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "def add(a, b):\n    return a + b\n",
    "0123456789 " * 12,
]
QUESTIONS = [
    ("the quick brown fox jumps over the lazy", [" dog", " cat", " moon"], 0),
    ("a model of the world has", [" layers", " apples"], 0),
    ("experts, tokens and a long", [" memory", " night", " road", " list"], 0),
    ("what was said", [" before", " after"], 0),
    ("1 2 3 4", [" 5", " 7", " 9"], 0),
    ("def add(a, b):\n    return a", [" + b", " - b"], 0),
]
PERPLEXITY = """task: local_ppl
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CHOICE = """task: local_mc
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def main(url: str, model: str, checkpoint: str, key: str = "none") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder)
        through = run(
            folder,
            "api",
            "--model=local-completions",
            f"--model_args=model={model},base_url={url}/v1/completions,num_concurrent=4,"
            f"max_retries=1,tokenizer_backend=huggingface,tokenizer={checkpoint},max_length=500",
            "--batch_size=2",
            key=key,
        )
        direct = run(
            folder,
            "hf",
            "--model=hf",
            f"--model_args=pretrained={checkpoint},dtype=float32,max_length=500",
            "--batch_size=1",
            "--device=cpu",
            key=key,
        )
    assert through.keys() == direct.keys()
    print(f"lm-eval {metadata.version('lm-eval')}: metric, through the API, transformers")
    for metric, value in sorted(through.items()):
        print(f"  {metric:32} {value:.7g} {direct[metric]:.7g}")
    different = [
        metric
        for metric, value in through.items()
        if f"{value:.{DIGITS}g}" != f"{direct[metric]:.{DIGITS}g}"
    ]
    if different:
        raise SystemExit(f"not equal to {DIGITS} digits: {', '.join(different)}")
    print("ok")


def write_tasks(folder: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    lines = [
        json.dumps({"question": question, "choices": choices, "answer": answer})
        for question, choices, answer in QUESTIONS
    ]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    for name, task in (("ppl", PERPLEXITY), ("mc", CHOICE)):
        (folder / f"{name}.yaml").write_text(task.replace("FOLDER", str(folder)))


def run(folder: Path, name: str, *arguments: str, key: str) -> dict[str, float]:
    """Metrics of one run, by task and name."""
    out = folder / name
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", *arguments, "--tasks=local_ppl,local_mc"),
            *(f"--include_path={folder}", f"--output_path={out}"),
        ],
        check=True,
        env=os.environ
        | {"OPENAI_API_KEY": key, "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
        | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    (found,) = out.rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    return {
        f"{task} {metric.split(',')[0]}": value
        for task, values in results.items()
        for metric, value in values.items()
        if isinstance(value, float) and "stderr" not in metric
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
