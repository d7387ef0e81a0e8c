"""Every message that travels between processes, who sends it to whom, and in what order.

::

    connecting side                    binding side
        Hello           ------>                         again every second until answered
                        <------        Init | Refusal
        Ready           ------>                         after it has set itself up
        Heartbeat       ------>                         for as long as it lives
        Farewell        ------>                         as its last word, when it leaves by itself
                        <------        Farewell         likewise

Links: gpu_worker, cpu_worker and stager connect to the gateway; cpu_worker and stager connect to the
gpu_worker; the stager connects to the cpu_worker. The transport identity is one of the connection, so that a
message from a dead process is never taken for one of its successor.

Tensors never travel in a message, only the descriptor of the segment they lie in.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from shared.arena import SegmentDescriptor

# Raised with every change of a message or of a segment's meaning; peers of another number are refused.
PROTOCOL_VERSION = 5

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

# The stop reason of an answer that is one token over and over. vLLM's word.
REPETITION = "repetition_detected"


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# The handshake, on every link.


class Hello(Message, frozen=True):
    """Connecting -> binding. First word of a process; repeated until answered; idempotent."""

    role: str
    incarnation: str
    protocol_version: int
    model_fingerprint: str
    pid: int


class Init(Message, frozen=True):
    """Binding -> connecting. Answers Hello; `segment` is the ring the peer is to serve, if any. Its shape
    follows from `ring_tokens`, the tokens of the largest step, or, between cpu_worker and stager, from
    `places_per_layer`. `experts` is how the cpu_worker has decided to keep experts (`ExpertMode`).
    `staging_segment` is a second ring for the stager, of the gpu_worker's `staging_places`, where it has a
    device that takes experts."""

    incarnation: str
    segment: SegmentDescriptor | None = None
    ring_tokens: int = 0
    places_per_layer: int = 0
    experts: str = ""
    staging_segment: SegmentDescriptor | None = None
    staging_places: int = 0


class Refusal(Message, frozen=True):
    """Binding -> connecting. Answers Hello where version or model differ: `is_final`, the peer gives up. Sent
    otherwise where a peer that was given up for dead speaks again: it is to begin anew with Hello."""

    reason: str
    is_final: bool


class Ready(Message, frozen=True):
    """Connecting -> binding. The peer has attached and serves; says what it found out about itself."""

    capabilities: dict[str, int | float | str]


class Heartbeat(Message, frozen=True):
    """Connecting -> binding, every heartbeat_interval_s, from a thread that never computes."""

    state: str
    activity: str
    progress: float
    gauges: dict[str, float]


class Farewell(Message, frozen=True):
    """Either way. The last word of a process that leaves by itself, and why."""

    reason: str


# Requests: gateway -> gpu_worker.


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen. Temperature 0 takes the likeliest after bias and penalties, whatever the
    rest says."""

    temperature: float
    top_k: int
    """0 is all."""
    top_p: float
    min_p: float
    seed: int
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    repeat_last_n: int = -1
    """Tokens that penalties look back at; -1 is all, 0 none."""
    logit_bias: list[tuple[TokenId, float]] = []
    """What is added to the logit of each of these tokens, every one of which is here once."""
    min_tokens: int = 0
    """Before so many tokens none is chosen that would end the answer."""
    num_top_logprobs: int | None = None
    """How many of the likeliest tokens come with each; None for no log-probabilities at all."""


class GenerateRequest(Message, frozen=True):
    """gateway -> gpu_worker. Starts one sequence. Answered by TokenChunks and one RequestFinished, or by one
    RequestFailed. Where `logits_path` is set, the logits of every prompt position are appended to that file
    as float32 rows."""

    request_id: str
    prompt_token_ids: list[TokenId]
    max_new_tokens: int
    eos_token_ids: list[TokenId]
    """End the answer; none with `ignore_eos`."""
    sampling: Sampling
    logits_path: str = ""
    boundaries: list[int] = []
    """Positions of the prompt at which messages begin, if that is known: where others are likely to part from
    it."""
    cache_salt: str = ""
    """What is kept of a conversation serves requests with the same salt only."""
    stop_token_ids: list[TokenId] = []
    """End it too, and are then named as its `stop_reason`."""
    may_repeat: bool = False
    """Whether one token may come any number of times in a row without ending the answer."""


class AbortRequest(Message, frozen=True):
    """gateway -> gpu_worker. The answer is no longer wanted. Idempotent; unknown ids are ignored; answered
    by RequestFinished with finish_reason "abort" where the request was known."""

    request_id: str


# Answers: gpu_worker -> gateway.


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one token, natural logarithms: its own, and those of the likeliest tokens in its place, likeliest
    first. They are the model's, as it computes them: without bias, penalties and temperature."""

    logprob: float
    top_token_ids: list[TokenId] = []
    top_logprobs: list[float] = []


class TokenChunk(Message, frozen=True):
    """gpu_worker -> gateway. New tokens of a request, in order."""

    request_id: str
    token_ids: list[TokenId]
    logprobs: list[TokenLogprobs] = []
    """One for each token where the request wants them, none where not."""
    ngram_wait_s: float = 0.0
    """How long the step that gave them waited for rows of the n-gram table."""


class PrefillProgress(Message, frozen=True):
    """gpu_worker -> gateway. How much of a prompt has been read."""

    request_id: str
    num_prefilled: int
    num_prompt_tokens: int


class FileReads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was read from one file: `file` is its name without directory, `wait_s` how long someone had
    nothing else to do than to wait for these reads."""

    file: str
    num_reads: int
    num_bytes: int
    wait_s: float


class RouteCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which way the routes of a request's tokens to their experts went; together they are all routes."""

    device: int = 0
    """Computed by the device, from a slot of the expert cache."""
    ram: int = 0
    """Computed by the cpu_worker, from RAM."""
    disk: int = 0
    """Likewise, once the expert had been read."""
    transferred: int = 0
    """Computed by the device, to which the expert was copied for this step, alone or with its whole layer."""
    skipped: int = 0
    """Left out (`--route-tail-skip`)."""


class ExpertBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes of the experts that a request's steps used, by where they were read or moved. In a step an expert
    of a layer counts once for each way, for the request of the first token that took it."""

    device: int = 0
    """Read from slots of the device."""
    ram: int = 0
    """Read by the cpu_worker, those that came from the disk included."""
    transferred: int = 0
    """Copied to the device for a step."""


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a request's time went in the gpu_worker, in seconds, and what it was waited for. Times of steps
    shared with other requests count in full for each of them; parts of a step that ran at the same time
    overlap. Rows, routes and reads are counted for the request that needed them."""

    queue_s: float
    prefill_s: float
    decode_s: float
    ngram_wait_s: float
    expert_wait_s: float
    """For the cpu_worker."""
    transfer_wait_s: float = 0.0
    """For experts on their way to the device, while there was nothing else to do."""
    device_wait_s: float = 0.0
    """For the device, which computed experts that it has."""
    ngram_rows: int = 0
    """Rows of the n-gram table that its tokens needed."""
    ngram_hits: int = 0
    """Those of them that were in memory, be it because they were staged for this request."""
    ngram_read_s: float = 0.0
    """How long rows were being read that its steps had asked for, whether or not anyone waited for them."""
    routes: RouteCounts = RouteCounts()
    expert_bytes: ExpertBytes = ExpertBytes()
    disk: list[FileReads] = []
    """Reads that steps waited for, one entry a file. What was staged before is in PromptStaged."""
    num_reused: int = 0
    """Tokens of the prompt that were not computed, since a conversation that begins so was kept."""
    reuse_note: str = ""
    """Why there were not more of them."""
    major_faults: int = 0
    """Of all workers during its steps: pages of mapped files that were waited for, one at a time."""


class RequestFinished(Message, frozen=True):
    """gpu_worker -> gateway. Last word about a request that ended well: `finish_reason` is "stop", "length"
    or "abort"."""

    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    timings: RequestTimings
    stop_reason: int | str | None = None
    """The stop token that ended it, or `REPETITION` where it ended since it was degenerate."""


class RequestFailed(Message, frozen=True):
    """gpu_worker -> gateway. Last word about a request that ended in an error; `timings` are those of the
    steps it had, None where it had none."""

    request_id: str
    code: str
    reason: str
    timings: RequestTimings | None = None


# Staging: gateway -> stager, and what came of it.


class StagePrompt(Message, frozen=True):
    """gateway -> stager. The token ids of a prompt, as soon as it is tokenised: the stager brings the n-gram
    rows near before anyone waits for them. Advice only: losing it costs time, never correctness."""

    request_id: str
    prompt_token_ids: list[TokenId]


class PromptStaged(Message, frozen=True):
    """stager -> gateway. Once for each StagePrompt whose rows were brought into memory, wholly or until it
    was forgotten."""

    request_id: str
    num_rows: int
    """Rows that were looked up, each row of the table once in a piece of the prompt."""
    num_hits: int
    """Those of them that were in memory already."""
    reads: FileReads
    seconds: float
    depth: float
    """Reads in flight, on average over the time in which there was one."""


class ForgetPrompt(Message, frozen=True):
    """gateway -> stager. The request is over; staging that has not begun may be dropped. Idempotent."""

    request_id: str


FromConnecting = (
    Hello
    | Ready
    | Heartbeat
    | Farewell
    | TokenChunk
    | PrefillProgress
    | RequestFinished
    | RequestFailed
    | PromptStaged
)
FromBinding = Init | Refusal | Farewell | GenerateRequest | AbortRequest | StagePrompt | ForgetPrompt
AnyMessage = FromConnecting | FromBinding
