"""What a process of the stack finds in its environment: the settings as they were resolved, and no others."""

from dataclasses import replace
from pathlib import Path

from shared.config import PROCESS_CONFIGS, GatewayConfig, StagerConfig
from shared.settings import resolve, settings_of
from shared.supervisor import child_environment

KNOWN = settings_of(*PROCESS_CONFIGS.values())


def test_resolved_settings_replace_all_sources() -> None:
    """The child must not read the file again, nor a variable that a flag has overruled: both would bring back
    what the user overruled."""
    environment = {"PATH": "/bin", "STRATA_CONFIG": "/x.toml", "STRATA_PORT": "1", "STRATA_PARALLEL": "2"}
    child = child_environment(environment, GatewayConfig(port=9000))
    assert child == {"PATH": "/bin", "STRATA_PORT": "9000"}


def test_a_default_overrules_too() -> None:
    """A flag that asks for the default, against a variable that does not."""
    child = child_environment({"STRATA_PORT": "1"}, GatewayConfig(port=8080))
    assert "STRATA_PORT" not in child
    assert resolve(GatewayConfig, flags={}, environment=child, known=KNOWN).port == 8080


def test_settings_of_other_processes_are_not_handed_on() -> None:
    """Each gets its own, whatever the user set for the others."""
    child = child_environment({"STRATA_PORT": "1", "STRATA_STAGER_CPUS": "7"}, StagerConfig(stager_cpus="3"))
    assert child == {"STRATA_STAGER_CPUS": "3"}


def test_other_variables_stay() -> None:
    """What is no setting of a process belongs to the user: caches, CUDA, proxies."""
    environment = {"STRATA_CACHE_DIR": "/c", "CUDA_VISIBLE_DEVICES": "0", "STRATA_MISSPELT": "1"}
    assert child_environment(environment, GatewayConfig()) == environment


def test_the_child_resolves_the_same() -> None:
    """Whatever the settings are, the child has exactly those."""
    config = replace(
        GatewayConfig(),
        model=Path("/models/a model.gguf"),
        run_dir=Path("/run/x"),
        drain_timeout_s=1234567.25,
        temperature=0.123456789,
        aliases=("a", "b"),
        eos_ids=(1, 2),
        seed=0,
        logits_endpoint=True,
    )
    child = child_environment({"STRATA_SEED": "7"}, config)
    assert resolve(GatewayConfig, flags={}, environment=child, known=KNOWN) == config
