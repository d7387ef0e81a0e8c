"""How fast things are, for estimates: given, measured within half a second, or assumed and said to be."""

import mmap
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Rates:
    """In bytes per second: `link` from RAM to the device, `cpu` of encoded experts computed in RAM, `disk` of
    large reads, `device` of weights read from the device's memory; and `prompt_tokens` per second that are
    computed where all experts are at hand."""

    link: float
    cpu: float
    disk: float
    device: float
    prompt_tokens: float


ASSUMED_LINK, ASSUMED_CPU = 13.1 * _GB, 5.9 * _GB
"""The slowest link and CPU of four machines that the original engine logged."""
ASSUMED_DISK = 0.5 * _GB
"""A disk on a SATA link."""
ASSUMED_DEVICE = 468 * _GB
"""Half of what an RTX 3090 is sold as."""
# The original engine read 17,458 tokens in 5.34 s of computing on an RTX 3090, with 6e9 weights a token.
_DEVICE_WEIGHTS_S = 17_458 / 5.34 * 6e9
# A core of a server CPU with AVX-512 and VNNI, as in the README's table.
_CORE_WEIGHTS_S = 3.5e10

_PROBE_SECONDS = 0.1
_PROBE_BYTES = 64 << 20
_PROBE_DEPTH = 4


def assumed_rates(active_weights: int, num_cores: int, *, has_device: bool) -> Rates:
    """Rates of a machine nothing is known of but its cores, and whether it has a device other than them; for
    a model that multiplies each token of a prompt with so many weights."""
    weights_s = _DEVICE_WEIGHTS_S if has_device else num_cores * _CORE_WEIGHTS_S
    device = ASSUMED_DEVICE if has_device else ASSUMED_CPU
    return Rates(ASSUMED_LINK, ASSUMED_CPU, ASSUMED_DISK, device, weights_s / active_weights)


def probe_copy() -> float:
    """Bytes per second of copying within RAM: the link of a device whose memory is RAM."""
    source, target = np.ones(_PROBE_BYTES, np.uint8), np.empty(_PROBE_BYTES, np.uint8)
    np.copyto(target, source)
    return _rate(lambda: np.copyto(target, source), _PROBE_BYTES)


def probe_reading(num_threads: int) -> float:
    """Bytes per second that so many threads read from RAM together: what computing experts there comes near
    to at best."""
    pieces = [np.ones(_PROBE_BYTES // 8, np.int64) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        return _rate(lambda: list(pool.map(np.max, pieces)), num_threads * _PROBE_BYTES)


def probe_disk(path: Path, read_bytes: int) -> float | None:
    """Bytes per second of reads of that size anywhere in a file, past the page cache, a few at a time. None
    where the file is too small, or its file system cannot do that."""
    num_bytes = -(-read_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    num_places = os.stat(path).st_size // num_bytes
    if num_places < 2 * _PROBE_DEPTH:
        return None
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        with ThreadPoolExecutor(_PROBE_DEPTH) as pool:
            buffers = [mmap.mmap(-1, num_bytes) for _ in range(_PROBE_DEPTH)]
            places = random.Random(0)

            def read() -> None:
                offsets = [places.randrange(num_places) * num_bytes for _ in buffers]
                list(pool.map(lambda at, into: os.preadv(file, [into], at), offsets, buffers))

            return _rate(read, _PROBE_DEPTH * num_bytes)
    except OSError:
        return None
    finally:
        os.close(file)


def _rate(work: Callable[[], object], num_bytes: int) -> float:
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < _PROBE_SECONDS:
        work()
        count += 1
    return count * num_bytes / (time.perf_counter() - started)
