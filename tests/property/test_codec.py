"""Every message survives the wire, and no bytes whatever break the reader."""

import math

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.arena import SegmentDescriptor
from shared.codec import decode_from_binding, decode_from_connecting, encode
from shared.errors import ProtocolError
from shared.messages import (
    AbortRequest,
    ExpertBytes,
    Farewell,
    FileReads,
    ForgetPrompt,
    GenerateRequest,
    Heartbeat,
    Hello,
    Init,
    Message,
    PrefillProgress,
    PromptStaged,
    Ready,
    Refusal,
    RequestFailed,
    RequestFinished,
    RequestTimings,
    RouteCounts,
    Sampling,
    StagePrompt,
    TokenChunk,
    TokenLogprobs,
)

untimed = settings(deadline=None, print_blob=True)

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
counts = st.integers(-(2**63), 2**64 - 1)
numbers = st.floats(allow_nan=False)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)

sampling = st.builds(
    Sampling,
    temperature=numbers,
    top_k=counts,
    top_p=numbers,
    min_p=numbers,
    seed=counts,
    typical_p=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=numbers,
    repeat_last_n=counts,
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), numbers), max_size=4),
    min_tokens=counts,
    num_top_logprobs=st.none() | counts,
)
logprobs = st.builds(
    TokenLogprobs,
    logprob=numbers,
    top_token_ids=token_ids,
    top_logprobs=st.lists(numbers, max_size=4),
)
file_reads = st.builds(FileReads, file=any_text, num_reads=counts, num_bytes=counts, wait_s=numbers)
timings = st.builds(
    RequestTimings,
    queue_s=numbers,
    prefill_s=numbers,
    decode_s=numbers,
    ngram_wait_s=numbers,
    expert_wait_s=numbers,
    transfer_wait_s=numbers,
    device_wait_s=numbers,
    ngram_rows=counts,
    ngram_hits=counts,
    routes=st.builds(RouteCounts, device=counts, ram=counts, disk=counts, transferred=counts, skipped=counts),
    expert_bytes=st.builds(ExpertBytes, device=counts, ram=counts, transferred=counts),
    disk=st.lists(file_reads, max_size=3),
    major_faults=counts,
)
farewells = st.builds(Farewell, reason=any_text)
from_connecting: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        role=any_text,
        incarnation=any_text,
        protocol_version=counts,
        model_fingerprint=any_text,
        pid=counts,
    ),
    st.builds(Ready, capabilities=st.dictionaries(any_text, counts | numbers | any_text, max_size=4)),
    st.builds(
        Heartbeat,
        state=any_text,
        activity=any_text,
        progress=numbers,
        gauges=st.dictionaries(any_text, numbers, max_size=4),
    ),
    farewells,
    st.builds(TokenChunk, request_id=any_text, token_ids=token_ids, logprobs=st.lists(logprobs, max_size=3)),
    st.builds(PrefillProgress, request_id=any_text, num_prefilled=counts, num_prompt_tokens=counts),
    st.builds(
        PromptStaged,
        request_id=any_text,
        num_rows=counts,
        num_hits=counts,
        reads=file_reads,
        seconds=numbers,
        depth=numbers,
    ),
    st.builds(
        RequestFinished,
        request_id=any_text,
        finish_reason=any_text,
        num_prompt_tokens=counts,
        num_output_tokens=counts,
        timings=timings,
        stop_reason=st.none() | st.integers(0, 2**31 - 1) | any_text,
    ),
    st.builds(RequestFailed, request_id=any_text, code=any_text, reason=any_text),
)
from_binding: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Init,
        incarnation=any_text,
        segment=st.none() | st.builds(SegmentDescriptor, name=any_text, num_bytes=counts),
        ring_tokens=counts,
    ),
    st.builds(Refusal, reason=any_text, is_final=st.booleans()),
    farewells,
    st.builds(
        GenerateRequest,
        request_id=any_text,
        prompt_token_ids=token_ids,
        max_new_tokens=counts,
        eos_token_ids=token_ids,
        sampling=sampling,
        logits_path=any_text,
        stop_token_ids=token_ids,
        may_repeat=st.booleans(),
    ),
    st.builds(AbortRequest, request_id=any_text),
    st.builds(StagePrompt, request_id=any_text, prompt_token_ids=token_ids),
    st.builds(ForgetPrompt, request_id=any_text),
)
# What msgpack can hold, whether or not it is a message.
anything = st.recursive(
    st.none() | st.booleans() | counts | numbers | any_text | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


@untimed
@given(from_connecting)
def test_round_trip_from_connecting(message: Message) -> None:
    """What arrives is what was sent: every type, every value its fields can have."""
    assert decode_from_connecting(encode(message), "peer") == message


@untimed
@given(from_binding)
def test_round_trip_from_binding(message: Message) -> None:
    """Likewise the other way."""
    assert decode_from_binding(encode(message), "peer") == message


@untimed
@given(st.floats())
def test_any_float(value: float) -> None:
    """Infinities and NaN, too, which a gauge or a timing may be."""
    beat = Heartbeat(state="", activity="", progress=value, gauges={})
    decoded = decode_from_connecting(encode(beat), "peer")
    assert isinstance(decoded, Heartbeat)
    assert decoded.progress == value or (math.isnan(decoded.progress) and math.isnan(value))


def check_refusal(payload: bytes) -> None:
    for decode in (decode_from_connecting, decode_from_binding):
        try:
            decoded = decode(payload, "peer")
        except ProtocolError:
            continue
        assert isinstance(decoded, Message)


@untimed
@given(st.binary(max_size=60))
def test_any_bytes(payload: bytes) -> None:
    """Bytes are a message or a ProtocolError, and nothing else."""
    check_refusal(payload)


@untimed
@given(st.sampled_from(["Hello", "Init", "TokenChunk", "Heartbeat"]), anything, anything)
def test_any_structure(tag: str, body: object, value: object) -> None:
    """Likewise any structure that msgpack can hold, with a tag that is known."""
    fields = body if isinstance(body, dict) else {"request_id": body, "token_ids": value, "gauges": value}
    check_refusal(msgpack.packb(fields | {"type": tag}))
    check_refusal(msgpack.packb(body))


@untimed
@given(from_connecting, st.data())
def test_damaged_messages(message: Message, data: st.DataObject) -> None:
    """Likewise a message of which a byte was changed or the end is missing."""
    payload = bytearray(encode(message))
    at = data.draw(st.integers(0, len(payload) - 1))
    check_refusal(bytes(payload[:at]))
    payload[at] = data.draw(st.integers(0, 255))
    check_refusal(bytes(payload))
