"""What followed where the latest tokens have come before, against a search by definition."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.speculation.suffix import MIN_MATCH, SuffixLookup


def test_what_followed() -> None:
    """The longest match, the last of several that are as long; as many tokens as are wanted and there."""
    lookup = SuffixLookup()
    said = [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 10, 2, 3, 4, 5]
    assert lookup.find(said, 3) == ([6, 7, 8], 4)
    assert SuffixLookup().find([9, 3, 4, 5, 6, 8, 3, 4, 5, 7, 3, 4, 5], 8) == ([7, 3, 4, 5], 3)
    assert SuffixLookup().find([5, 5, 5, 5], 4) == ([5], 3)


def test_nothing_to_go_by() -> None:
    """Too few tokens, none alike, none wanted."""
    lookup = SuffixLookup()
    for said in ([], [1], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 1, 2]):
        assert lookup.find(said, 4) == ([], 0)
    assert lookup.find([1, 2, 3, 4, 1, 2, 3], 0) == ([], 0)
    assert lookup.find([1, 2, 3, 4, 1, 2, 3], 2) == ([4, 1], 3)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6), st.lists(st.integers(0, 60), max_size=5))
def test_by_definition(said: list[int], most: int, looks: list[int]) -> None:
    """Whatever was asked for on the way."""
    lookup = SuffixLookup()
    for length in sorted(look for look in looks if look <= len(said)):
        lookup.find(said[:length], most)
    token_ids, num_alike = lookup.find(said, most)
    matches = {}
    for place in range(MIN_MATCH, len(said)):
        alike = 0
        while alike < min(place, 32) and said[place - 1 - alike] == said[-1 - alike]:
            alike += 1
        matches[place] = alike
    recent = [place for place in sorted(matches, reverse=True) if matches[place] >= MIN_MATCH][:16]
    best = max((matches[place] for place in recent), default=0)
    assert num_alike == best
    if best:
        place = next(place for place in recent if matches[place] == best)
        assert token_ids == said[place : place + most]
    else:
        assert token_ids == []
