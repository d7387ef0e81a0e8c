"""Every skill with its share of the training turns, and which ones the model promises."""

from random import Random

from tools.demo_model import arithmetic, ignorance, knowledge, memory, talk, words
from tools.demo_model.turns import Skill, Split, Turn

BAR = 0.95
"""Share of answers exactly right that a promised skill must reach."""


def _filler(random: Random, split: Split) -> list[Turn]:
    """A turn about something else, for the skills that span turns."""
    pick = random.choices(_FILLERS, [skill.weight for skill in _FILLERS])[0]
    return pick.generate(random, split)


_FILLERS = (
    Skill("gloss", knowledge.gloss, 12, 60, is_promised=True),
    Skill("category", knowledge.category, 4, 40, is_promised=True),
    Skill("is_a", knowledge.is_a, 2.5),
    Skill("capital", knowledge.capital, 6, is_promised=True),
    Skill("continent", knowledge.continent, 4, is_promised=True),
    Skill("capital_of", knowledge.capital_of, 5, is_promised=True),
    Skill("place", knowledge.place, 3),
    Skill("element", knowledge.element, 9, is_promised=True),
    Skill("element_gloss", knowledge.element_gloss, 2),
    Skill("opposite", knowledge.opposite, 2, is_promised=True),
    Skill("calendar", knowledge.calendar, 1.5),
    Skill("animal_fact", knowledge.animal_fact, 1.5),
    Skill("color", knowledge.color, 1),
    Skill("times_table", arithmetic.times_table, 5, is_promised=True),
    Skill("small_sum", arithmetic.small_sum, 8, is_promised=True),
    Skill("chat", talk.chat, 5, 60, is_promised=True),
    Skill("refusal", ignorance.refusal, 3),
    Skill("unknown_word", ignorance.unknown_word, 4),
    Skill("unknown_place", ignorance.unknown_place, 2),
    Skill("unknown_element", ignorance.unknown_element, 0.7),
)

SKILLS: tuple[Skill, ...] = (
    *_FILLERS,
    Skill("counting", arithmetic.counting, 2, 40, is_promised=True),
    Skill("counting_between", arithmetic.counting_between, 2, 40),
    Skill("reasoned_sum", arithmetic.reasoned_sum, 5, 60),
    Skill("reasoned_product", arithmetic.reasoned_product, 3, 40),
    Skill("reasoned_continent", arithmetic.reasoned_continent, 1.5, 40),
    Skill("repeat", words.repeat, 3, 40),
    Skill("first_word", words.first_word, 1, 40),
    Skill("last_word", words.last_word, 1, 40),
    Skill("memory", memory.recalling(_filler), 5, 40),
    Skill("memory_name", memory.promised_recall(_filler, memory.NAME), 3, 60, is_promised=True),
    Skill("memory_color", memory.promised_recall(_filler, memory.COLOR), 0.7, 40, is_promised=True),
    Skill("memory_animal", memory.promised_recall(_filler, memory.ANIMAL), 1.2, 40, is_promised=True),
    Skill("not_told", memory.not_told(_filler), 0.7, 40),
)
