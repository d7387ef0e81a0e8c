"""A ring whose slots hold a number, and the work that is done with it: known to both sides of a test."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from shared.ring import Arrays, RingClient, RingShape, SlotError

PEER = "peer"


def ring_shape(num_slots: int) -> RingShape:
    """One number in, nine out, and two wishes."""
    return RingShape(
        num_slots,
        {"x": (np.int64, (1,)), "fails": (np.uint8, (1,)), "last": (np.uint8, (1,)), "y": (np.int64, (9,))},
    )


def work(slot: Arrays) -> None:
    """The nine numbers from x on; an error where one is wished for."""
    if slot["fails"][0]:
        raise ValueError(f"asked to fail for {slot['x'][0]}")
    slot["y"][...] = slot["x"] + np.arange(9)


def drive(client: RingClient, todo: Iterable[tuple[int, bool]], depth: int) -> None:
    """Submits a list of numbers and whether they fail, `depth` at a time, and checks what comes back."""
    under_way: deque[tuple[int, int, bool]] = deque()

    def check_oldest() -> None:
        ticket, value, fails = under_way.popleft()
        result: object
        try:
            result = client.wait(ticket, 60, PEER)["y"].tolist()
        except SlotError as error:
            result = str(error)
        assert result == (f"ValueError: asked to fail for {value}" if fails else [*range(value, value + 9)])

    for value, fails in todo:
        while len(under_way) >= depth:
            check_oldest()
        slot = client.next_slot(60, PEER)
        slot["x"][0], slot["fails"][0], slot["last"][0] = value, fails, 0
        under_way.append((client.submit(), value, fails))
    while under_way:
        check_oldest()


def end(client: RingClient) -> None:
    """Tells the server that this was the last."""
    client.next_slot(60, PEER)["last"][0] = 1
    client.wait(client.submit(), 60, PEER)
