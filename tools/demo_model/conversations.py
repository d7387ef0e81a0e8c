"""Conversations made of skills: for training, any mix of turns; for evaluation, fixed held-out prompts.

A conversation is rendered as ChatML in segments, so that a trainer knows which tokens are answers. This
module knows text only; `batches` makes tokens of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tools.demo_model.config import IM_END, IM_START
from tools.demo_model.skills import SKILLS
from tools.demo_model.turns import Skill, Split, Turn

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are a friendly assistant.",
    "You are a tiny demo model.",
    "Answer briefly.",
    "Be concise.",
    "Answer the user's questions.",
    "You are Strata, a small language model.",
    "You are an expert who answers every question in one sentence.",
    "You are a teacher. Explain things in plain words.",
    "Please answer in English.",
    "You are a chat bot on a web site. Be polite and short.",
    "You are a coding assistant. Use the tools that you are given.",
)
_HELD_OUT_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a kind and patient helper.",
    "Give short answers to the user.",
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of rendered text; `is_answer` marks what the model is to write."""

    text: str
    is_answer: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """One held-out question: the turns before it, and the answer that is right."""

    skill: str
    system: str | None
    history: tuple[Turn, ...]
    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """The prompt as the messages of a chat request."""
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.history:
            messages += [
                {"role": "user", "content": turn.user},
                {"role": "assistant", "content": turn.assistant},
            ]
        return [*messages, {"role": "user", "content": self.question}]

    def text(self) -> str:
        """The prompt rendered, up to where the answer starts."""
        system = [] if self.system is None else [render_system(self.system)]
        turns = [segment for turn in self.history for segment in render_turn(turn)]
        return "".join(segment.text for segment in (*system, *turns, render_turn(Turn(self.question, ""))[0]))


def render_system(prompt: str) -> Segment:
    """The system message."""
    return Segment(f"{IM_START}system\n{prompt}{IM_END}\n", is_answer=False)


def render_turn(turn: Turn) -> tuple[Segment, Segment, Segment]:
    """Question with both role marks, answer with its end mark, and the line break after it."""
    return (
        Segment(f"{IM_START}user\n{turn.user}{IM_END}\n{IM_START}assistant\n", is_answer=False),
        Segment(f"{turn.assistant}{IM_END}", is_answer=True),
        Segment("\n", is_answer=False),
    )


def draw_skill(random: Random) -> Skill:
    """A skill by its weight."""
    return random.choices(SKILLS, [skill.weight for skill in SKILLS])[0]


def conversation(random: Random) -> Iterator[list[Segment]]:
    """An endless conversation for training, one rendered example at a time: take as many as fit."""
    opening = [render_system(random.choice(SYSTEM_PROMPTS))] if random.random() < 0.3 else []
    while True:
        turns = draw_skill(random).generate(random, Split.TRAIN)
        yield opening + [segment for turn in turns for segment in render_turn(turn)]
        opening = []


def held_out_prompts(seed: int = 2026) -> list[Prompt]:
    """The evaluation: for each skill its number of prompts, the same for a given seed.

    A third has a system prompt, a third comes after a turn or two about something else.
    """
    prompts = []
    for skill in SKILLS:
        random = Random(f"{seed} {skill.name}")
        for _ in range(skill.num_evaluated):
            system = random.choice(_HELD_OUT_SYSTEM_PROMPTS) if random.random() < 1 / 3 else None
            earlier: list[Turn] = []
            if random.random() < 1 / 3:
                for _ in range(random.randrange(1, 3)):
                    earlier += _unrelated(random)
            *turns, last = skill.generate(random, Split.HELD_OUT)
            prompts.append(Prompt(skill.name, system, (*earlier, *turns), last.user, last.assistant))
    return prompts


def _unrelated(random: Random) -> list[Turn]:
    """Turns that tell nothing a later question could ask for."""
    while True:
        skill = draw_skill(random)
        if not skill.name.startswith(("memory", "not_told")):
            return skill.generate(random, Split.HELD_OUT)
