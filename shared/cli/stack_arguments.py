"""Arguments of the commands that start a stack, and what becomes of them."""

import argparse
import os
from pathlib import Path
from typing import Any

from shared.config import PROCESS_CONFIGS, CommonConfig
from shared.run_directory import Role
from shared.settings import add_flags, resolve, settings_of

# A stack that someone watches in a terminal says little by itself.
_DEFAULTS = {"log_level": "warning"}


def add_stack_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and every setting of every process."""
    parser.add_argument("model_path", nargs="?", metavar="MODEL.gguf", help="same as --model")
    add_flags(parser, settings_of(*PROCESS_CONFIGS.values()).values())


def stack_configs(parsed: argparse.Namespace, **overrides: Any) -> dict[Role, CommonConfig]:
    """The settings of each process. Raises ConfigError."""
    flags = {name: value for name, value in vars(parsed).items() if name not in ("run", "model_path")}
    if parsed.model_path is not None:
        flags["model"] = parsed.model_path
    flags |= overrides
    known = settings_of(*PROCESS_CONFIGS.values())
    configs = {
        Role(name): resolve(kind, flags=flags, environment=os.environ, known=known, defaults=_DEFAULTS)
        for name, kind in PROCESS_CONFIGS.items()
    }
    return {role: _with_absolute_models(config) for role, config in configs.items()}


def _with_absolute_models(config: CommonConfig) -> CommonConfig:
    draft = config.draft_model
    return type(config)(
        **{name: getattr(config, name) for name in settings_of(type(config))}
        | {
            "model": Path(config.model).expanduser().absolute(),
            "draft_model": None if draft is None else Path(draft).expanduser().absolute(),
        }
    )
