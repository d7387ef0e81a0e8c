"""Messages to bytes and back: msgpack on the wire, checked against the message's type at the boundary.

An unknown tag, an extra or missing field, or a value of another type is a ProtocolError naming the peer.
"""

from typing import Any

import msgpack
import msgspec

from shared.errors import ProtocolError
from shared.messages import FromBinding, FromConnecting, Message


def encode(message: Message) -> bytes:
    """One message as msgpack."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message))
    return packed


def decode_from_connecting(payload: bytes, peer: str) -> FromConnecting:
    """A message that a connecting process may send. Raises ProtocolError."""
    message: FromConnecting = _decode(payload, FromConnecting, peer)
    return message


def decode_from_binding(payload: bytes, peer: str) -> FromBinding:
    """A message that a binding process may send. Raises ProtocolError."""
    message: FromBinding = _decode(payload, FromBinding, peer)
    return message


def _decode(payload: bytes, kinds: Any, peer: str) -> Any:
    try:
        return msgspec.convert(msgpack.unpackb(payload), kinds)
    except (ValueError, msgpack.UnpackException, msgpack.ExtraData) as error:
        raise ProtocolError(f"{peer} sent a message that is not understood: {error}") from error
