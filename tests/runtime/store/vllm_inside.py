"""Runs inside the Python that has vLLM: engines and stores, as a user would see them.

    python vllm_inside.py FOLDER server|folder|ranks      writes FOLDER/result.json

The checkpoint is a random Llama of three layers, made here, so nothing is fetched.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

BLOCK_TOKENS = 32
PROMPT_TOKENS = 200
ANSWER_TOKENS = 60
DEADLINE_S = 60.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_checkpoint(folder: Path) -> None:
    """A random Llama; the weights are wide enough that greedy answers depend on every token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


class Server:
    """A store server in a process of its own.

    Attributes:
        socket_path: Where it listens.
        arena: File of its shared memory.
    """

    CODE = (
        "import sys, time; from pathlib import Path\n"
        "from runtime.store.node import StoreNode\n"
        "from runtime.store.store import store_config\n"
        "from runtime.store.unix_server import UnixServer\n"
        "config = store_config(sys.argv[1], dram='64MiB', ssd=0, block_bytes='1MiB')\n"
        "node = StoreNode(config); UnixServer(node, Path(sys.argv[2])).start()\n"
        "print(node.arena.path, flush=True); time.sleep(900)\n"
    )

    def __init__(self, folder: Path) -> None:
        self.socket_path = folder / "store.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(folder / "store"), str(self.socket_path)],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.arena = Path(self._process.stdout.readline().decode().strip())

    def stop(self) -> None:
        """Let it hang: connections stay open, nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self.arena.unlink(missing_ok=True)


def make_engine(checkpoint: Path, extra: dict[str, object], **settings: object):
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="PrefixStoreConnector",
            kv_connector_module_path="runtime.store.vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
        **settings,
    )


def prompt_tokens(seed: int) -> list[int]:
    return [3 + (i * 37 + seed * 101 + i * i * 7) % 500 for i in range(PROMPT_TOKENS)]


class Session:
    """Asks an engine and watches its counters."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.before: dict[str, float] = {}

    def ask(self, *prompts: list[int], salt: str | None = None) -> dict[str, object]:
        """Greedy answers, and how far each counter went."""
        from vllm import SamplingParams

        asked = [
            {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}
            for tokens in prompts
        ]
        sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
        )
        start_s = time.monotonic()
        outputs = self.engine.generate(asked, sampling, use_tqdm=False)
        seconds = time.monotonic() - start_s
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return {"answers": answers, "seconds": seconds, "counts": self.counts()}

    def counts(self) -> dict[str, float]:
        """How far each counter went since the last call."""
        now = {
            metric.name: metric.value
            for metric in self.engine.get_metrics()
            if hasattr(metric, "value")
            and metric.name.startswith(("vllm:ptstore", "vllm:external_prefix"))
        }
        changes = {name: value - self.before.get(name, 0) for name, value in now.items()}
        self.before = now
        return {name: change for name, change in changes.items() if change}


def wait_until(check) -> bool:
    end_s = time.monotonic() + DEADLINE_S
    while not (is_true := check()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return is_true


def flip_bytes(path: Path) -> int:
    """Flip a bit in every page of memory that holds keys and values; how many pages."""
    flipped = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(mmap.PAGESIZE, len(memory), mmap.PAGESIZE):
            if memory[at : at + mmap.PAGESIZE].count(0) < mmap.PAGESIZE // 2:
                memory[at + mmap.PAGESIZE // 2] ^= 0x10
                flipped += 1
    return flipped


def with_server(folder: Path, checkpoint: Path) -> dict[str, object]:
    """One engine and a server that goes through what servers go through."""
    from runtime.store.store import connect

    server = Server(folder)
    result: dict[str, object] = {}
    try:
        store = connect(server.socket_path)

        def stored() -> dict[str, int]:
            stats = store.stats()
            return {
                "blocks": stats["gauges"]["memory_blocks"],
                "hits": stats["counters"].get("blocks_hit", 0),
                "broken": stats["counters"].get("blocks_broken_in_memory", 0),
            }

        extra = {
            "socket": str(server.socket_path),
            "retry_s": 0.5,
            "deadline_s": 20.0,
            "lookup_deadline_s": 3.0,
        }
        session = Session(make_engine(checkpoint, extra))
        whole = (PROMPT_TOKENS + ANSWER_TOKENS - 1) // BLOCK_TOKENS

        result["cold"] = session.ask(prompt_tokens(0))
        result["is_kept"] = wait_until(lambda: stored()["blocks"] == whole)
        result["warm"] = session.ask(prompt_tokens(0))
        result["store_after_warm"] = stored()

        answer = result["cold"]["answers"][0]
        chat = prompt_tokens(0) + answer + prompt_tokens(9)[:40]
        result["next_turn"] = session.ask(chat)

        result["salt_a"] = session.ask(prompt_tokens(0), salt="a")
        all_blocks = whole + (len(chat) + ANSWER_TOKENS - 1) // BLOCK_TOKENS
        wait_until(lambda: stored()["blocks"] == all_blocks)
        result["salt_b"] = session.ask(prompt_tokens(0), salt="b")
        result["salt_a_again"] = session.ask(prompt_tokens(0), salt="a")

        before = stored()
        result["flipped"] = flip_bytes(server.arena)
        result["corrupted"] = session.ask(prompt_tokens(0))
        result["broken"] = stored()["broken"] - before["broken"]

        server.stop()
        result["hanging"] = session.ask(prompt_tokens(0), prompt_tokens(1))
        server.go_on()
        for _ in range(60):  # the engine finds the store again by itself
            result["back"] = session.ask(prompt_tokens(2))
            if result["back"]["counts"].get("vllm:external_prefix_cache_hits"):
                break
            time.sleep(0.5)

        many = [prompt_tokens(seed) for seed in range(3, 9)]
        session.ask(*many[:3])  # the others are new
        killer = threading.Timer(0.1, server.kill)
        killer.start()
        result["killed_midway"] = session.ask(*many)
        killer.join()
        result["without"] = session.ask(prompt_tokens(0), prompt_tokens(1), *many)
    finally:
        server.kill()
    return result


def with_folder(folder: Path, checkpoint: Path) -> dict[str, object]:
    """Engines one after another that have only a folder; scheduler and worker are two processes."""
    extra = {
        "directory": str(folder / "own"),
        "dram": "64MiB",
        "ssd": "256MiB",
        "deadline_s": 20.0,
        "lookup_deadline_s": 10.0,
    }
    result: dict[str, object] = {}
    engine = make_engine(checkpoint, extra, distributed_executor_backend="mp")
    result["cold"] = Session(engine).ask(prompt_tokens(0))
    engine.llm_engine.engine_core.shutdown()
    engine = make_engine(checkpoint, extra, distributed_executor_backend="mp")
    result["after_restart"] = Session(engine).ask(prompt_tokens(0))
    engine.llm_engine.engine_core.shutdown()
    return result


def with_ranks(folder: Path, checkpoint: Path) -> dict[str, object]:
    """Two tensor-parallel workers, each with a part of every block."""
    from runtime.store.store import connect

    server = Server(folder)
    result: dict[str, object] = {}
    try:
        store = connect(server.socket_path)
        whole = (PROMPT_TOKENS + ANSWER_TOKENS - 1) // BLOCK_TOKENS
        extra = {
            "socket": str(server.socket_path),
            "block_tokens": 2 * BLOCK_TOKENS,
            "deadline_s": 20.0,
            "lookup_deadline_s": 10.0,
        }
        engine = make_engine(checkpoint, extra, tensor_parallel_size=2)
        session = Session(engine)
        result["cold"] = session.ask(prompt_tokens(0))
        wait_until(lambda: store.stats()["gauges"]["memory_blocks"] == 2 * (whole // 2))
        result["blocks"] = store.stats()["gauges"]["memory_blocks"]
        result["warm"] = session.ask(prompt_tokens(0))
        engine.llm_engine.engine_core.shutdown()
    finally:
        server.kill()
    return result


def main(folder: Path, scenario: str) -> None:
    os.environ.update(ENVIRONMENT)
    make_checkpoint(folder / "checkpoint")
    run = {"server": with_server, "folder": with_folder, "ranks": with_ranks}[scenario]
    result = run(folder, folder / "checkpoint")
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
