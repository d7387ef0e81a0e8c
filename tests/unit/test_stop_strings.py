"""Stop strings in streamed text."""

import time

import pytest

from gateway.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is emitted for each piece until the match, and the match."""
    matcher = StopStrings(stops)
    emitted = []
    for piece in pieces:
        text, found = matcher.feed(piece)
        emitted.append(text)
        if found is not None:
            return emitted, found
    text, found = matcher.flush()
    return [*emitted, text], found


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted", "found"),
    [
        ([], ["ab", "c"], ["ab", "c", ""], None),
        (["END"], ["one END two"], ["one "], "END"),
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], "END"),
        (["END"], ["one E", "N", "d"], ["one ", "", "ENd", ""], None),
        (["END"], ["one EN"], ["one ", "EN"], None),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], "\n\n"),
        (["b", "a"], ["xab"], ["x"], "a"),
        (["ab", "a"], ["xab"], ["x"], "a"),
        (["abc", "b"], ["xa", "b", "d"], ["x", "", "a"], "b"),
        (["abc", "b"], ["xa", "b", "c"], ["x", "", ""], "abc"),
        (["abc", "b"], ["xa", "b"], ["x", "", "a"], "b"),
        (["✂️"], ["a✂", "️b"], ["a", ""], "✂️"),
        (["a"], ["", "a"], ["", ""], "a"),
    ],
)
def test_matching(stops: list[str], pieces: list[str], emitted: list[str], found: str | None) -> None:
    """Nothing of a stop string is emitted, and nothing else is kept back."""
    assert run(stops, pieces) == (emitted, found)


def test_time_is_linear() -> None:
    """A client chooses both the stop strings and, through its prompt, the text; a naive search for suffixes
    takes minutes here."""
    stop = "a" * 20_000 + "b"
    start = time.process_time()
    matcher = StopStrings([stop] * 4)
    num_emitted = sum(len(matcher.feed("a" * 10)[0]) for _ in range(10_000))
    assert num_emitted == 100_000 - 20_000
    assert time.process_time() - start < 10
