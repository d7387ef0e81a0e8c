"""How many random pages of a file the disk reads in a second, and how that grows with the reads in flight.

    python -m benchmarks.disk_limit FILE [--depths 1,8,64,256] [--reads 20000] [--json FILE]

Pages of 4 KiB from anywhere in the file, past the page cache, by the kernel's asynchronous reads
(`io_submit`): so many are always under way, and the few calls to keep them there take little of a CPU. It
shares no code with Strata's own reader, whose limit it is.

Claims: `reads_per_s_N` with N in flight. A host may keep in its memory what a virtual machine has read or
written lately: the same file measured later may be slower.
"""

import argparse
import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.arguments import add_json_argument, positive, positives
from benchmarks.report import Report, describe_machine, say

DEPTHS = (64, 256)
"""Of which the faster one is taken for the disk's limit."""
NUM_READS = 20_000
_PAGE_BYTES = 4096
_SINGLE_READS, _FEW_READS = 2_000, 4_000

# System calls of x86-64.
_IO_SETUP, _IO_DESTROY, _IO_GETEVENTS, _IO_SUBMIT = 206, 207, 208, 209
_READ = 0
# struct iocb and struct io_event of linux/aio_abi.h.
_REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("file", "<u4"),
        ("buffer", "<u8"),
        ("num_bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_file", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_libc = ctypes.CDLL(None, use_errno=True)


def random_reads_per_s(
    path: Path, depth: int, num_reads: int = NUM_READS, start: int = 0, num_bytes: int | None = None
) -> float:
    """Pages read from a part of a file in a second, with so many reads in flight. Raises OSError, also where
    the file system has no direct reads."""
    rng = np.random.default_rng()
    first_page = -(-start // _PAGE_BYTES)
    last_page = (start + num_bytes if num_bytes is not None else path.stat().st_size) // _PAGE_BYTES
    if last_page <= first_page:
        raise OSError(f"{path} has no whole page to read")
    requests = np.zeros(num_reads, _REQUEST)
    # Two reads may come to share a buffer: nobody looks at what is in it.
    with mmap.mmap(-1, depth * _PAGE_BYTES) as buffers:
        mapped = np.frombuffer(buffers, np.uint8)
        requests["opcode"] = _READ
        requests["buffer"] = mapped.ctypes.data + np.arange(num_reads) % depth * _PAGE_BYTES
        requests["num_bytes"] = _PAGE_BYTES
        requests["offset"] = rng.integers(first_page, last_page, num_reads) * _PAGE_BYTES
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            requests["file"] = file
            return num_reads / _run(requests, depth)
        finally:
            os.close(file)
            del mapped


def disk_limit(path: Path, start: int, num_bytes: int) -> float:
    """Pages a second at the better of the depths. Raises OSError."""
    return max(random_reads_per_s(path, depth, NUM_READS, start, num_bytes) for depth in DEPTHS)


def disk_rate_now(path: Path, start: int, num_bytes: int) -> float | None:
    """About the same in a moment; None where the file system has no direct reads."""
    try:
        return random_reads_per_s(path, DEPTHS[0], _FEW_READS, start, num_bytes)
    except OSError:
        return None


def _run(requests: np.ndarray[tuple[int, ...], np.dtype[np.void]], depth: int) -> float:
    """Seconds for all of them."""
    count = len(requests)
    pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(count, dtype=np.uint64)
    events = np.zeros(depth, _EVENT)
    context = ctypes.c_ulong(0)
    _call(_IO_SETUP, ctypes.c_uint(depth), ctypes.byref(context))

    def submit(first: int, wanted: int) -> int:
        place = ctypes.c_void_p(pointers.ctypes.data + 8 * first)
        return _call(_IO_SUBMIT, context, ctypes.c_long(wanted), place)

    try:
        began = time.perf_counter()
        num_done, num_sent = 0, submit(0, min(depth, count))
        while num_done < count:
            # A few at once, or the calls would be most of the work.
            least = min(max(1, depth // 8), num_sent - num_done)
            place = ctypes.c_void_p(events.ctypes.data)
            found = _call(_IO_GETEVENTS, context, ctypes.c_long(least), ctypes.c_long(depth), place, None)
            if (events["result"][:found] != _PAGE_BYTES).any():
                raise OSError(f"a read brought {events['result'][:found].min()} of {_PAGE_BYTES} bytes")
            num_done += found
            if wanted := min(found, count - num_sent):
                num_sent += submit(num_sent, wanted)
        return time.perf_counter() - began
    finally:
        # Waits for what is under way.
        _call(_IO_DESTROY, context)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"asynchronous reads: {os.strerror(code)}")
    return result


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument(
        "--depths",
        type=positives,
        default="1,8,64,256",
        help="reads in flight (default %(default)s)",
    )
    parser.add_argument("--reads", type=positive, default=NUM_READS, help="for each (default %(default)s)")
    add_json_argument(parser)
    parsed = parser.parse_args()
    report = Report("disk_limit", {"depths": parsed.depths, "reads": parsed.reads})
    say(describe_machine())
    try:
        report.model = {"name": parsed.file.name, "bytes": parsed.file.stat().st_size}
        for depth in parsed.depths:
            num_reads = min(parsed.reads, _SINGLE_READS) if depth == 1 else parsed.reads
            report.claim(f"reads_per_s_{depth}", random_reads_per_s(parsed.file, depth, num_reads))
    except OSError as error:
        print(f"disk_limit: {error}", file=sys.stderr)
        return 1
    if parsed.json:
        report.write(parsed.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
