"""Topics: skills that belong together. While people talk about one thing, a model uses some of its experts
more than others; `record_trace` and `benchmarks.expert_cache` change the topic to see what follows.
"""

from collections.abc import Iterator
from random import Random

from tools.demo_model.conversations import Prompt
from tools.demo_model.skills import SKILLS
from tools.demo_model.turns import Split

TOPICS = {
    "countries": ("capital", "continent", "capital_of", "place", "reasoned_continent"),
    "numbers": ("small_sum", "times_table", "reasoned_sum", "reasoned_product", "counting_between"),
    "words": ("gloss", "category", "is_a", "opposite", "animal_fact"),
    "elements": ("element", "element_gloss", "unknown_element"),
}
"""The skills of each topic, as `SKILLS` has them."""


def topic_prompts(topic: str, seed: int) -> Iterator[Prompt]:
    """Questions about a topic without end, each a conversation of its own; the same for one seed. Raises
    KeyError for a topic that there is not."""
    skills = [skill for skill in SKILLS if skill.name in TOPICS[topic]]
    random = Random(f"{seed} {topic}")
    while True:
        (skill,) = random.choices(skills, [skill.weight for skill in skills])
        *turns, last = skill.generate(random, Split.HELD_OUT)
        yield Prompt(skill.name, None, tuple(turns), last.user, last.assistant)
