"""One request as the gpu_worker keeps it: its tokens, its place in the model's state, its clock."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu_worker.conversations import Reuse
from gpu_worker.experts.counts import ExpertCounts, Way
from gpu_worker.sampler import Sampler
from gpu_worker.speculation.drafts import Drafts
from gpu_worker.state.sequence_state import SequenceState
from shared.messages import (
    REPETITION,
    ExpertBytes,
    FileReads,
    GenerateRequest,
    RequestTimings,
    RouteCounts,
)

# One token that comes so many times in a row is no answer any more. A ruled line in a table is about 80.
_MAX_REPEATS = 256


@dataclass(slots=True)
class DiskReads:
    """Of one file, as they add up."""

    num_reads: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class Clock:
    """When things happened to a request (monotonic seconds), and what its steps waited for."""

    arrived_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    ngram_wait_s: float = 0.0
    expert_wait_s: float = 0.0
    transfer_wait_s: float = 0.0
    device_wait_s: float = 0.0
    ngram_rows: int = 0
    ngram_hits: int = 0
    ngram_read_s: float = 0.0
    num_routes: int = 0
    num_device_routes: int = 0
    num_disk_routes: int = 0
    num_transferred_routes: int = 0
    num_skipped_routes: int = 0
    expert_bytes: list[int] = field(default_factory=lambda: [0] * len(Way))
    """By `Way`."""
    major_faults: int = 0
    disk: dict[str, DiskReads] = field(default_factory=dict)
    """By the names of the files."""

    def add_reads(self, file: str, num_reads: int, num_bytes: int, wait_s: float) -> None:
        """Reads for one of its steps, and how long that waited for them."""
        if num_reads or wait_s:
            reads = self.disk.setdefault(file, DiskReads())
            reads.num_reads += num_reads
            reads.num_bytes += num_bytes
            reads.wait_s += wait_s

    def add_experts(self, counts: ExpertCounts, start: int, stop: int, routes_per_token: int) -> None:
        """Adds what a step says of its tokens `start` to `stop`, which are this request's."""
        self.num_routes += (stop - start) * routes_per_token
        (device, transferred, skipped), expert_bytes = counts.ways_of(start, stop)
        self.num_device_routes += device
        self.num_disk_routes += int(counts.disk_routes[start:stop].sum()) if counts.num_read else 0
        self.num_transferred_routes += transferred
        self.num_skipped_routes += skipped
        for way, num_bytes in enumerate(expert_bytes):
            self.expert_bytes[way] += num_bytes
        self.add_expert_reads(counts, start, stop)

    def add_expert_reads(self, counts: ExpertCounts, start: int, stop: int) -> None:
        """The reads of it alone: all that is known of a step that has failed."""
        self.major_faults += counts.major_faults
        if not counts.num_read:
            return
        # Where no read has brought anything, they still took their time.
        weights = (counts.read_bytes if counts.read_bytes.any() else counts.reads).sum(axis=1)
        for place, name in enumerate(counts.files.names):
            self.add_reads(
                name,
                int(counts.reads[place, start:stop].sum()),
                int(counts.read_bytes[place, start:stop].sum()),
                # In full for each request of the step, as all times are.
                counts.wait_s * float(weights[place] / max(1, weights.sum())),
            )

    def timings(self, now: float) -> RequestTimings:
        """The request's time until `now`, divided into its phases."""
        started_at = now if self.started_at is None else self.started_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return RequestTimings(
            queue_s=started_at - self.arrived_at,
            prefill_s=first_token_at - started_at,
            decode_s=now - first_token_at,
            ngram_wait_s=self.ngram_wait_s,
            expert_wait_s=self.expert_wait_s,
            transfer_wait_s=self.transfer_wait_s,
            device_wait_s=self.device_wait_s,
            ngram_rows=self.ngram_rows,
            ngram_hits=self.ngram_hits,
            ngram_read_s=self.ngram_read_s,
            routes=self._routes(),
            expert_bytes=ExpertBytes(
                device=self.expert_bytes[Way.DEVICE],
                ram=self.expert_bytes[Way.RAM],
                transferred=self.expert_bytes[Way.TRANSFERRED],
            ),
            disk=[
                FileReads(
                    file=file, num_reads=reads.num_reads, num_bytes=reads.num_bytes, wait_s=reads.wait_s
                )
                for file, reads in self.disk.items()
            ],
            major_faults=self.major_faults,
        )

    def _routes(self) -> RouteCounts:
        """By way: what is not spoken for was computed from RAM."""
        device, disk = self.num_device_routes, self.num_disk_routes
        transferred, skipped = self.num_transferred_routes, self.num_skipped_routes
        return RouteCounts(
            device=device,
            ram=self.num_routes - device - disk - transferred - skipped,
            disk=disk,
            transferred=transferred,
            skipped=skipped,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """A running or waiting request. `token_ids` are the prompt and what was generated so far.

    `state` is made when it begins: it is large, and a waiting request has no use for it. `reuse` is what it
    goes on from then, `wanted` are positions of the prompt at which checkpoints are to be taken, rising.
    """

    request: GenerateRequest
    sampler: Sampler
    clock: Clock
    token_ids: list[int] = field(default_factory=list)
    state: SequenceState | None = None
    reuse: Reuse | None = None
    wanted: list[int] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Drafts)
    last_read: int = 0
    """Number of the chunk that it has read last, among those of all sequences."""
    _prompt: NDArray[np.int32] | None = None

    @property
    def request_id(self) -> str:
        """The gateway's name for the request."""
        return self.request.request_id

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The token ids of the prompt, int32."""
        if self._prompt is None:
            self._prompt = np.array(self.request.prompt_token_ids, np.int32)
        return self._prompt

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, an end-of-text token included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that are part of the model's state."""
        return self.state.position if self.state is not None else 0

    def timings(self, now: float) -> RequestTimings:
        """What is told of the request: its time until `now`, and what it did without computing."""
        timings = msgspec.structs.replace(
            self.clock.timings(now),
            num_windows=self.drafts.num_windows,
            drafts=self.drafts.counts(),
            draft_s=self.drafts.seconds,
        )
        if self.reuse is None:
            return timings
        return msgspec.structs.replace(timings, num_reused=self.reuse.num_tokens, reuse_note=self.reuse.why)

    def is_end(self, token_id: int) -> bool:
        """Whether that token ends the sequence."""
        return token_id in self.request.eos_token_ids or token_id in self.request.stop_token_ids

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt has not been computed."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the sequence is at its end, or None."""
        request = self.request
        if self.num_output_tokens and self.is_end(self.token_ids[-1]):
            return "stop"
        if self.num_output_tokens >= request.max_new_tokens or self._is_degenerate:
            return "length"
        return None

    @property
    def stop_reason(self) -> int | str | None:
        """What ended the sequence, where that is a stop token, or that it repeats itself; else None."""
        request = self.request
        if not self.num_output_tokens or self.token_ids[-1] in request.eos_token_ids:
            return None
        if self.token_ids[-1] in request.stop_token_ids:
            return self.token_ids[-1]
        is_full = self.num_output_tokens >= request.max_new_tokens
        return REPETITION if self._is_degenerate and not is_full else None

    @property
    def _is_degenerate(self) -> bool:
        """Whether the last tokens are all the same, and too many."""
        if self.request.may_repeat or self.num_output_tokens < _MAX_REPEATS:
            return False
        last = self.token_ids[-1]
        # Nearly always that is answered by the one before.
        return self.token_ids[-2] == last and self.token_ids[-_MAX_REPEATS:].count(last) == _MAX_REPEATS

    def windows(self, start: int, stop: int, ngram_size: int, drafts: Items[int] = ()) -> NDArray[np.int32]:
        """The n-gram windows of tokens `start` to `stop`, and of drafts that follow them: [tokens,
        ngram_size], own id first, -1 before the start of the sequence."""
        reach = ngram_size - 1
        if stop - start == 1 and start >= reach and not drafts:
            # What decoding asks for at every step.
            return np.array(
                [self.token_ids[stop - 1 : start - ngram_size if start > reach else None : -1]], np.int32
            )
        ids = np.array([*self.token_ids[max(0, start - reach) : stop], *drafts], np.int32)
        ids = np.concatenate([np.full(max(0, reach - start), -1, np.int32), ids])
        return np.lib.stride_tricks.sliding_window_view(ids, ngram_size)[:, ::-1]
