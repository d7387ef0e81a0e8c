"""Who a process is on its links, and the words in which links tell how a peer was lost."""

from dataclasses import dataclass

from shared.run_directory import Role

LEFT = "it left"
"""How the reason begins where a process said Farewell."""

STOPS = "it stops"
"""The reason that a process gives with its Farewell."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is on its links."""

    role: Role
    incarnation: str
    model_fingerprint: str
    pid: int
