"""llama.cpp's own server, from the `xllamacpp` wheel, in a process of its own.

    python -m benchmarks.llama_server MODEL.gguf --threads 2 --context 4096 [--slots 4] [--keep]

Says `{"url": ...}` on standard output once it serves, and ends with its input. Threads, address, slots and
the context that they share are set, and, without `--keep`, that of the prompts of earlier requests nothing is
kept; the rest are the server's defaults.
"""

import json
import os
import sys

from benchmarks.llama_process import KEEP, begin


def main() -> None:
    """Serves until its input ends."""
    parsed, answers = begin(
        __doc__,
        {KEEP: "keep the prompts of earlier requests, as the server does by default"},
        {"--slots": (1, "requests that are computed at the same time")},
    )
    try:
        import xllamacpp
    except ImportError:
        sys.exit("llama.cpp is missing: pip install xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = parsed.model
    params.n_ctx = parsed.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = parsed.threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = parsed.slots
    if not parsed.keep:
        params.cache_prompt = False
        params.cache_ram_mib = 0
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"url": server.listening_address}), file=answers, flush=True)
    sys.stdin.read()
    # What it holds is the system's to take back: taking the server down in order may take long.
    os._exit(0)


if __name__ == "__main__":
    main()
