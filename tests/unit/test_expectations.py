"""Where routes are expected to go, and how long a token takes about."""

from dataclasses import replace

import pytest

from shared.placement.expectations import Shares, expected_shares, token_seconds
from shared.placement.rates import Rates
from tests.support.real_sizes import GIB, logged_placement

RATES = Rates(link=10e9, cpu=5e9, disk=1e9, device=500e9, prompt_tokens=1000)


def test_hit_rate_of_the_original() -> None:
    """13,432 slots of 24,576 experts: 95.4 % of routes were logged to hit."""
    shares = expected_shares(logged_placement(), 16 * GIB)
    assert shares.device == pytest.approx(0.954, abs=0.005)
    assert shares.ram == pytest.approx(1 - shares.device)
    assert shares.disk == 0


def test_shares_add_up() -> None:
    """On the device, in RAM and on the disk, whatever there is of each."""
    for slots in (0, 100, 24576):
        for ram in (0, 4 * GIB, 64 * GIB):
            shares = expected_shares(logged_placement(slots), ram)
            assert shares.device + shares.ram + shares.disk == pytest.approx(1)
            assert min(shares.device, shares.ram, shares.disk) >= 0
    assert expected_shares(logged_placement(0), 0) == Shares(0, 0, 1)
    assert expected_shares(logged_placement(24576), 0).device == 1
    more, less = (expected_shares(logged_placement(0), ram * GIB) for ram in (16, 8))
    assert more.ram > less.ram > 0.5


def test_time_of_a_token() -> None:
    """Dense weights, then the slower of hits and misses, then the disk; and what each of 48 layers takes
    besides."""
    placement, none = logged_placement(), logged_placement(0)
    used = 10 * placement.sizes.round_bytes
    dense = 5 * 10**9
    hit, missed = Shares(1, 0, 0), Shares(0, 1, 0)
    layers = 48 * 60e-6
    assert token_seconds(placement, hit, dense, RATES) == pytest.approx((dense + used) / 500e9 + layers)
    assert token_seconds(placement, missed, 0, RATES) == pytest.approx(used / 15e9 + layers)
    assert token_seconds(none, Shares(0, 0, 1), 0, RATES) == pytest.approx(
        used / 15e9 + used / 1e9 + 48 * 10e-6
    )
    faster = replace(RATES, link=20e9)
    assert token_seconds(placement, missed, 0, faster) < token_seconds(placement, missed, 0, RATES)
