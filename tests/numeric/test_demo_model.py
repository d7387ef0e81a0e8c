"""The model that comes with Strata, answering through the engine, against transformers with the same weights.

Its answers are not written down here: they change whenever it is trained anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import Qwen4ExpForCausalLM

from shared.demo_model import DEMO_MODEL_PATH
from tests.support.reference_model import reference_logits
from tests.support.running_engine import running_engine
from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.config import IM_END, IM_START
from tools.demo_model.convert import write_gguf
from tools.demo_model.to_transformers import load_checkpoint, transformers_model

NUM_NEW_TOKENS = 24
# Where the two likeliest tokens are that close, rounding may choose either.
CLOSE = 1e-3

COUNTRIES = ("France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Canada", "India", "Chile", "Greece")
WORDS = ("river", "yellow", "mountain", "seven", "garden", "winter", "copper", "lantern", "thunder", "pencil")
QUESTIONS = [
    *(f"What is the capital of {country}?" for country in COUNTRIES),
    *(f"What is {17 * n + 3} plus {29 * n + 8}?" for n in range(10)),
    *(f"Write the word {word} backwards." for word in WORDS),
    *(f"Which is larger, {37 * n % 101} or {53 * n % 97}?" for n in range(10)),
    *(f"My name is {word.title()}. What is my name?" for word in WORDS),
]


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo model under transformers."""

    checkpoint: Checkpoint
    model: Qwen4ExpForCausalLM
    prompts: list[list[int]]

    @property
    def end_of_turn(self) -> int:
        return self.checkpoint.tokenizer.token_to_id(IM_END)


def prompt_of(question: str, tokenizer: Tokenizer) -> list[int]:
    text = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
    token_ids: list[int] = tokenizer.encode(text).ids
    return token_ids


@pytest.fixture(scope="module")
def demo() -> Demo:
    checkpoint = load_checkpoint(DEMO_MODEL_PATH)
    prompts = [prompt_of(question, checkpoint.tokenizer) for question in QUESTIONS]
    return Demo(checkpoint, transformers_model(checkpoint), prompts)


@pytest.fixture(scope="module", params=["as shipped", "as F32"])
def path(
    request: pytest.FixtureRequest, demo: Demo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The file itself, and one with the values that its blocks decode to."""
    if request.param == "as shipped":
        yield DEMO_MODEL_PATH
        return
    path = tmp_path_factory.mktemp("demo") / "demo-f32.gguf"
    write_gguf(demo.checkpoint, path, "F32")
    yield path
    path.unlink()


def test_greedy_answers(demo: Demo, path: Path) -> None:
    """Fifty questions, eight at a time."""
    assert len(demo.prompts) == 50
    with running_engine(path, parallel=8, prefill=64) as running:
        for number, prompt in enumerate(demo.prompts):
            running.ask(f"{number}", prompt, NUM_NEW_TOKENS, eos_token_ids=[demo.end_of_turn])
        answers = [running.answer(f"{number}").token_ids for number in range(len(demo.prompts))]
    num_close = 0
    for prompt, answer in zip(demo.prompts, answers, strict=True):
        assert len(answer) == NUM_NEW_TOKENS or answer[-1] == demo.end_of_turn
        # The reference reads what was answered: it would have said the same, token for token.
        expected = reference_logits(demo.model, [*prompt, *answer])[len(prompt) - 1 : -1]
        margin = expected.max(-1) - expected[np.arange(len(answer)), answer]
        assert (margin <= CLOSE).all()
        num_close += int((margin > 0).sum())
    assert num_close <= 2
