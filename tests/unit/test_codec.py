"""Messages on the wire: what a peer may not send is refused by name, whatever it is."""

import re

import msgpack
import msgspec
import pytest

from shared.codec import decode_from_binding, decode_from_connecting, encode
from shared.errors import ProtocolError
from shared.messages import (
    AbortRequest,
    Farewell,
    ForgetPrompt,
    GenerateRequest,
    Heartbeat,
    Hello,
    Ready,
    Sampling,
    StagePrompt,
    TokenChunk,
)

HELLO = Hello(role="stager", incarnation="ab", protocol_version=1, model_fingerprint="f", pid=7)
SAMPLING = Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, seed=2**63)


def packed(**changes: object) -> bytes:
    """HELLO on the wire, changed."""
    return msgpack.packb(msgspec.to_builtins(HELLO) | changes)


def test_the_wire_is_msgpack_with_a_tag() -> None:
    """What other languages and later versions have to rely on."""
    assert msgpack.unpackb(encode(HELLO)) == {
        "type": "Hello",
        "role": "stager",
        "incarnation": "ab",
        "protocol_version": 1,
        "model_fingerprint": "f",
        "pid": 7,
    }


def test_optional_fields_may_be_absent() -> None:
    """A field with a default need not be sent."""
    request = GenerateRequest(
        request_id="r", prompt_token_ids=[1], max_new_tokens=1, eos_token_ids=[2], sampling=SAMPLING
    )
    fields = msgpack.unpackb(encode(request))
    del fields["logits_path"]
    assert decode_from_binding(msgpack.packb(fields), "gateway") == request


NOT_UNDERSTOOD = {
    "nothing": b"",
    "no map": msgpack.packb([1, 2]),
    "a number": b"\x01",
    "cut": encode(HELLO)[:-1],
    "two messages": encode(HELLO) * 2,
    "reserved byte": b"\xc1",
    "not UTF-8": b"\x81\xa4type\xa5\xff\xff\xff\xff\xff",
    "a list as a key": b"\x81\x90\x01",
    "deep": b"\x91" * 5000,
    "a huge length": b"\xdd\xff\xff\xff\xff",
    "extension": msgpack.packb(msgpack.ExtType(5, b"x")),
    "time": msgpack.packb(msgpack.Timestamp(1, 0)),
    "no tag": msgpack.packb({"role": "stager"}),
    "unknown tag": packed(type="Goodbye"),
    "a tag that is a number": packed(type=4),
    "extra field": packed(extra=1),
    "missing field": msgpack.packb({"type": "Hello", "role": "stager"}),
    "text for a number": packed(pid="7"),
    "a flag for a number": packed(pid=True),
    "a fraction for a number": packed(pid=7.5),
    "nothing for text": packed(role=None),
    "bytes for text": packed(role=b"stager"),
    "negative token": msgpack.packb({"type": "TokenChunk", "request_id": "r", "token_ids": [-1]}),
    "token too large": msgpack.packb({"type": "TokenChunk", "request_id": "r", "token_ids": [2**31]}),
    "text for tokens": msgpack.packb({"type": "TokenChunk", "request_id": "r", "token_ids": "abc"}),
    "list in capabilities": msgpack.packb({"type": "Ready", "capabilities": {"a": [1]}}),
    "text for a gauge": msgpack.packb(
        {"type": "Heartbeat", "state": "", "activity": "", "progress": 0, "gauges": {"a": "b"}}
    ),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood(name: str) -> None:
    """Refused as one kind of error that names the peer, so that a damaged or foreign message costs itself
    and not the process."""
    with pytest.raises(ProtocolError, match=r"stager\.ab sent a message that is not understood: "):
        decode_from_connecting(NOT_UNDERSTOOD[name], "stager.ab")


def test_the_refusal_says_what_is_wrong() -> None:
    """The field is in the message."""
    with pytest.raises(ProtocolError, match=re.escape("Expected `int`, got `str` - at `$.pid`")):
        decode_from_connecting(packed(pid="7"), "stager")


def test_directions() -> None:
    """Each side may say only its own: a worker that sends requests is refused, as is a gateway that sends
    tokens. Farewell goes both ways."""
    token = TokenChunk(request_id="r", token_ids=[1])
    assert decode_from_connecting(encode(token), "gpu_worker") == token
    with pytest.raises(
        ProtocolError, match="gateway sent a message that is not understood: Invalid value 'Tok"
    ):
        decode_from_binding(encode(token), "gateway")
    for message in (AbortRequest(request_id="r"), ForgetPrompt(request_id="r")):
        assert decode_from_binding(encode(message), "gateway") == message
        with pytest.raises(ProtocolError, match="gpu_worker sent"):
            decode_from_connecting(encode(message), "gpu_worker")
    farewell = Farewell(reason="it stops")
    assert (
        decode_from_binding(encode(farewell), "x")
        == decode_from_connecting(encode(farewell), "x")
        == farewell
    )


def test_numbers_keep_their_kind() -> None:
    """Whole numbers stay whole in capabilities, and become fractions where fractions are meant."""
    ready = Ready(capabilities={"max_context": 2**40, "share": 0.5, "device": "cpu"})
    decoded = decode_from_connecting(encode(ready), "gpu_worker")
    assert decoded == ready
    assert isinstance(decoded, Ready)
    assert [type(value) for value in decoded.capabilities.values()] == [int, float, str]
    beat = decode_from_connecting(
        msgpack.packb({"type": "Heartbeat", "state": "", "activity": "", "progress": 1, "gauges": {"a": 2}}),
        "x",
    )
    assert isinstance(beat, Heartbeat)
    assert isinstance(beat.progress, float)
    assert isinstance(beat.gauges["a"], float)


def test_large_prompts() -> None:
    """A prompt of a quarter of a million tokens passes."""
    staged = StagePrompt(request_id="r", prompt_token_ids=list(range(250_000)))
    assert decode_from_binding(encode(staged), "gateway") == staged


def test_what_msgpack_cannot_hold_fails_at_the_sender() -> None:
    """An integer beyond 64 bits is an error of the code that made the message, not of the link's writer."""
    with pytest.raises(OverflowError):
        encode(Ready(capabilities={"a": 2**64}))
