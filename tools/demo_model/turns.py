"""The vocabulary of the training conversations: turns, splits, skills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TypeVar

Item = TypeVar("Item")


class Split(Enum):
    """Which examples to draw: a skill that must generalise keeps some things out of training."""

    TRAIN = auto()
    HELD_OUT = auto()


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says and what the model is to answer."""

    user: str
    assistant: str


Generator = Callable[[Random, Split], list[Turn]]
"""Draws one example: one turn, or more where the skill is about turns. The last turn is evaluated."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One thing the model is taught."""

    name: str
    generate: Generator
    weight: float
    """Its share of the turns, relative to the other weights."""
    num_evaluated: int = 50
    is_promised: bool = False
    """Whether the model claims it: the evaluation must then find 95 % of the answers exactly right."""


def every_nth(items: Sequence[Item], number: int, split: Split) -> tuple[Item, ...]:
    """One item of `number` for evaluation, the others for training."""
    return tuple(
        item
        for place, item in enumerate(items)
        if (place % number == number // 2) == (split is Split.HELD_OUT)
    )
