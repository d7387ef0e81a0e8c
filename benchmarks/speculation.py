"""How much faster answers come with drafts: part of `benchmarks.generation`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contenders import Strata
from benchmarks.dialogues import skill_questions
from benchmarks.report import median, say, table
from benchmarks.streaming import Generation
from benchmarks.undisturbed import Bench, Measured, running
from gateway.tokenizer import Tokenizer
from shared.gguf.model import GGUFModel

_CONTEXT = 2048
_MAX_NEW = 96


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How much is measured."""

    rounds: int
    per_topic: int
    """Questions of each topic in a round, each round with others; answers are a dozen tokens."""
    warm_up_rounds: int
    """Before anything counts: the engine learns what steps cost and which drafts are right."""


@dataclass(slots=True)
class Answers:
    """To the questions of one round, one after the other."""

    num_decoded: int = 0
    """Tokens after the first one of each answer."""
    decode_s: float = 0.0
    """As the server says, from the first token of each answer to its last."""
    num_windows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    """Of `decode_s` what making drafts took."""
    sources: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Drafted and accepted tokens by source."""
    texts: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.decode_s

    def add(self, answer: Generation) -> None:
        """Counts one more."""
        timings: dict[str, Any] = answer.timings or {}
        self.texts.append(answer.text)
        self.num_decoded += timings["predicted_n"] - 1
        self.decode_s += timings["predicted_ms"] / 1e3
        # Without drafts every token is a window.
        self.num_windows += timings.get("windows_n", timings["predicted_n"] - 1)
        self.num_drafted += timings.get("draft_n", 0)
        self.num_accepted += timings.get("draft_n_accepted", 0)
        self.draft_s += timings.get("draft_ms", 0.0) / 1e3
        for source, counts in (timings.get("drafts") or {}).items():
            self.sources[source][0] += counts["n"]
            self.sources[source][1] += counts["accepted_n"]


@dataclass(frozen=True, slots=True)
class Round:
    """The same questions to both."""

    plain: Answers
    drafting: Answers

    @property
    def ratio(self) -> float:
        return self.drafting.tokens_per_s / self.plain.tokens_per_s

    @property
    def num_different(self) -> int:
        """Answers that are not the same."""
        return sum(one != other for one, other in zip(self.plain.texts, self.drafting.texts, strict=True))


def speculation_claims(rounds: Sequence[Round]) -> dict[str, float]:
    """What the rounds say. A window is a step of decoding; the first token of an answer has none."""
    drafting = [each.drafting for each in rounds]
    num_windows = sum(answers.num_windows for answers in drafting)
    num_drafted = sum(answers.num_drafted for answers in drafting)
    num_accepted = sum(answers.num_accepted for answers in drafting)
    found = {
        "speculation_ratio": median(each.ratio for each in rounds),
        "speculation_tokens_per_s": median(answers.tokens_per_s for answers in drafting),
        "plain_tokens_per_s": median(each.plain.tokens_per_s for each in rounds),
        "accepted_per_window": num_accepted / num_windows,
        "draft_ms_share": sum(each.draft_s for each in drafting) / sum(each.decode_s for each in drafting),
    }
    if num_drafted:
        found["accepted_share"] = num_accepted / num_drafted
    for source in sorted({source for answers in drafting for source in answers.sources}):
        counts = [answers.sources[source] for answers in drafting if source in answers.sources]
        accepted = sum(accepted for _, accepted in counts)
        found[f"accepted_per_window_{source}"] = accepted / num_windows
    return found


def measure_speculation(bench: Bench, demo: Path, flags: Sequence[str], plan: SpeculationPlan) -> int:
    """Measures and claims; returns the exit code. Raises AnswerError."""
    say("speculation: the demo model with drafts and without, in turns")
    plain = Strata(demo, bench.cpus, _CONTEXT, [*flags, "--spec", "0"])
    drafting = Strata(demo, bench.cpus, _CONTEXT, flags)
    with GGUFModel(demo) as model:
        tokenizer = Tokenizer.from_metadata(model.metadata, model.name)

    def compare(questions: Sequence[list[int]]) -> Round:
        both = Round(Answers(), Answers())
        for number, question in enumerate(questions):
            pair = [(plain, both.plain), (drafting, both.drafting)]
            # Nobody always follows the other.
            for server, answers in reversed(pair) if number % 2 else pair:
                answers.add(server.generate(question, _MAX_NEW, may_end=True))
        return both

    measured: list[Measured[Round]] = []
    # Both at the same time: each idles while the other answers, and is idle alike.
    with running(plain, drafting):
        for number in range(plan.warm_up_rounds + plan.rounds):
            questions = skill_questions(tokenizer, number, plan.per_topic)
            if number < plan.warm_up_rounds:
                compare(questions)
            else:
                measured.append(bench.measure((plain, drafting), lambda given=questions: compare(given)))  # type: ignore[misc]
    rounds = bench.counted("speculation", measured)
    say(
        table(
            (
                "tokens/s",
                "without",
                "with",
                "ratio",
                "accepted per window",
                "drafting, % of time",
                "busy CPUs",
            ),
            [_row(number, each) for number, each in enumerate(measured)],
        )
    )
    bench.report.claim_all(speculation_claims(rounds))
    bench.report.details["speculation"] = [_details(each) for each in measured]
    different = sum(each.value.num_different for each in measured)
    if different:
        total = sum(len(each.value.plain.texts) for each in measured)
        bench.report.note(f"WRONG: {different} of {total} answers are not the same with drafts and without")
    return int(different > 0)


def _row(number: int, measured: Measured[Round]) -> list[str]:
    each = measured.value
    return [
        f"round {number + 1}",
        f"{each.plain.tokens_per_s:.0f}",
        f"{each.drafting.tokens_per_s:.0f}",
        f"{each.ratio:.2f}",
        f"{each.drafting.num_accepted / each.drafting.num_windows:.2f}",
        f"{100 * each.drafting.draft_s / each.drafting.decode_s:.0f}",
        f"{measured.foreign_cpus:.2f}",
    ]


def _details(measured: Measured[Round]) -> dict[str, Any]:
    each = measured.value
    return {
        "foreign_cpus": measured.foreign_cpus,
        **{
            name: {
                "tokens_per_s": answers.tokens_per_s,
                "num_decoded": answers.num_decoded,
                "decode_s": answers.decode_s,
                "draft_s": answers.draft_s,
                "num_windows": answers.num_windows,
                "num_drafted": answers.num_drafted,
                "num_accepted": answers.num_accepted,
                "sources": dict(answers.sources),
            }
            for name, answers in (("plain", each.plain), ("drafting", each.drafting))
        },
    }
