"""The share of transfers: the original engine's logged cases, and when it may change."""

import pytest

from shared.placement.link_share import (
    ENOUGH_SAMPLES,
    FIRST_UPDATE_WINDOWS,
    MOST_UPDATES,
    UPDATE_WINDOWS,
    LinkShare,
    initial_share,
    updated_share,
)

BLOB_BYTES = 1_382_400


@pytest.mark.parametrize(("probe", "share"), [(17.9, 0.49), (13.1, 0.36)])
def test_initial_shares_of_the_original(probe: float, share: float) -> None:
    """Logged by its users."""
    assert round(initial_share(probe), 2) == share
    assert LinkShare(None, probe).share == initial_share(probe)


def test_initial_share_is_bounded() -> None:
    """A link of 57.9 GB/s does not make it more than 0.55."""
    assert initial_share(57.9) == 0.55


@pytest.mark.parametrize(
    ("link", "cpu", "share"),
    [(17.9, 5.9, 0.60), (13.1, 45.4, 0.15), (13.1, 51.8, 0.10), (57.9, 55.5, 0.35), (1.0, 90.0, 0.10)],
)
def test_updated_shares_of_the_original(link: float, cpu: float, share: float) -> None:
    """Logged by its users, and the lower bound."""
    assert updated_share(link, cpu) == share


def measure(share: LinkShare, link_gb_s: float, cpu_gb_s: float, samples: int = ENOUGH_SAMPLES) -> None:
    for _ in range(samples):
        share.note_transfers(BLOB_BYTES, BLOB_BYTES / link_gb_s / 1e9)
        share.note_cpu(2 * BLOB_BYTES, 2 * BLOB_BYTES / cpu_gb_s / 1e9)


def windows_until_update(share: LinkShare, most: int = 1000) -> int | None:
    before = share.num_updates
    for window in range(1, most + 1):
        share.after_window()
        if share.num_updates > before:
            return window
    return None


def test_updates_are_few_and_far_between() -> None:
    """Each one is measured anew, of its own windows."""
    share = LinkShare(None, 13.1)
    measure(share, 13.1, 45.4)
    assert windows_until_update(share) == FIRST_UPDATE_WINDOWS
    assert share.share == 0.15
    measure(share, 57.9, 55.5)
    assert windows_until_update(share) == UPDATE_WINDOWS
    assert share.share == 0.35
    measure(share, 17.9, 5.9)
    assert windows_until_update(share) == UPDATE_WINDOWS
    assert (share.share, share.num_updates) == (0.60, MOST_UPDATES)
    measure(share, 1.0, 90.0)
    assert windows_until_update(share) is None


def test_few_samples_decide_nothing() -> None:
    """It waits for enough of both kinds, however many windows that takes; then it goes at once."""
    share = LinkShare(None, 20.0)
    measure(share, 13.1, 45.4, ENOUGH_SAMPLES - 1)
    assert windows_until_update(share, 200) is None
    share.note_transfers(BLOB_BYTES, 1e-4)
    share.note_cpu(0, 0.0)
    assert windows_until_update(share, 200) is None
    measure(share, 13.1, 45.4, 1)
    assert share.after_window()
    assert share.share == 0.15


def test_a_setting_is_kept() -> None:
    """Who says what he wants gets it."""
    share = LinkShare(0.2, 20.0)
    measure(share, 13.1, 51.8)
    assert windows_until_update(share) is None
    assert share.share == 0.2
