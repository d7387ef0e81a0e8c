"""Kernels made for one CPU: LLVM code that Python writes, with vectors as values.

- `vector`: vectors and scalars of code that is being written, and what can be done with them;
- `instruction_set`: what this CPU has that matters here;
- `description`: what a block format has to say about itself, from which all of its kernels follow;
- `row_kernel`, `tile_kernel`: one token, and several;
- `machine_code`: from the finished code to an address, by way of the cache.
"""
