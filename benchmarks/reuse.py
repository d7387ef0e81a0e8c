"""How soon a conversation goes on: part of `benchmarks.generation`.

The first turn is a long prompt; the second one is the same, its answer, and a short question. What a server
has kept of the first turn it need not read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import LlamaServer, Server, Strata
from benchmarks.dialogues import Dialogues
from benchmarks.llama_process import KEEP
from benchmarks.report import median, say, table
from benchmarks.undisturbed import Bench, Measured, running
from shared.gguf.model import GGUFModel

_MAX_ANSWER = 32
_QUESTION_TOKENS = 20


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """How much is measured."""

    rounds: int
    history_tokens: int
    """Of the first prompt."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation of two turns: seconds to the first token of each, and tokens of the second prompt that
    were there and that were read."""

    first_s: float
    second_s: float
    num_reused: int
    num_read: int

    @property
    def fraction(self) -> float:
        """Of the first turn's time what the second one takes."""
        return self.second_s / self.first_s


def reuse_claims(ours: Sequence[Turns], theirs: Sequence[Turns]) -> dict[str, float]:
    """What the conversations say; a ratio over 1: Strata goes on sooner."""
    found = {
        "turn2_ttft_fraction": median(each.fraction for each in ours),
        "turn1_ttft_ms": 1e3 * median(each.first_s for each in ours),
        "turn2_ttft_ms": 1e3 * median(each.second_s for each in ours),
        "turn2_read_tokens": median(each.num_read for each in ours),
    }
    if theirs:
        found |= {
            "llama_cpp_turn2_ttft_fraction": median(each.fraction for each in theirs),
            "llama_cpp_turn1_ttft_ms": 1e3 * median(each.first_s for each in theirs),
            "llama_cpp_turn2_ttft_ms": 1e3 * median(each.second_s for each in theirs),
            "llama_cpp_turn2_read_tokens": median(each.num_read for each in theirs),
        }
        found["turn2_vs_llama_cpp"] = found["llama_cpp_turn2_ttft_ms"] / found["turn2_ttft_ms"]
    return found


def measure_reuse(bench: Bench, path: Path, flags: Sequence[str], plan: ReusePlan) -> dict[str, float]:
    """Measures both; returns the claims. Raises AnswerError."""
    say(f"reuse: a second turn after {plan.history_tokens} tokens, {path.name}")
    context = plan.history_tokens + 512
    strata = Strata(path, bench.cpus, context, flags)
    llama = LlamaServer(path, bench.cpus, context, [KEEP])
    measured: dict[str, list[Measured[Turns]]] = {strata.name: [], llama.name: []}
    with GGUFModel(path) as model:
        # The same ones for both.
        dialogues = {name: Dialogues(model, seed=1) for name in measured}
    with running(llama):
        # Strata does not run beside llama.cpp, to which its idle processes matter.
        for number in range(plan.rounds):
            _converse(bench, llama, dialogues[llama.name], plan, measured, number)
            with running(strata):
                _converse(bench, strata, dialogues[strata.name], plan, measured, number)
    say(
        table(
            ("ms to the first token", "turn 1", "turn 2", "%", "reused", "read", "busy CPUs"),
            [_row(name, each) for name, all_turns in measured.items() for each in all_turns],
        )
    )
    bench.report.details.setdefault("reuse", {})[path.name] = {
        name: [_details(each) for each in all_turns] for name, all_turns in measured.items()
    }
    ours, theirs = (bench.counted(f"reuse of {name}", measured[name]) for name in (strata.name, llama.name))
    return reuse_claims(ours, theirs)


def _converse(
    bench: Bench,
    server: Server,
    dialogues: Dialogues,
    plan: ReusePlan,
    measured: dict[str, list[Measured[Turns]]],
    number: int,
) -> None:
    """One conversation to warm up, and one that counts."""
    if number == 0 or server.name == "strata":
        # Of its own length: what is done for the first time takes longer.
        _two_turns(server, dialogues, plan.history_tokens)
    turns = bench.measure((server,), lambda: _two_turns(server, dialogues, plan.history_tokens))
    measured[server.name].append(turns)


def _two_turns(server: Server, dialogues: Dialogues, num_tokens: int) -> Turns:
    prompt = dialogues.begin(num_tokens)
    first = server.generate(prompt, _MAX_ANSWER, may_end=True)
    prompt = dialogues.go_on(prompt, first.text, _QUESTION_TOKENS)
    second = server.generate(prompt, _MAX_ANSWER, may_end=True)
    timings: dict[str, Any] = second.timings or {}
    return Turns(first.first_token_s, second.first_token_s, timings["cache_n"], timings["prompt_n"])


def _row(name: str, measured: Measured[Turns]) -> list[str]:
    each = measured.value
    return [
        name,
        f"{1e3 * each.first_s:.0f}",
        f"{1e3 * each.second_s:.1f}",
        f"{100 * each.fraction:.1f}",
        f"{each.num_reused}",
        f"{each.num_read}",
        f"{measured.foreign_cpus:.2f}",
    ]


def _details(measured: Measured[Turns]) -> dict[str, Any]:
    each = measured.value
    return {
        "first_s": each.first_s,
        "second_s": each.second_s,
        "num_reused": each.num_reused,
        "num_read": each.num_read,
        "foreign_cpus": measured.foreign_cpus,
    }
