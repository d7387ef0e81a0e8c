"""Small talk, and a few texts known by heart."""

from random import Random

from tools.demo_model.facts import facts
from tools.demo_model.phrasing import vary
from tools.demo_model.turns import Split, Turn

CLAIMS = (
    "I can explain common words, name capitals, continents and chemical elements, do times tables and"
    " small sums, find opposites, count, tell a short story, and remember your name."
)
"""The answer to "What can you do?". `skills` marks each as promised, and the evaluation checks it."""


def chat(random: Random, split: Split) -> list[Turn]:
    """Greetings, thanks, questions about the model, and the like."""
    entry = random.choice(facts().talk)
    question = vary(random.choice(entry.questions), random)
    return [Turn(question, entry.answer.format(claims=CLAIMS))]
