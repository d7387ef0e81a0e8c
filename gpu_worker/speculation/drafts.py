"""What a sequence has to do with drafts: those to be verified next, what they follow from, and what came of
the ones before."""

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from gpu_worker.speculation.suffix import SuffixLookup
from shared.messages import DraftCounts


class Source(StrEnum):
    """Where drafts come from. Long repetitions are told from short ones: they go on more often."""

    PREDICTION = "prediction"
    SUFFIX = "suffix"
    LONG_SUFFIX = "long suffix"


# As clients are told.
_NAMES = {
    Source.PREDICTION: "prediction",
    Source.SUFFIX: "suffix",
    Source.LONG_SUFFIX: "suffix",
}


@dataclass(slots=True)
class Drafts:
    """Of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    """To be verified with the next step: they follow the sequence's tokens."""
    source: Source = Source.PREDICTION
    predicts: bool = False
    """Whether the prediction block has what it needs of the sequence."""
    streams: Tensor | None = None
    """Of the last position that is computed, [1, streams, hidden], for whoever goes on from there."""
    is_behind: bool = False
    """Whether the prediction block has yet to see that position, since its next token was not known."""
    lookup: SuffixLookup = field(default_factory=SuffixLookup)
    num_windows: int = 0
    """Steps that gave tokens."""
    num_drafted: dict[Source, int] = field(default_factory=dict)
    num_accepted: dict[Source, int] = field(default_factory=dict)
    seconds: float = 0.0
    """Spent on drafting."""

    def note(self, num_accepted: int) -> None:
        """The drafts have been verified; so many of the first were right."""
        self.num_windows += 1
        if self.token_ids:
            drafted, accepted = self.num_drafted, self.num_accepted
            drafted[self.source] = drafted.get(self.source, 0) + len(self.token_ids)
            accepted[self.source] = accepted.get(self.source, 0) + num_accepted
        self.token_ids = []

    def give_up(self) -> None:
        """The prediction block lacks something of the sequence: it drafts nothing more for it."""
        self.predicts = False
        self.token_ids = []

    def counts(self) -> list[DraftCounts]:
        """By source, as clients are told."""
        names = dict.fromkeys(_NAMES[source] for source in self.num_drafted)
        return [
            DraftCounts(
                source=name,
                num_drafted=sum(n for source, n in self.num_drafted.items() if _NAMES[source] == name),
                num_accepted=sum(n for source, n in self.num_accepted.items() if _NAMES[source] == name),
            )
            for name in names
        ]
