"""The README says what the code does."""

from tools.settings_table import README, with_table


def test_settings_table_is_current() -> None:
    """Guards against a setting that was added or changed without the README: run
    `python -m tools.settings_table --write`."""
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text
