"""Which experts should give way: misses of one layer's pool under several rules, on made-up routes.

`python -m benchmarks.replacement` prints, for each kind of routes and each rule, the share of a decoded
token's experts that are not in the pool. The rules: least recently used; uses that decay by half in so many
tokens, where a prompt counts with all its tokens or as one half-life; and the best that who knows all that
comes could do. Routes are drawn here; no model is needed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

NUM_EXPERTS, NUM_USED, PROMPT_TOKENS = 512, 10, 512
HALF_LIVES = (32, 128, 512)

Steps = list[NDArray[np.int64]]
"""The experts of each step [tokens, NUM_USED]: one token, or those of a prompt."""


def decoding(rng: np.random.Generator, skew: float, num_tokens: int, topic_tokens: int) -> Steps:
    """Tokens one by one. How likely an expert is falls with its rank to the power of `skew`; for half of a
    token's experts, ranks are drawn anew every `topic_tokens`."""
    weights = np.arange(1, NUM_EXPERTS + 1, dtype=float) ** -skew
    general = rng.permutation(weights)
    steps: Steps = []
    mixed = general
    for number in range(num_tokens):
        if number % topic_tokens == 0:
            mixed = (general + rng.permutation(weights)) / weights.sum()
        # The largest of weights over exponentials: a draw without replacement.
        keys = np.log(mixed) - np.log(rng.exponential(size=NUM_EXPERTS))
        steps.append(np.argpartition(-keys, NUM_USED)[None, :NUM_USED])
    return steps


def with_prompts(rng: np.random.Generator, steps: Steps, every: int, *, are_alike: bool) -> Steps:
    """A prompt before every so many tokens: its experts are drawn evenly, or those of the tokens that follow,
    again and again, are half of them."""
    mixed: Steps = []
    for number, step in enumerate(steps):
        if number % every == 0:
            prompt = rng.random((PROMPT_TOKENS, NUM_EXPERTS)).argpartition(NUM_USED)[:, :NUM_USED]
            if are_alike:
                following = np.concatenate(steps[number : number + every])
                prompt[::2] = following[rng.integers(0, len(following), len(prompt[::2]))]
            mixed.append(prompt)
        mixed.append(step)
    return mixed


# A rule says how much an expert is worth keeping, after each step in which it was or was not used.
Rule = Callable[[Steps], Iterator[NDArray[np.float64]]]


def least_recent(steps: Steps) -> Iterator[NDArray[np.float64]]:
    last = np.zeros(NUM_EXPERTS)
    for number, step in enumerate(steps):
        last[step.ravel()] = number + 1
        yield last


def decayed(half_life: float, most_tokens: int = PROMPT_TOKENS) -> Rule:
    """A step counts as `most_tokens` tokens at most."""

    def worths(steps: Steps) -> Iterator[NDArray[np.float64]]:
        uses = np.zeros(NUM_EXPERTS)
        for step in steps:
            counted = min(len(step), most_tokens)
            uses *= 0.5 ** (counted / half_life)
            uses += np.bincount(step.ravel(), minlength=NUM_EXPERTS) * (counted / len(step))
            yield uses

    return worths


def clairvoyant(steps: Steps) -> Iterator[NDArray[np.float64]]:
    following = np.full(NUM_EXPERTS, len(steps) + 1.0)
    worths = []
    for number in range(len(steps) - 1, -1, -1):
        worths.append(-following.copy())
        following[steps[number].ravel()] = number
    return iter(reversed(worths))


def misses(steps: Steps, rule: Rule, num_places: int) -> float:
    """The share of decoded tokens' experts that were not in the pool, the first quarter of the steps
    aside."""
    present = np.zeros(NUM_EXPERTS, bool)
    missed = counted = 0
    for number, (step, worth) in enumerate(zip(steps, rule(steps), strict=True)):
        needed = np.unique(step)
        if len(step) == 1 and number >= len(steps) // 4:
            missed += int((~present[needed]).sum())
            counted += len(needed)
        present[needed] = True
        kept = np.flatnonzero(present)
        if len(kept) > num_places:
            # What this step has used stays before anything else, where it can.
            order = kept[np.lexsort((worth[kept], np.isin(kept, needed) & (len(needed) <= num_places)))]
            present[order[: len(kept) - num_places]] = False
    return missed / counted


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--places", type=int, default=128, help=f"of a layer with {NUM_EXPERTS} experts")
    parser.add_argument("--tokens", type=int, default=4000)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    rules: dict[str, Rule] = {"least recently used": least_recent}
    for half_life in HALF_LIVES:
        rules[f"decayed, {half_life}"] = decayed(half_life)
        rules[f"decayed, {half_life}, prompts as one"] = decayed(half_life, half_life)
    rules["best possible"] = clairvoyant
    traces: dict[str, Steps] = {}
    for name, skew in (("uniform", 0.0), ("skewed", 0.7), ("very skewed", 1.1)):
        steps = traces[name] = decoding(rng, skew, options.tokens, 400)
        traces[f"{name}, other prompts"] = with_prompts(rng, steps, 200, are_alike=False)
        traces[f"{name}, like prompts"] = with_prompts(rng, steps, 200, are_alike=True)
    for name, steps in traces.items():
        print(name)
        for rule_name, rule in rules.items():
            print(f"    {rule_name:28} {misses(steps, rule, options.places):.3f}")


if __name__ == "__main__":
    main()
