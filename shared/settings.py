"""Where settings come from: defaults, a TOML file, the environment, flags, in rising order of precedence.

A process describes its settings as a frozen dataclass whose fields are made by `setting`. From that one
description follow the flag (`--max-context`), the variable (`STRATA_MAX_CONTEXT`), the key of the TOML file
(`max_context`), the check of type and range, and the help text. This module knows no setting by name.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ConfigError

ENVIRONMENT_PREFIX = "STRATA_"
CONFIG_FILE_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """What is known of one setting, apart from its type and default, which the dataclass field has."""

    help: str
    group: str
    unit: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...]
    flags: tuple[str, ...]
    is_secret: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a config class: its name, type, default and the rest."""

    name: str
    type: Any
    default: Any
    spec: SettingSpec

    @property
    def flag(self) -> str:
        """The long flag, for example `--max-context`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable, for example `STRATA_MAX_CONTEXT`."""
        return f"{ENVIRONMENT_PREFIX}{self.name.upper()}"


def setting(
    default: Any,
    help_text: str,
    *,
    group: str,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """A dataclass field that is a setting. `flags` are further names of its flag."""
    spec = SettingSpec(help_text, group, unit, minimum, maximum, choices, flags, is_secret)
    return dataclasses.field(default=default, metadata={"setting": spec})


def settings_of(*config_classes: type[Any]) -> dict[str, Setting]:
    """The settings of one or more config classes by name, each once, in the order they were written."""
    found: dict[str, Setting] = {}
    for config_class in config_classes:
        hints = typing.get_type_hints(config_class)
        for field in dataclasses.fields(config_class):
            spec = field.metadata["setting"]
            found.setdefault(field.name, Setting(field.name, hints[field.name], field.default, spec))
    return found


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Adds one flag per setting, grouped, with unit (what stands for the value) and default in its help.

    A flag that is not given leaves no attribute, so that `resolve` can tell it from one that is.
    """
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"TOML file with settings, keys as the flags with underscores [variable {CONFIG_FILE_VARIABLE}]",
    )
    groups: dict[str, Any] = {}
    for item in settings:
        if item.spec.group not in groups:
            groups[item.spec.group] = parser.add_argument_group(item.spec.group)
        form: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": _help(item)}
        if item.type is bool:
            form["action"] = argparse.BooleanOptionalAction
        else:
            form["metavar"] = "|".join(item.spec.choices) or item.spec.unit or "VALUE"
        groups[item.spec.group].add_argument(item.flag, *item.spec.flags, **form)


def resolve(
    config_class: type[Config],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    known: Mapping[str, Setting],
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Builds the config from all sources; `defaults` has values for settings that none of them sets.

    `known` names every setting of every process: the file and the environment serve all of them, and what
    none of them knows is an error rather than a silent misspelling. Raises ConfigError naming the source.
    """
    file_path = flags.get("config") or environment.get(CONFIG_FILE_VARIABLE)
    file_values = _read_file(Path(file_path), known) if file_path else {}
    values: dict[str, Any] = {}
    for name, item in settings_of(config_class).items():
        if name in flags:
            # Who typed the second name of a flag shall know it again, and whoever means something else by it.
            also = f" ({', '.join(item.spec.flags)})" if item.spec.flags else ""
            values[name] = _checked(item, flags[name], f"{item.flag}{also}")
        elif environment.get(item.variable):
            # An empty variable counts as unset: `VARIABLE: ${VARIABLE:-}` in a compose file gives one.
            values[name] = _checked(item, environment[item.variable], item.variable)
        elif name in file_values:
            values[name] = _checked(item, file_values[name], f"{file_path}: {name}")
        elif defaults and name in defaults:
            values[name] = defaults[name]
    return config_class(**values)


def to_environment(config: Any) -> dict[str, str]:
    """The settings that differ from their defaults, as variables for a child process."""
    changed = {}
    for name, item in settings_of(type(config)).items():
        value = getattr(config, name)
        if value != item.default:
            changed[item.variable] = _text(value)
    return changed


def unknown_variables(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """`STRATA_*` variables that no setting reads, most likely misspelt."""
    read = set(known) | {CONFIG_FILE_VARIABLE}
    return sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in read)


def describe(config: Any) -> dict[str, str]:
    """Every setting as text, secrets masked: for the log line at start."""
    return {
        name: "***" if item.spec.is_secret and getattr(config, name) else _text(getattr(config, name))
        for name, item in settings_of(type(config)).items()
    }


def _help(item: Setting) -> str:
    default = "none" if item.default in (None, "", ()) else _text(item.default)
    # Some texts say themselves what happens where nothing is set.
    told = "" if "(default:" in item.spec.help else f" (default {default})"
    # argparse expands % in help texts.
    return f"{item.spec.help}{told} [{item.variable}]".replace("%", "%%")


def _read_file(path: Path, known: Mapping[str, Setting]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: the configuration file cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}") from None
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{path}: unknown key {name}{hint}")
    return values


def _checked(item: Setting, value: Any, source: str) -> Any:
    parsed = _parse(item.type, value, source)
    if parsed is None:
        return None
    spec = item.spec
    if spec.choices and parsed not in spec.choices:
        raise ConfigError(f"{source} is {parsed!r}; it can be {', '.join(spec.choices)}")
    for number in parsed if isinstance(parsed, tuple) else (parsed,):
        if spec.minimum is not None and number < spec.minimum:
            raise ConfigError(f"{source} is {number}; the smallest value is {_text(spec.minimum)}")
        if spec.maximum is not None and number > spec.maximum:
            raise ConfigError(f"{source} is {number}; the largest value is {_text(spec.maximum)}")
    return parsed


def _parse(hint: Any, value: Any, source: str) -> Any:
    """`value` is text from a flag or a variable, or a typed value from the TOML file."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value in (None, "", "none"):
            return None
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        item_type = typing.get_args(hint)[0]
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list):
            raise ConfigError(f"{source} is {value!r}; expected a list")
        return tuple(_parse(item_type, entry, source) for entry in items if str(entry).strip())
    if hint is bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise ConfigError(f"{source} is {value!r}; expected on or off")
    typed_forms, name = _SCALARS[hint]
    if isinstance(value, typed_forms) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            parsed = hint(value.strip() if isinstance(value, str) else value)
            if hint is not float or math.isfinite(parsed):
                return parsed
    raise ConfigError(f"{source} is {value!r}; expected {name}")


# What a value may be before it is converted, and what it is called.
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((str, int), "a whole number"),
    float: ((str, int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str, Path), "a path"),
}


def _text(value: Any) -> str:
    """The value as `_parse` reads it back, without loss."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(_text(entry) for entry in value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return "none" if value is None else str(value)
