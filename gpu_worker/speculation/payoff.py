"""How many tokens to draft: learned from what windows cost, and how many drafts of them were right.

With a_i the probability that the i-th draft is right where those before are, s(n) the time of a step of n
tokens, d that of a draft, and B sequences at a time, k drafts each give

    B (1 + a_1 + a_1 a_2 + ... + a_1 ... a_k)  tokens in  s(B (1 + k)) + k d

All of these are measured, and the k that is best is taken, which may be none. What is not done is not
measured, so now and then, ever more seldom, a window has no drafts or as many as there may be.
"""

from collections import defaultdict
from dataclasses import dataclass, field

# Of the newest value, in means: of times, of the share of drafts that are right, and of the share that is
# made. A step that took longer than usual was held up, or did something for the first time; one that was
# quicker shows what a step costs.
_LONGER_TIME, _SHORTER_TIME, _NEW_SHARE, _NEW_REACH = 0.05, 0.3, 0.03, 0.1
# Before anything is known. About what prediction blocks are said to reach on code.
_FIRST_SHARE = 0.8
# Windows between two that are there to learn: at first, and at most.
_FIRST_PAUSE, _LAST_PAUSE = 16, 256
# A step of a token more is taken to cost so much more where it was never seen.
_GUESSED_GROWTH = 0.1
# A gain below is noise.
_LEAST_GAIN = 1.02


@dataclass(slots=True)
class _Exploring:
    """When to do what was not done for a while."""

    pause: int = _FIRST_PAUSE
    left: int = _FIRST_PAUSE

    def is_due(self, *, is_done_anyway: bool) -> bool:
        """Whether it is time, of one more window."""
        if is_done_anyway:
            self.left = self.pause
            return False
        self.left -= 1
        if self.left > 0:
            return False
        self.pause = min(2 * self.pause, _LAST_PAUSE)
        self.left = self.pause
        return True


@dataclass(slots=True)
class Payoff:
    """What was learned, of one engine. A *source* of drafts has a name."""

    _done_once: set[int | str] = field(default_factory=set)
    """Sizes of steps, and sources, whose first time has been."""
    _step_s: dict[int, float] = field(default_factory=dict)
    """By tokens of a step."""
    _draft_s: dict[str, float] = field(default_factory=dict)
    """Of one draft, by source."""
    _shares: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(lambda: _FIRST_SHARE))
    """By source and place."""
    _reach: dict[str, float] = field(default_factory=dict)
    """Of the drafts that were wanted the share that was made, by source."""
    _without: _Exploring = field(default_factory=_Exploring)
    _most: dict[str, _Exploring] = field(default_factory=lambda: defaultdict(_Exploring))

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens, of sequences that generate, took so long."""
        if self._is_first(num_tokens):
            return
        self._step_s[num_tokens] = _mean(self._step_s.get(num_tokens), seconds)

    def note_drafts(self, source: str, num_drafts: int, seconds: float) -> None:
        """So many drafts one after the other, of whatever number of sequences at a time, took so long."""
        if num_drafts and not self._is_first(source):
            self._draft_s[source] = _mean(self._draft_s.get(source), seconds / num_drafts)

    def _is_first(self, what: int | str) -> bool:
        """Whether that is done for the first time: it then makes what is needed, which takes longer."""
        if what in self._done_once:
            return False
        self._done_once.add(what)
        return True

    def note_reached(self, source: str, num_wanted: int, num_drafted: int) -> None:
        """Of so many drafts that were wanted for a sequence so many were made: the source may be unsure."""
        before = self._reach.get(source, 1.0)
        self._reach[source] = before + _NEW_REACH * (num_drafted / num_wanted - before)

    def usual(self, source: str, num_wanted: int) -> int:
        """How many drafts come of so many that are wanted, as a rule."""
        return round(self._reach.get(source, 1.0) * num_wanted)

    def note_verified(self, source: str, num_drafted: int, num_accepted: int) -> None:
        """Of so many drafts of a sequence, so many of the first were right."""
        for place in range(min(num_accepted + 1, num_drafted)):
            is_right = place < num_accepted
            self._shares[source, place] += _NEW_SHARE * (is_right - self._shares[source, place])

    def how_many(self, source: str, num_sequences: int, most: int) -> int:
        """Drafts for each of so many sequences, `most` at most, that pay best now."""
        best = self._best(source, num_sequences, most)
        if self._without.is_due(is_done_anyway=best == 0):
            return 0
        if self._most[source].is_due(is_done_anyway=best == most):
            return most
        return best

    def rate(self, source: str, num_sequences: int, num_drafts: int) -> float:
        """Tokens per second with so many drafts; without any step seen, relative to a step of one second."""
        expected, share = 1.0, 1.0
        for place in range(num_drafts):
            share *= self._shares[source, place]
            expected += share
        seconds = self._cost_s(num_sequences * (1 + num_drafts))
        return num_sequences * expected / (seconds + num_drafts * self._draft_s.get(source, 0.0))

    def is_worth(self, source: str, most: int) -> bool:
        """Whether a single sequence is faster with drafts, as far as is known."""
        return self._best(source, 1, most) > 0

    def _best(self, source: str, num_sequences: int, most: int) -> int:
        without = self.rate(source, num_sequences, 0)
        rates = {number: self.rate(source, num_sequences, number) for number in range(1, most + 1)}
        best = max(rates, key=lambda number: rates[number], default=0)
        return best if best and rates[best] >= _LEAST_GAIN * without else 0

    def _cost_s(self, num_tokens: int) -> float:
        """Of a step: as measured, or between what was; beyond that, as a guess."""
        if num_tokens in self._step_s:
            return self._step_s[num_tokens]
        known = sorted(self._step_s)
        if not known:
            return 1.0 + _GUESSED_GROWTH * (num_tokens - 1)
        below = [number for number in known if number < num_tokens]
        above = [number for number in known if number > num_tokens]
        if below and above:
            first, last = below[-1], above[0]
            share = (num_tokens - first) / (last - first)
            return (1 - share) * self._step_s[first] + share * self._step_s[last]
        nearest = below[-1] if below else above[0]
        scale = (1 + _GUESSED_GROWTH * (num_tokens - 1)) / (1 + _GUESSED_GROWTH * (nearest - 1))
        return self._step_s[nearest] * scale


def _mean(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    share = _SHORTER_TIME if seconds < before else _LONGER_TIME
    return before + share * (min(seconds, 4 * before) - before)
