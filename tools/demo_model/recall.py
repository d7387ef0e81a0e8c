"""Recall exercises: random tokens in which the next one is known only from earlier in the sequence.

Copying is the one thing conversations teach slowly: it needs two layers to work together, and a set of
known names can be learned as a table instead. These exercises cannot, so the circuit forms early and
conversations then use it.
"""

from random import Random


def recall_exercise(
    random: Random, word_ids: list[int], separator_id: int, length: int
) -> tuple[list[int], list[bool]]:
    """Token ids up to `length`, and for each whether the tokens before it determine it."""
    ids: list[int] = []
    flags: list[bool] = []
    while len(ids) < length - 12:
        room = length - len(ids)
        more_ids, more_flags = (_repeated_span if random.random() < 0.5 else _look_ups)(
            random, word_ids, separator_id, room
        )
        ids += more_ids
        flags += more_flags
    return ids[:length], flags[:length]


def _repeated_span(
    random: Random, word_ids: list[int], separator_id: int, room: int
) -> tuple[list[int], list[bool]]:
    """Random tokens, then the same again."""
    span = random.choices(word_ids, k=random.randrange(3, max(4, min(40, room // 2 - 1))))
    return [*span, separator_id, *span, separator_id], [False] * (len(span) + 1) + [True] * (len(span) + 1)


def _look_ups(
    random: Random, word_ids: list[int], separator_id: int, room: int
) -> tuple[list[int], list[bool]]:
    """Pairs of a key and a value of one to three tokens; then some keys again, each followed by its value."""
    num_pairs = random.randrange(2, max(3, min(10, room // 10)))
    keys = random.sample(word_ids, num_pairs)
    values = [random.choices(word_ids, k=random.randrange(1, 4)) for _ in keys]
    ids: list[int] = []
    for key, value in zip(keys, values, strict=True):
        ids += [key, *value, separator_id]
    flags = [False] * len(ids)
    for place in random.choices(range(num_pairs), k=random.randrange(1, 2 * num_pairs)):
        ids += [keys[place], *values[place], separator_id]
        flags += [False] + [True] * (len(values[place]) + 1)
    return ids, flags
