"""The table of slots: changes that it must refuse, or a device would read or write the wrong weights."""

import numpy as np
import pytest

from shared.placement.table import ResidencyTable, SlotState
from tests.support.placement import admit, empty_table


def test_an_expert_is_named_once_its_copy_has_finished() -> None:
    """A slot that is named earlier is read half-written."""
    table = empty_table([2, 1], 4)
    table.begin_load(1, 3)
    assert table.state(1) == SlotState.LOADING
    assert (table.slot_of == -1).all()
    assert (table.num_loading, table.num_resident) == (1, 0)
    table.publish(1)
    assert table.slot_of[0, 3] == 1
    assert table.expert_of.tolist() == [-1, 3, -1]
    assert (table.num_loading, table.num_resident, table.coverage) == (0, 1, 1 / 8)
    assert table.slots_of_layer(0).tolist() == [0, 1]
    assert table.slots_of_layer(1).tolist() == [2]


def test_a_slot_is_written_after_its_last_reader() -> None:
    """The next expert must not be copied over one that is still being multiplied with."""
    table = empty_table([1], 4)
    admit(table, 0, 2)
    table.note_reads([0], 7)
    table.note_reads([0], 5)
    assert table.evict(0) == 2
    table.finished(6)
    assert not table.is_writable(0)
    with pytest.raises(ValueError, match=r"slot 0 cannot be loaded into yet: work of ticket 7 .* up to 6"):
        table.begin_load(0, 1)
    table.finished(7)
    table.finished(3)
    assert table.is_writable(0)
    table.begin_load(0, 1)
    assert not table.is_writable(0)
    table.publish(0)
    with pytest.raises(ValueError, match="work of ticket 7 cannot read slots: work has ended up to 7"):
        table.note_reads([0], 7)


def test_an_expert_has_one_slot() -> None:
    """Two copies would be one slot lost, and one of them never evicted."""
    table = empty_table([3], 4)
    table.begin_load(0, 2)
    with pytest.raises(ValueError, match="expert 2 of layer 0 cannot be loaded into slot 1: it is in slot 0"):
        table.begin_load(1, 2)
    table.publish(0)
    with pytest.raises(ValueError, match="it is in slot 0"):
        table.begin_load(1, 2)
    table.evict(0)
    table.begin_load(1, 2)


def test_a_failed_load_leaves_the_slot_empty() -> None:
    """Garbage must never be published, and the slot not be lost."""
    table = empty_table([1], 4)
    table.begin_load(0, 2)
    table.abandon(0)
    assert table.is_writable(0)
    assert table.expert_of.tolist() == [-1]
    admit(table, 0, 2)


def test_lent_slots_come_back_empty() -> None:
    """What a borrower has left there is no expert."""
    table = empty_table([3], 4)
    admit(table, 0, 2)
    assert (table.lend(0), table.lend(1)) == (2, -1)
    assert (table.num_lent, table.num_resident) == (2, 0)
    assert table.slot_of[0, 2] == -1
    table.note_reads([0], 4)
    table.give_back(0)
    assert table.state(0) == SlotState.EMPTY
    assert not table.is_writable(0)
    table.finished(4)
    assert table.is_writable(0)
    table.begin_load(2, 1)
    with pytest.raises(ValueError, match="slot 2 cannot be lent: it is LOADING, not EMPTY or RESIDENT"):
        table.lend(2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda table: table.publish(0), "slot 0 cannot be published: it is EMPTY, not LOADING"),
        (lambda table: table.abandon(1), "slot 1 cannot be abandoned: it is RESIDENT, not LOADING"),
        (lambda table: table.evict(0), "slot 0 cannot be evicted: it is EMPTY, not RESIDENT"),
        (lambda table: table.give_back(1), "slot 1 cannot be given back: it is RESIDENT, not LENT"),
        (lambda table: table.begin_load(1, 0), "slot 1 cannot be loaded into: it is RESIDENT, not EMPTY"),
        (lambda table: table.begin_load(0, 4), "there is no expert 4 for slot 0; a layer has 4"),
        (lambda table: table.begin_load(0, -1), "there is no expert -1"),
        (lambda table: table.note_reads([0], 1), "slot 0 cannot be read: it is EMPTY, not RESIDENT or LENT"),
        (lambda table: table.evict(2), "there is no slot 2; there are 2"),
        (lambda table: table.evict(-1), "there is no slot -1"),
    ],
)
def test_misuse_is_refused(call: object, message: str) -> None:
    """And changes nothing."""
    assert callable(call)
    table = empty_table([2], 4)
    admit(table, 1, 3)
    before = table.states.tolist(), table.expert_of.tolist(), table.slot_of.tolist()
    with pytest.raises(ValueError, match=message):
        call(table)
    assert (table.states.tolist(), table.expert_of.tolist(), table.slot_of.tolist()) == before


def test_slots_of_no_use_are_refused() -> None:
    """Memory that no expert can ever be in is a mistake of whoever divided it."""
    with pytest.raises(ValueError, match="a slot is for layer 2; there are 2"):
        ResidencyTable(np.array([0, 2], np.int32), 2, 4)
    with pytest.raises(ValueError, match="layer 1 has 5 slots, more than its 4 experts"):
        empty_table([1, 5], 4)
