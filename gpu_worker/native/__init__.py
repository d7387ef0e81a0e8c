"""The model on the CPU: every part of a layer as tasks in machine code, run by a team of threads."""
