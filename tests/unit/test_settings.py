"""Settings: where they come from, what they may be, and what is said where they are not."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.cli.stack_arguments import add_stack_arguments, stack_configs
from shared.config import PROCESS_CONFIGS, CommonConfig, check_heartbeats
from shared.errors import ConfigError
from shared.run_directory import Role
from shared.settings import (
    add_flags,
    describe,
    resolve,
    setting,
    settings_of,
    to_environment,
    unknown_variables,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One setting of every type."""

    count: int = setting(4, "how many", group="numbers", unit="N", minimum=1, maximum=64, flags=("--slots",))
    share: float = setting(0.5, "how much, 100% is all", group="numbers", minimum=0, maximum=1)
    limit: float = setting(30.0, "how long", group="numbers", unit="SECONDS")
    name: str = setting("", "what it is called", group="words", unit="NAME")
    level: str = setting("info", "how much is said", group="words", choices=("info", "error"))
    key: str = setting("", "who may ask", group="words", is_secret=True)
    is_on: bool = setting(False, "whether", group="words")
    seed: int | None = setting(None, "where chance begins", group="numbers", minimum=0)
    folder: Path | None = setting(None, "where", group="words", unit="DIR")  # noqa: RUF009 - a dataclass field
    file: Path = setting(Path("a.gguf"), "which", group="words", unit="PATH")  # noqa: RUF009
    ids: tuple[int, ...] = setting((), "which numbers", group="numbers")
    aliases: tuple[str, ...] = setting((), "further names", group="words")
    size: int | None = setting(None, "how large (default: as needed)", group="numbers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """What another process reads."""

    threads: int = setting(0, "how many", group="numbers")


KNOWN = settings_of(Sample, Other)


def resolved(
    flags: list[str] | None = None, environment: dict[str, str] | None = None, file: Path | None = None
) -> Sample:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, KNOWN.values())
    arguments = [*(flags or []), *(["--config", str(file)] if file is not None else [])]
    values = vars(parser.parse_args(arguments))
    return resolve(Sample, flags=values, environment=environment or {}, known=KNOWN)


def toml(folder: Path, text: str) -> Path:
    path = folder / "strata.toml"
    path.write_text(text)
    return path


def test_precedence(tmp_path: Path) -> None:
    """Flag over variable over file over default; each alone, and all at once."""
    file = toml(tmp_path, "count = 2")
    variable = {"STRATA_COUNT": "3"}
    assert resolved().count == 4
    assert resolved(file=file).count == 2
    assert resolved(environment=variable, file=file).count == 3
    assert resolved(["--count", "5"], variable, file).count == 5
    assert resolved(environment={"STRATA_CONFIG": str(file)}).count == 2
    other = tmp_path / "other.toml"
    other.write_text("count = 7")
    assert resolved(environment={"STRATA_CONFIG": str(file)}, file=other).count == 7


@pytest.mark.parametrize(
    ("name", "text", "in_file", "value"),
    [
        ("count", "7", "7", 7),
        ("share", "0.25", "0.25", 0.25),
        ("share", "1", "1", 1.0),
        ("limit", "1e3", "1e3", 1000.0),
        ("name", " a b ", '" a b "', "a b"),
        ("name", "7", '"7"', "7"),
        ("level", "error", '"error"', "error"),
        ("is_on", "on", "true", True),
        ("is_on", "YES", '"1"', True),
        ("is_on", "0", "false", False),
        ("seed", "0", "0", 0),
        ("seed", "none", '"none"', None),
        ("folder", "/tmp/x", '"/tmp/x"', Path("/tmp/x")),
        ("folder", "none", '""', None),
        ("file", "b.gguf", '"b.gguf"', Path("b.gguf")),
        ("ids", "1, 2,3", "[1, 2, 3]", (1, 2, 3)),
        ("ids", "1,", '"1"', (1,)),
        ("aliases", "a, b,,", '["a", " b"]', ("a", "b")),
        ("aliases", ",", "[]", ()),
    ],
)
def test_every_type_from_every_source(
    name: str, text: str, in_file: str, value: object, tmp_path: Path
) -> None:
    """A value means the same wherever it is written."""
    file = toml(tmp_path, f"{name} = {in_file}")
    results = [resolved(file=file), resolved(environment={f"STRATA_{name.upper()}": text})]
    if name != "is_on":
        results.append(resolved([f"--{name.replace('_', '-')}={text}"]))
    for result in results:
        assert getattr(result, name) == value
        assert type(getattr(result, name)) is type(value)


def test_flags_for_booleans() -> None:
    """They take no value, and can also take a "yes" of the environment back."""
    assert resolved(["--is-on"]).is_on
    assert not resolved(["--no-is-on"], {"STRATA_IS_ON": "1"}).is_on


def test_second_name_of_a_flag() -> None:
    """The name that users of other servers know."""
    assert resolved(["--slots", "9"]).count == 9


def test_empty_variables_count_as_unset() -> None:
    """A compose file passes variables on that its user did not set."""
    assert resolved(environment={"STRATA_COUNT": "", "STRATA_LEVEL": "", "STRATA_IDS": ""}) == Sample()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "many", "'many'; expected a whole number"),
        ("count", "1.5", "'1.5'; expected a whole number"),
        ("count", "0", "0; the smallest value is 1"),
        ("count", "65", "65; the largest value is 64"),
        ("count", "9" * 5000, "expected a whole number"),
        ("share", "half", "'half'; expected a number"),
        ("share", "1.01", "1.01; the largest value is 1"),
        ("share", "nan", "'nan'; expected a number"),
        ("limit", "inf", "'inf'; expected a number"),
        ("level", "loud", "'loud'; it can be info, error"),
        ("is_on", "perhaps", "'perhaps'; expected on or off"),
        ("seed", "-1", "-1; the smallest value is 0"),
        ("seed", "x", "'x'; expected a whole number"),
        ("ids", "1,x", "'x'; expected a whole number"),
    ],
)
def test_bad_values(name: str, text: str, message: str) -> None:
    """The message names the variable, the value and what would do."""
    variable = f"STRATA_{name.upper()}"
    with pytest.raises(ConfigError, match=f"^{variable} is .*{message}"):
        resolved(environment={variable: text})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("count = 1.5", "count is 1.5; expected a whole number"),
        ("count = true", "count is True; expected a whole number"),
        ('count = "x"', "count is 'x'; expected a whole number"),
        ("share = false", "share is False; expected a number"),
        ("limit = nan", "limit is nan; expected a number"),
        (f"limit = 1{'0' * 400}", "expected a number"),
        ("name = 5", "name is 5; expected text"),
        ('name = ["a"]', r"name is \['a'\]; expected text"),
        ("name = 2026-01-01", r"name is datetime.date\(2026, 1, 1\); expected text"),
        ("file = 5", "file is 5; expected a path"),
        ("ids = 5", "ids is 5; expected a list"),
        ("ids = [1.5]", "ids is 1.5; expected a whole number"),
        ("aliases = {a = 1}", r"aliases is \{'a': 1\}; expected a list"),
        ("is_on = 2", "is_on is 2; expected on or off"),
        ("level = ['info']", r"level is \['info'\]; expected text"),
    ],
)
def test_bad_values_in_the_file(line: str, message: str, tmp_path: Path) -> None:
    """TOML has types of its own; a value of the wrong one is refused with file and key, not converted."""
    file = toml(tmp_path, line)
    with pytest.raises(ConfigError, match=f"^{file}: .*{message}"):
        resolved(file=file)


def test_bad_flag() -> None:
    """The message names the flag as it was typed."""
    with pytest.raises(ConfigError, match=r"^--count \(--slots\) is 'x'; expected a whole number"):
        resolved(["--slots", "x"])
    with pytest.raises(ConfigError, match=r"^--share is 'x'; expected a number"):
        resolved(["--share", "x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conut = 4", "unknown key conut; did you mean count?"),
        ("[gateway]\nport = 1", "unknown key gateway$"),
        ("count =", "not a valid TOML file: "),
        ("count = 1\ncount = 2", "not a valid TOML file: "),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    """A misspelt key would otherwise be ignored in silence."""
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError, match=f"^{file}: {message}"):
        resolved(file=file)


def test_unreadable_files(tmp_path: Path) -> None:
    """Missing, a directory, not text: each by name."""
    with pytest.raises(ConfigError, match=r"gone\.toml: the configuration file cannot be read: No such file"):
        resolved(file=tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="the configuration file cannot be read: Is a directory"):
        resolved(file=tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml: not a valid TOML file"):
        resolved(file=tmp_path / "binary.toml")


def test_settings_of_other_processes(tmp_path: Path) -> None:
    """One file and one environment serve all processes: what another one reads is no error here."""
    file = toml(tmp_path, "threads = 3\ncount = 2")
    assert resolved(environment={"STRATA_THREADS": "x"}, file=file).count == 2


def test_unknown_variables() -> None:
    """What looks like a setting and is none is found, other variables and the file's are left alone."""
    environment = {"STRATA_CONUT": "1", "STRATA_COUNT": "1", "STRATA_CONFIG": "x", "PATH": "/bin"}
    assert unknown_variables(environment, [item.variable for item in KNOWN.values()]) == ["STRATA_CONUT"]


@pytest.mark.parametrize(
    "changed",
    [
        {"count": 7, "limit": 1234567.5, "share": 0.1234567890123},
        {"limit": 1e-7, "is_on": True, "seed": 0, "key": "secret"},
        {"name": "a b", "level": "error", "folder": Path("/x y"), "file": Path("z.gguf")},
        {"ids": (3, 1), "aliases": ("a", "b c")},
    ],
)
def test_child_gets_the_same(changed: dict[str, Any]) -> None:
    """What a process hands its children through the environment is exactly what it resolved itself, the last
    digit of a number included."""
    config = Sample(**changed)
    environment = to_environment(config)
    assert environment.keys() == {f"STRATA_{name.upper()}" for name in changed}
    assert resolved(environment=environment) == config


def test_secrets_are_masked() -> None:
    """The log line at start has every setting, and no key."""
    shown = describe(Sample(key="abc123", ids=(1, 2), is_on=True))
    assert shown["key"] == "***"
    assert "abc123" not in str(shown)
    assert (shown["ids"], shown["is_on"], shown["seed"], shown["limit"]) == ("1,2", "on", "none", "30")
    assert describe(Sample())["key"] == ""


def test_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names every setting with its unit, default and variable, each once, and percent signs survive
    argparse."""
    with pytest.raises(SystemExit):
        resolved(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--count N, --slots N how many (default 4) [STRATA_COUNT]" in text
    assert "--limit SECONDS how long (default 30) [STRATA_LIMIT]" in text
    assert "how large (default: as needed) [STRATA_SIZE]" in text
    assert "how much, 100% is all (default 0.5) [STRATA_SHARE]" in text
    assert "--level info|error how much is said (default info) [STRATA_LEVEL]" in text
    assert "--is-on, --no-is-on whether (default off) [STRATA_IS_ON]" in text
    assert "where chance begins (default none) [STRATA_SEED]" in text


def test_real_settings_are_in_order() -> None:
    """Every default passes its own check, no two flags collide, and all can be handed on."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    known = settings_of(*PROCESS_CONFIGS.values())
    add_flags(parser, known.values())
    parser.format_help()
    for config_class in PROCESS_CONFIGS.values():
        config = resolve(config_class, flags={}, environment={}, known=known)
        texts = {item.variable: describe(config)[name] for name, item in settings_of(config_class).items()}
        assert resolve(config_class, flags={}, environment=texts, known=known) == config
        assert to_environment(config) == {}


def test_commands_that_start_a_stack_are_quiet_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their own default comes after every source."""
    file = tmp_path / "strata.toml"
    file.write_text('log_level = "debug"')
    for variable in ("STRATA_LOG_LEVEL", "STRATA_CONFIG"):
        monkeypatch.delenv(variable, raising=False)

    def level(*flags: str) -> str:
        parser = argparse.ArgumentParser()
        add_stack_arguments(parser)
        configs = stack_configs(parser.parse_args(flags))
        return configs[Role.GATEWAY].log_level

    assert level() == "warning"
    assert level("--config", str(file)) == "debug"
    assert level("--config", str(file), "--log-level", "info") == "info"
    monkeypatch.setenv("STRATA_LOG_LEVEL", "")
    assert level() == "warning"
    monkeypatch.setenv("STRATA_LOG_LEVEL", "error")
    assert level() == "error"


@pytest.mark.parametrize("value", ["-5", "3,-1", "2147483648"])
def test_every_entry_of_a_list_is_checked(value: str) -> None:
    known = settings_of(*PROCESS_CONFIGS.values())
    with pytest.raises(ConfigError, match=r"--eos-ids is .*value is"):
        resolve(PROCESS_CONFIGS["gateway"], flags={"eos_ids": value}, environment={}, known=known)


def test_heartbeats_that_would_come_too_late() -> None:
    check_heartbeats(CommonConfig())
    check_heartbeats(CommonConfig(heartbeat_interval_s=1, heartbeat_timeout_s=3))
    with pytest.raises(ConfigError, match=r"--heartbeat-timeout-s is 10, .*\(4\); raise it to 12"):
        check_heartbeats(CommonConfig(heartbeat_interval_s=4))
