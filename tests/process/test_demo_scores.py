"""The demo model keeps its promises, as `make score-demo` asks it: over HTTP."""

import re
import subprocess
import sys

import pytest

from tests.support.stack import Stack
from tools.demo_model.skills import SKILLS

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

PROMISED = [skill.name for skill in SKILLS if skill.is_promised]


def score(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script to its end."""
    command = [sys.executable, "-m", "tools.demo_model.score", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_a_few_questions_of_every_promised_skill(stack: Stack) -> None:
    skills = [argument for name in PROMISED for argument in ("--skill", name)]
    ended = score("--base-url", stack.url, "--limit", "6", "--failures", "9", *skills)
    lines = dict(re.findall(r"^(\w+) +(\d+ of +6)", ended.stdout, re.MULTILINE))
    assert list(lines) == PROMISED
    # One wrong answer is below the bar of 95 % already; the whole evaluation is what decides about that.
    assert sum(int(counts.split()[0]) for counts in lines.values()) >= 0.95 * 6 * len(lines), ended.stdout
    assert (ended.returncode == 0) is (set(lines.values()) == {"6 of   6"})


def test_with_a_server_of_its_own() -> None:
    ended = score("--serve", "--skill", "chat", "--limit", "2")
    assert "chat" in ended.stdout
    assert ended.returncode == 0, ended.stderr


def test_without_a_server() -> None:
    ended = score("--base-url", "http://127.0.0.1:9", "--skill", "chat", "--limit", "1")
    assert ended.returncode == 1
    assert "http://127.0.0.1:9" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_skill_that_there_is_not() -> None:
    ended = score("--skill", "cooking")
    assert ended.returncode == 2
    assert "no such skill: cooking" in ended.stderr
