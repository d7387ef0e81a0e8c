"""What the demo model is taught and asked: the same for a seed, and questions it was not trained on."""

import re
from collections.abc import Sequence
from itertools import islice, pairwise
from random import Random

import pytest

from tools.demo_model.config import IM_END, IM_START
from tools.demo_model.conversations import conversation, held_out_prompts
from tools.demo_model.facts import facts
from tools.demo_model.skills import SKILLS
from tools.demo_model.topics import TOPICS, topic_prompts
from tools.demo_model.turns import Split, every_nth


def test_prompts_are_the_same_every_time_and_cover_every_skill() -> None:
    prompts = held_out_prompts()
    assert prompts == held_out_prompts()
    counts = {skill.name: sum(prompt.skill == skill.name for prompt in prompts) for skill in SKILLS}
    assert counts == {skill.name: skill.num_evaluated for skill in SKILLS}
    assert min(counts.values()) >= 40


def answers(split: Split, pattern: str) -> set[str]:
    """What the pattern's group takes in answers, for training or for evaluation."""
    if split is Split.HELD_OUT:
        texts = [prompt.answer for prompt in held_out_prompts()]
    else:
        examples = (example for seed in range(60) for example in islice(conversation(Random(seed)), 50))
        texts = [segment.text for segments in examples for segment in segments if segment.is_answer]
    return {match[1] for text in texts for match in re.finditer(pattern, text)}


@pytest.mark.parametrize(
    ("pattern", "known", "number"),
    [
        (r"Nice to meet you, (\w+)", facts().names, 5),
        (r"Your name is (\w+)", facts().names, 5),
        (r"I do not know the word (\w+)", facts().unknown_words, 10),
    ],
)
def test_training_leaves_out_what_is_held_out(pattern: str, known: Sequence[str], number: int) -> None:
    """No held-out name is told in training, and of no held-out word is it said that the model lacks it."""
    held_out = set(every_nth(known, number, Split.HELD_OUT))
    assert len(answers(Split.TRAIN, pattern) & set(known)) > 50
    assert not answers(Split.TRAIN, pattern) & held_out
    assert pattern.startswith("Nice") or answers(Split.HELD_OUT, pattern) & held_out


def test_only_answers_are_trained() -> None:
    """An answer follows the assistant's mark, ends with the end of turn, and is the only thing predicted."""
    for segments in islice(conversation(Random(3)), 200):
        for before, segment in pairwise(segments):
            is_answer = before.text.endswith(f"{IM_START}assistant\n")
            assert segment.is_answer is is_answer
            if is_answer:
                assert segment.text.endswith(IM_END)
                assert segment.text != IM_END
        assert not segments[0].is_answer


def test_topics_are_of_their_skills() -> None:
    """And the same for one seed, or a trace could not be recorded again."""
    taught = {skill.name for skill in SKILLS}
    for topic, skills in TOPICS.items():
        assert taught.issuperset(skills)
        first, again = ([*islice(topic_prompts(topic, 1), 40)] for _ in range(2))
        assert first == again
        assert {prompt.skill for prompt in first} == set(skills)
    names = [name for skills in TOPICS.values() for name in skills]
    assert len(names) == len(set(names))
