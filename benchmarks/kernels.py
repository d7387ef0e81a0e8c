"""Products of quantised matrices on one core: Strata's kernels and ggml's, on the same bytes.

    python -m benchmarks.kernels [--quick] [--json FILE] [--formats IQ2_XS,Q4_K] [--batches 1,4]

Matrices of 640 x 2560 weights, as the model's experts have; so many of each format that they stream from
memory where few tokens are multiplied. The contenders take turns within one process pinned to one core, each
turn on other matrices than the one before; a turn is timed by the CPU seconds of the whole process, so that
neither what else the machine does nor a thread of a contender's own falsifies it. Both are given float32
activations, and preparing them counts. Before anything is timed, every contender's products are held against
decoded weights multiplied in float64.

Claims: `kernel_nN_ratio`, the median over the formats of ggml's time over ours for N tokens;
`iq2_xs_window4_cost`, our time for 4 tokens over that for 1; `q2_0_over_q2_k`, our speed with Q2_0 over that
with Q2_K, where it is smallest.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import add_json_argument, positive, positives
from benchmarks.blocks import RANDOM_TYPES, decode, random_blocks
from benchmarks.ggml import Ggml, GgmlProducts, aligned_bytes
from benchmarks.peak import peak_mac_per_s
from benchmarks.processes import CpuWatch
from benchmarks.read_limit import read_all
from benchmarks.report import BenchmarkError, Report, describe_machine, measured, median, say, table
from shared.gguf.types import TensorType, tensor_type_named
from shared.quants import (
    ACTIVATIONS,
    CHOICES,
    ActivationPlane,
    BlockFormat,
    block_format,
    choose_kernels,
    kernel_target,
    multiply_task,
    uses_codes,
)
from shared.quants.products import matrix_record, run_task
from shared.topology import use_one_blas_thread

NUM_ROWS, WIDTH = 640, 2560
CLAIMED_FORMATS = ("Q8_0", "IQ4_NL", "Q4_K", "Q2_K", "IQ2_XS", "IQ2_S", "IQ3_S")
"""The formats that the ratios are medians of. llama.cpp has no vectorised kernel for Q2_0 on x86."""
FORMATS = (*CLAIMED_FORMATS, "Q2_0")
BATCHES = (1, 4, 32, 256)

TOLERANCE = 0.03
"""Largest error of a product that is accepted, as a share of the largest product: what rounding activations
to 8 bits costs is a half of it, measured; to 16 bits, a hundredth of that."""

_SPREAD = WIDTH**-0.5
_MIN_TURN_S = 0.002
_MIN_ROUNDS = 5
_NUM_CHECKED = 2
_MAX_FOREIGN_CPUS = 0.1

_Turn = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one format and batch size. Times are medians for one matrix, in CPU seconds."""

    type_name: str
    num_tokens: int
    matrix_bytes: int
    num_rounds: int
    read_s: float
    """Reading the matrix once, by a loop that does nothing else."""
    ours_s: float
    theirs_s: float
    ours_error: float
    """The largest error as a share of the largest product."""
    theirs_error: float

    @property
    def ratio(self) -> float:
        """How many times faster than ggml we are."""
        return self.theirs_s / self.ours_s

    @property
    def weights_gb_per_s(self) -> float:
        """Bytes of weights that our kernel gets through, in GB/s."""
        return self.matrix_bytes / self.ours_s / 1e9

    @property
    def ours_gmac_per_s(self) -> float:
        """Our multiply-adds, in 1e9 per second."""
        return self.num_tokens * NUM_ROWS * WIDTH / self.ours_s / 1e9

    @property
    def theirs_gmac_per_s(self) -> float:
        """ggml's."""
        return self.num_tokens * NUM_ROWS * WIDTH / self.theirs_s / 1e9

    @property
    def read_share(self) -> float:
        """Our speed as a share of the read limit."""
        return self.read_s / self.ours_s


class OurProducts:
    """Strata's products of x [num_tokens, width] with matrices uint8 [num_matrices, num_rows, row_bytes]. The
    one place that knows how our kernels are called: as a team's threads call them, without the checks of
    `shared.quants.matmul`, whose Python takes as long as a quarter of a product for one token."""

    def __init__(self, fmt: BlockFormat, matrices: NDArray[np.uint8], x: NDArray[np.float32]) -> None:
        self.out = np.zeros((len(x), matrices.shape[1]), np.float32)
        self._plane = ActivationPlane(x)
        # The records hold addresses only.
        self._matrices = matrices
        self._records = [matrix_record(matrix, self._plane, self.out) for matrix in matrices]
        self._num_rows = matrices.shape[1]
        self._task = multiply_task(fmt)
        self._is_rounded = uses_codes(fmt)

    def compute(self, number: int) -> None:
        """Prepares the activations and multiplies them with one of the matrices, into `out`."""
        if self._is_rounded:
            self._plane.quantise()
        run_task(self._task, self._records[number], 0, self._num_rows)


def random_matrices(kind: TensorType, num_matrices: int, seed: int) -> NDArray[np.uint8]:
    """uint8 [num_matrices, NUM_ROWS, row_bytes], all different, placed as ggml wants it."""
    rng = np.random.default_rng(seed)
    matrices = aligned_bytes((num_matrices, NUM_ROWS, kind.row_bytes(WIDTH)))
    num_blocks = NUM_ROWS * WIDTH // kind.block_size
    for matrix in matrices:
        matrix[:] = random_blocks(kind.name, num_blocks, _SPREAD, rng).reshape(matrix.shape)
    return matrices


def measure_format(
    ggml: Ggml, type_name: str, batches: Sequence[int], num_matrices: int, cell_s: float
) -> Iterator[Cell]:
    """One cell per batch size, each measured for about `cell_s` seconds. Raises BenchmarkError where a
    contender's products are wrong."""
    kind = tensor_type_named(type_name)
    fmt = block_format(kind.type_id)
    weights = random_matrices(kind, num_matrices, seed=kind.type_id)
    decoded = [decode(type_name, matrix).astype(np.float64) for matrix in weights[:_NUM_CHECKED]]
    words = [matrix.reshape(-1).view(np.uint64) for matrix in weights]
    rng = np.random.default_rng(1)

    def read(number: int) -> None:
        read_all(words[number])

    for num_tokens in batches:
        x = rng.standard_normal((num_tokens, WIDTH), np.float32)
        ours = OurProducts(fmt, weights, x)
        with GgmlProducts(ggml, kind, weights, x) as theirs:
            errors = [
                _largest_error(f"{name}, {type_name}, {num_tokens} tokens", compute, out, x, decoded)
                for name, compute, out in (
                    ("Strata", ours.compute, ours.out),
                    ("ggml", theirs.compute, theirs.out),
                )
            ]
            turns: dict[str, _Turn] = {"ours": ours.compute, "theirs": theirs.compute}
            turns["read"] = read
            times = interleave(turns, num_matrices, cell_s, rng)
        yield Cell(
            type_name,
            num_tokens,
            weights[0].nbytes,
            len(times["ours"]),
            median(times["read"]),
            median(times["ours"]),
            median(times["theirs"]),
            *errors,
        )


def interleave(
    turns: Mapping[str, _Turn], num_matrices: int, total_s: float, rng: np.random.Generator
) -> dict[str, list[float]]:
    """CPU seconds per call, one entry per round and contender. `turns` are called with the numbers of
    matrices: all of them in random order before any comes again, so that none is still in a cache."""
    order = rng.permutation(num_matrices)
    place = 0

    def turn(compute: _Turn, num_calls: int) -> float:
        nonlocal place
        numbers = [int(order[(place + step) % num_matrices]) for step in range(num_calls)]
        place += num_calls
        began = time.process_time()
        for number in numbers:
            compute(number)
        return (time.process_time() - began) / num_calls

    # Also warms up: a first call may compile.
    for compute in turns.values():
        turn(compute, 1)
    slowest = max(turn(compute, 1) for compute in turns.values())
    num_calls = max(1, round(_MIN_TURN_S / max(slowest, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in turns}
    names = list(turns)
    deadline = time.monotonic() + total_s
    while time.monotonic() < deadline or len(times[names[0]]) < _MIN_ROUNDS:
        for name in names:
            times[name].append(turn(turns[name], num_calls))
        # Nobody always follows the same one.
        names.append(names.pop(0))
    return times


def _largest_error(
    what: str,
    compute: _Turn,
    out: NDArray[np.float32],
    x: NDArray[np.float32],
    decoded: Sequence[NDArray[np.float64]],
) -> float:
    worst = 0.0
    for number, weights in enumerate(decoded):
        expected = x.astype(np.float64) @ weights.T
        out[:] = np.nan
        compute(number)
        error = float(np.abs(out - expected).max() / np.abs(expected).max())
        if not error <= TOLERANCE:
            raise BenchmarkError(f"{what}: products are off by {error:.3g} of the largest one")
        worst = max(worst, error)
    return worst


def claims(cells: Sequence[Cell]) -> dict[str, float]:
    """What the cells say; a claim whose cells are not all there is left out."""
    found = {(cell.type_name, cell.num_tokens): cell for cell in cells}
    result = {}
    for num_tokens in BATCHES:
        ratios = [found[name, num_tokens].ratio for name in CLAIMED_FORMATS if (name, num_tokens) in found]
        if len(ratios) == len(CLAIMED_FORMATS):
            result[f"kernel_n{num_tokens}_ratio"] = median(ratios)
    return result


def own_claims(cells: Collection[tuple[str, int]], num_matrices: int, pair_s: float) -> dict[str, float]:
    """What our kernels cost beside each other, as far as they are among `cells`: measured in turns of their
    own, since a machine changes its speed from one minute to the next."""

    def time_ratio(first: tuple[str, int], second: tuple[str, int]) -> float:
        return compare_ours(first, second, num_matrices, pair_s)

    result = {}
    if {("IQ2_XS", 4), ("IQ2_XS", 1)} <= set(cells):
        result["iq2_xs_window4_cost"] = time_ratio(("IQ2_XS", 4), ("IQ2_XS", 1))
    batches = [n for n in BATCHES if {("Q2_0", n), ("Q2_K", n)} <= set(cells)]
    if batches:
        result["q2_0_over_q2_k"] = min(time_ratio(("Q2_K", n), ("Q2_0", n)) for n in batches)
    return result


def compare_ours(first: tuple[str, int], second: tuple[str, int], num_matrices: int, total_s: float) -> float:
    """Our time for one format and number of tokens over that for another: the median of all rounds."""
    rng = np.random.default_rng(2)
    turns: dict[str, _Turn] = {}
    for name, (type_name, num_tokens) in (("first", first), ("second", second)):
        kind = tensor_type_named(type_name)
        weights = random_matrices(kind, num_matrices, seed=kind.type_id)
        x = rng.standard_normal((num_tokens, WIDTH), np.float32)
        turns[name] = OurProducts(block_format(kind.type_id), weights, x).compute
    times = interleave(turns, num_matrices, total_s, rng)
    return median([a / b for a, b in zip(times["first"], times["second"], strict=True)])


def _as_table(cells: Sequence[Cell]) -> str:
    header = ("format", "tokens", "us", "GB/s", "of read", "GMAC/s", "ggml GMAC/s", "ratio")
    rows = [
        (
            cell.type_name,
            str(cell.num_tokens),
            f"{1e6 * cell.ours_s:.0f}",
            f"{cell.weights_gb_per_s:.2f}",
            f"{100 * cell.read_share:.0f} %",
            f"{cell.ours_gmac_per_s:.1f}",
            f"{cell.theirs_gmac_per_s:.1f}",
            f"{cell.ratio:.2f}",
        )
        for cell in cells
    ]
    return table(
        (*header, "error", "ggml's"),
        [
            (*row, f"{cell.ours_error:.1e}", f"{cell.theirs_error:.1e}")
            for row, cell in zip(rows, cells, strict=True)
        ],
    )


def _formats(text: str) -> list[str]:
    names = text.split(",")
    if wrong := [name for name in names if name not in RANDOM_TYPES]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {','.join(RANDOM_TYPES)}")
    return names


def _usable_cpu(text: str) -> int:
    usable = sorted(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) not in usable:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of this process's CPUs, {','.join(map(str, usable))}"
        )
    return int(text)


def _describe(report: Report, cells: Sequence[Cell]) -> None:
    """What the cells were measured against, and all that was measured of them."""
    report.details["read_limit_gb_per_s"] = median(cell.matrix_bytes / cell.read_s / 1e9 for cell in cells)
    say(f"one core reads {report.details['read_limit_gb_per_s']:.1f} GB/s")
    if (target := kernel_target()) is not None:
        peak = peak_mac_per_s(target)
        best = max(cell.ours_gmac_per_s for cell in cells) / (peak / 1e9)
        report.details["peak_gmac_per_s"] = peak / 1e9
        say(
            f"one core multiplies {peak / 1e9:.0f} GMAC/s in registers; the fastest cell has {best:.0%} of it"
        )
    report.details["cells"] = [
        asdict(cell)
        | {
            "ratio": cell.ratio,
            "weights_gb_per_s": cell.weights_gb_per_s,
            "ours_gmac_per_s": cell.ours_gmac_per_s,
            "theirs_gmac_per_s": cell.theirs_gmac_per_s,
            "read_share": cell.read_share,
        }
        for cell in cells
    ]


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="under a minute, wider error")
    add_json_argument(parser)
    parser.add_argument("--formats", type=_formats, default=",".join(FORMATS), help="default %(default)s")
    batches = ",".join(map(str, BATCHES))
    parser.add_argument("--batches", type=positives, default=batches, help="default %(default)s")
    parser.add_argument("--matrices", type=positive, default=300, help="of each format (default %(default)s)")
    parser.add_argument("--cpu-kernels", default="auto", choices=CHOICES, help="ours (default %(default)s)")
    parser.add_argument(
        "--cpu-activations", default=ACTIVATIONS[0], choices=ACTIVATIONS, help="default %(default)s"
    )
    parser.add_argument("--deterministic", action="store_true", help="rows for any number of tokens")
    parser.add_argument(
        "--cpu", type=_usable_cpu, metavar="N", help="CPU to run on (default the last usable one)"
    )
    parsed = parser.parse_args()
    cpu = parsed.cpu if parsed.cpu is not None else max(os.sched_getaffinity(0))
    cell_s = 0.6 if parsed.quick else 3.0
    settings = {
        "formats": parsed.formats,
        "batches": parsed.batches,
        "matrices": parsed.matrices,
        "rows": NUM_ROWS,
        "width": WIDTH,
        "seconds_per_cell": cell_s,
        "cpu": cpu,
        "tolerance": TOLERANCE,
        "is_quick": parsed.quick,
    }
    report = Report("kernels", settings)

    def measure() -> int:
        machine = describe_machine()
        settings["cpu_kernels"] = kernels = choose_kernels(
            parsed.cpu_kernels, parsed.cpu_activations, deterministic=parsed.deterministic
        )
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {cpu})
        use_one_blas_thread()
        ggml = Ggml()
        report.details["ggml_instruction_sets"] = ggml.instruction_sets
        say(f"{machine}; on CPU {cpu}")
        say(f"our kernels: {kernels}; ggml is compiled for {' '.join(ggml.instruction_sets)}")
        cells: list[Cell] = []
        watch = CpuWatch(everywhere, lambda: 0.0)
        for type_name in parsed.formats:
            of_format = list(measure_format(ggml, type_name, parsed.batches, parsed.matrices, cell_s))
            cells += of_format
            say(_as_table(of_format))
        own_cells = {(cell.type_name, cell.num_tokens) for cell in cells}
        found = claims(cells) | own_claims(own_cells, parsed.matrices, cell_s)
        report.details["foreign_cpus"] = watch.foreign_cpus()
        if report.details["foreign_cpus"] > _MAX_FOREIGN_CPUS:
            report.note(
                f"disturbed: {report.details['foreign_cpus']:.2f} CPUs were busy with something else; it "
                "takes caches and memory from both contenders alike, absolute numbers are too low"
            )
        _describe(report, cells)
        report.claim_all(found)
        return 0

    return measured(report, parsed.json, measure)


if __name__ == "__main__":
    sys.exit(main())
