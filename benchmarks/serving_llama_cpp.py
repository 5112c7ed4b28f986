"""llama.cpp's own HTTP server out of the wheel ``xllamacpp``, one thread, until it is killed.

python benchmarks/serving_llama_cpp.py MODEL.gguf --port 8803 (the wheel in this Python's packages)
"""

from __future__ import annotations

import argparse
import os
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8803)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=512, help="tokens per slot")
    a = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    settings = xllamacpp.CommonParams()
    settings.model.path = a.model
    settings.model_alias = "m"
    settings.n_ctx = a.slots * a.context
    settings.n_parallel = a.slots
    settings.port = a.port
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.cache_ram_mib = 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
