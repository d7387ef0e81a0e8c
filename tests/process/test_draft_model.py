"""A stack whose prediction block comes in a file of its own: it starts, answers, and refuses one that is not
of its model."""

import subprocess
from pathlib import Path

import pytest

from shared.demo_model import DEMO_MODEL_PATH
from tests.support.draft_models import split_draft
from tests.support.stack import START_TIMEOUT_S, serving, strata_command

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
BODY = {"prompt": "A spoon is used to", "max_tokens": 12, "temperature": 0}


def test_answers_are_those_of_one_file(tmp_path: Path) -> None:
    """With all experts in RAM, with a pool that has no room for them, and without speculation."""
    main_path, draft_path = split_draft(DEMO_MODEL_PATH, tmp_path)
    with serving() as stack:
        expected = stack.post("/v1/completions", BODY).json["choices"][0]["text"]
    for more in ((), ("--ram-budget", "0.008"), ("--spec", "0")):
        with serving("--model", str(main_path), "--draft-model", str(draft_path), *more) as stack:
            assert stack.post("/v1/completions", BODY).json["choices"][0]["text"] == expected


def test_one_of_another_model(tmp_path: Path) -> None:
    """Before anything is started: both files and the key are named."""
    main_path, draft_path = split_draft(
        DEMO_MODEL_PATH, tmp_path, lambda metadata: metadata.update({"qwen4exp.expert_count": 8})
    )
    ended = subprocess.run(
        [strata_command(), "serve", str(main_path), "--draft-model", str(draft_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 2
    assert f"{draft_path}: qwen4exp.expert_count is 8; in {main_path} it is 64" in ended.stderr
