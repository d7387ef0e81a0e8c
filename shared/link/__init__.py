"""The control link between two processes: handshake, heartbeats, loss and return of the peer.

The stable side binds a ROUTER and is a `LinkServer`; the side that may come and go connects a DEALER and is a
`LinkClient`. Which messages go over the link is not decided here, only that they reach the living peer and no
other: every connection has a transport identity of its own, made of role, incarnation and a running number,
so that words from a dead process, or from a connection that was given up, are not taken for new ones.

A peer is lost when its role's lock is free or in other hands (it died: noticed within `LOOK_INTERVAL_S`),
when no heartbeat came for `heartbeat_timeout_s` (it is stuck), or when it said Farewell. Both sides then
start over with Hello; neither has to be restarted because the other was.

Heartbeats begin with Init, Ready follows when the connecting side has attached and can serve: while it loads
a model, its heartbeats say how far it is.
"""

from shared.link.client import ClientListener, LinkClient
from shared.link.identity import Identity
from shared.link.server import LinkServer, Peer, PeerState, ServerListener
from shared.link.transport import close_links

__all__ = [
    "ClientListener",
    "Identity",
    "LinkClient",
    "LinkServer",
    "Peer",
    "PeerState",
    "ServerListener",
    "close_links",
]
