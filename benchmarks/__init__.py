"""Measurements of Strata, most of them against llama.cpp on the same machine in the same run.

- `python -m benchmarks.versus_llama_cpp`: the whole server, tokens per second, memory, quality.
- `python -m benchmarks.kernels`: products of quantised matrices on one core.
- `python -m benchmarks.slices`: writes the models that the first of them is run on.

Each prints its claims on standard output, one `name: value` per line, and everything else on standard error;
`--json FILE` keeps both, with the machine and the versions. llama.cpp comes from the `xllamacpp` wheel.
"""
