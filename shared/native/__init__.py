"""Compute without Python in the way: tasks in machine code, and teams of threads that run lists of them."""
