"""Replays a routing trace (`--record-routing`) with other numbers of slots and other rules, without a model.

Every policy is tried with every number of slots. Tables, plans and policies are the engine's own; rates of
the link and the CPU are assumed, the same as by `strata plan`, and a swap's load takes a window. Shares are
of all routes, and add up to 100 %. That of the device is the hit rate; answers of `strata serve` have it as
`expert_routes.device`. Quarters are of the windows. Without a trace it is the one of the demo model.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.cli.progress import ProgressLine
from shared.config import SWAP_POLICIES
from shared.demo_model import DEMO_MODEL_PATH, DEMO_TRACE_PATH
from shared.draft_model import open_model
from shared.errors import ConfigError
from shared.expert_blobs import BlobLayout
from shared.model_config import read_model_config
from shared.placement import profile
from shared.placement.policies import DECAY, EVERY, MOST_SWAPS
from shared.placement.rates import ASSUMED_CPU, ASSUMED_LINK
from shared.placement.replay import Replay, Scenario
from shared.placement.trace import TraceHeader, TraceReader

_DEFAULT_BLOB_MIB = 1.372  # The mean of IQ2_XS.
_MIB, _GIB, _GB = 1 << 20, 1 << 30, 1e9
_HEADER = (
    "policy", "slots", "routes", "steps", "tokens", "device %", "transferred %", "CPU %", "skipped %",
    "transfers GiB", "swaps GiB", "device %, first quarter", "last quarter",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata simulate`."""
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        type=Path,
        default=DEMO_TRACE_PATH,
        help="what --record-routing has written (default: the one that comes with the demo model, 1610 "
        "windows about four topics)",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=SWAP_POLICIES[0],
        metavar="NAME,...",
        help=f"{', '.join(SWAP_POLICIES)}; several, separated by commas (default %(default)s)",
    )
    parser.add_argument(
        "--slots",
        type=_slots,
        default="50%",
        metavar="N|N%,...",
        help="slots, or their share of all experts; several, separated by commas (default 50%%)",
    )
    parser.add_argument(
        "--pcie-frac",
        type=_share,
        metavar="SHARE",
        help="share of missed experts that are transferred (default: from the rates)",
    )
    parser.add_argument(
        "--link-gb-s",
        type=_rate,
        default=ASSUMED_LINK / _GB,
        metavar="GB/s",
        help="of transfers (default %(default)g)",
    )
    parser.add_argument(
        "--cpu-gb-s",
        type=_rate,
        default=ASSUMED_CPU / _GB,
        metavar="GB/s",
        help="of experts that the CPU computes (default %(default)g)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="expert profile that decides what is loaded at the start"
    )
    parser.add_argument(
        "--route-tail-skip",
        type=_count,
        default=0,
        metavar="N",
        help="leave out an expert without a slot that every token of the step ranks behind its first N, less "
        "than the experts a token uses (default: leave out none)",
    )
    parser.add_argument(
        "--adapt-every",
        type=_positive,
        default=EVERY,
        metavar="WINDOWS",
        help="windows (steps of decoding) between two rounds of the adaptive policy (default %(default)s)",
    )
    parser.add_argument(
        "--adapt-swaps",
        type=_count,
        default=MOST_SWAPS,
        metavar="N",
        help="exchanges of a round at most (default %(default)s)",
    )
    parser.add_argument(
        "--adapt-decay",
        type=_share,
        default=DECAY,
        metavar="SHARE",
        help="what uses of an expert count after a round, of before (default %(default)g)",
    )
    parser.add_argument(
        "--prefill-stream-min",
        type=_positive,
        default=1024,
        metavar="TOKENS",
        help="steps from this size on stream all experts through the device (default %(default)s)",
    )
    parser.add_argument(
        "--load-windows",
        type=_count,
        default=1,
        metavar="N",
        help="windows that the load of a swap takes (default %(default)s)",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--model", type=Path, metavar="MODEL.gguf", help="that sizes of experts are taken from"
    )
    sizes.add_argument(
        "--blob-mib",
        type=_rate,
        metavar="MIB",
        help=f"size of an expert where no model is named (default {_DEFAULT_BLOB_MIB:g}, or that of the demo "
        "model for its trace)",
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="PATH",
        help="GGUF file with that model's prediction block, where it was traced with one",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(parsed: argparse.Namespace) -> int:
    """Replays and prints."""
    with TraceReader(parsed.trace) as reader:
        header = reader.header
        if parsed.route_tail_skip >= header.num_used:
            raise ConfigError(
                f"--route-tail-skip is {parsed.route_tail_skip}, but a token of {header.model} uses "
                f"{header.num_used} experts: none ranks behind that; lower it below {header.num_used}, or "
                "leave it out"
            )
        blob_bytes = _blob_bytes(parsed, header)
        counts = None
        if parsed.profile is not None:
            counts = profile.load(parsed.profile, header.identity, "name another file (--profile)")
        num_pairs = header.num_layers * header.num_experts
        replays = [Replay(header, scenario, blob_bytes, counts) for scenario in _scenarios(parsed, num_pairs)]
        progress = ProgressLine()
        try:
            # All at once: unpacking the trace takes as long as a replay.
            for step in reader:
                for replay in replays:
                    replay.step(step)
                progress.update(f"replaying {parsed.trace.name}", reader.position / reader.num_bytes)
        finally:
            progress.done()
    if parsed.json:
        described = {"trace": str(parsed.trace), "model": header.model, "num_pairs": num_pairs}
        print(json.dumps(described | {"scenarios": [replay.summary() for replay in replays]}, indent=2))
    else:
        print(f"{header.model}: {header.num_layers} layers of {header.num_experts} experts")
        print("\n".join(_table([_HEADER, *(row for replay in replays for row in _rows(replay))])))
    return 0


def _scenarios(parsed: argparse.Namespace, num_pairs: int) -> list[Scenario]:
    return [
        Scenario(
            policy=policy,
            num_slots=min(count(num_pairs), num_pairs),
            pcie_frac=parsed.pcie_frac,
            route_tail_skip=parsed.route_tail_skip,
            adapt_every=parsed.adapt_every,
            adapt_decay=parsed.adapt_decay,
            adapt_swaps=parsed.adapt_swaps,
            prefill_stream_min=parsed.prefill_stream_min,
            load_windows=parsed.load_windows,
            link_gb_s=parsed.link_gb_s,
            cpu_gb_s=parsed.cpu_gb_s,
        )
        for count in parsed.slots
        for policy in parsed.policy
    ]


def _blob_bytes(parsed: argparse.Namespace, header: TraceHeader) -> NDArray[np.int64]:
    is_demo = parsed.trace == DEMO_TRACE_PATH and parsed.blob_mib is None
    path = parsed.model or (DEMO_MODEL_PATH if is_demo else None)
    if path is None:
        return np.full(header.num_layers, round((parsed.blob_mib or _DEFAULT_BLOB_MIB) * _MIB), np.int64)
    with open_model(path, parsed.draft_model) as model:
        identity = profile.model_identity(model, read_model_config(model))
        if identity != header.identity:
            raise ConfigError(
                f"--model {path} is {identity.model} ({identity.fingerprint}), the trace is of "
                f"{header.model} ({header.fingerprint}); name the model that was traced, or a --blob-mib"
            )
        layers = BlobLayout(model, header.num_layers).layers
        return np.array([sum(part.num_bytes for part in layer.parts) for layer in layers], np.int64)


def _rows(replay: Replay) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, tally in (("decode", replay.decode), ("prefill", replay.prefill)):
        if not tally.num_steps:
            continue
        is_decode = tally is replay.decode
        quarters = ((0, 0.25), (0.75, 1)) if is_decode else ()
        rows.append(
            (
                replay.scenario.policy,
                str(replay.table.num_slots),
                name,
                str(tally.num_steps),
                str(tally.num_tokens),
                *(f"{100 * share:.2f}" for share in tally.shares.values()),
                f"{tally.transfer_bytes / _GIB:.2f}",
                f"{replay.swap_bytes / _GIB:.2f}" if is_decode else "",
                *(f"{100 * replay.hit_rate(*quarter):.2f}" for quarter in quarters),
                *([] if is_decode else ["", ""]),
            )
        )
    return rows


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


class SlotCount:
    """A number of slots, or a percentage of all experts; called with how many these are, the number.

    Raises ArgumentTypeError for a text that is neither.
    """

    def __init__(self, text: str) -> None:
        number = text.removesuffix("%")
        self._is_share = number != text
        try:
            self._number = float(number) if self._is_share else int(number)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number of slots nor a percentage"
            ) from None
        if self._number < 0 or (self._is_share and not self._number <= 100):
            raise argparse.ArgumentTypeError(f"{text!r}: slots are 0 or more, and at most 100 %")

    def __call__(self, num_pairs: int) -> int:
        return round(self._number * num_pairs / 100) if self._is_share else int(self._number)


def _slots(text: str) -> tuple[SlotCount, ...]:
    return tuple(SlotCount(part) for part in text.split(","))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SWAP_POLICIES:
            raise argparse.ArgumentTypeError(f"{name!r} is no policy; there are {', '.join(SWAP_POLICIES)}")
    return names


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _share(text: str) -> float:
    share = _number(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return share


def _rate(text: str) -> float:
    rate = _number(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return rate


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if _count(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
