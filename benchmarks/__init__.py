"""Measurements of Strata, most of them against llama.cpp on the same machine in the same run.

- `python -m benchmarks.versus_llama_cpp`: the whole server, tokens per second, memory, quality.
- `python -m benchmarks.kernels`: products of quantised matrices on one core.
- `python -m benchmarks.cold_start`: the first token where rows of the n-gram table are on the disk.
- `python -m benchmarks.low_memory`: decoding in half the memory that the model takes.
- `python -m benchmarks.expert_cache`: experts found in slots of the device, as the topic changes.
- `python -m benchmarks.step_profile`: where the time of a decoded token goes.
- `python -m benchmarks.disk_limit`: random pages that the disk reads in a second.
- `python -m benchmarks.slices`: writes the models that they are run on.

Each prints its claims on standard output, one `name: value` per line, and everything else on standard error;
`--json FILE` keeps both, with the machine and the versions. llama.cpp comes from the `xllamacpp` wheel.
"""
