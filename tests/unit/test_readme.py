"""The README says what the code does."""

import re

from tools.settings_table import README, table, with_table


def test_settings_table_is_current() -> None:
    """Guards against a setting that was added or changed without the README: run
    `python -m tools.settings_table --write`."""
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text


def test_settings_table_has_five_cells_a_row() -> None:
    """A bar in a value would begin another one."""
    for row in table().splitlines():
        assert len(re.findall(r"(?<!\\)\|", row)) == 6
    assert r"| N\|auto |" in table()
    assert "| GiB |" in table()
    assert r"| adaptive\|lru\|static |" in table()
