"""Writes the README's table of settings from the code that defines them.

python -m tools.settings_table          prints the table
python -m tools.settings_table --write  puts it into README.md, between its markers
"""

import argparse
import re
from pathlib import Path

from shared.config import PROCESS_CONFIGS
from shared.settings import Setting, settings_of

README = Path(__file__).parents[1] / "README.md"
_BAR = r"\|"
_MARKERS = re.compile(r"(<!-- settings -->\n).*?(<!-- end of settings -->)", re.DOTALL)


def table() -> str:
    """The table in Markdown, in the order and the groups of `strata serve --help`."""
    rows = [_row(item) for item in settings_of(*PROCESS_CONFIGS.values()).values()]
    return (
        "\n".join(["| flag | variable | default | value | meaning |", "|---|---|---|---|---|", *rows]) + "\n"
    )


def with_table(text: str) -> str:
    """The README's text with the table put between its markers."""
    return _MARKERS.sub(lambda match: match[1] + table() + match[2], text)


def _row(item: Setting) -> str:
    value = "|".join(item.spec.choices) or item.spec.unit
    cells = (f"`{item.flag}`", f"`{item.variable}`", _default(item), value, item.spec.help)
    # A bar would begin the next cell.
    return f"| {' | '.join(cell.replace('|', _BAR) for cell in cells)} |"


def _default(item: Setting) -> str:
    if item.name == "model":
        return "the demo model"
    if isinstance(item.default, bool):
        return "on" if item.default else "off"
    return "" if item.default in (None, "", ()) else f"{item.default}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if parser.parse_args().write:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
