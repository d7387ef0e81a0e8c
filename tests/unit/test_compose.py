"""The compose file starts what the project has, with settings that the project knows."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import PROCESS_CONFIGS
from shared.process import OTHER_VARIABLES
from shared.settings import settings_of

_FILE = Path(__file__).parents[2] / "docker-compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))["services"]
    return found


def test_one_service_for_each_process(services: dict[str, Any]) -> None:
    """Guards against a process that compose forgets, or starts as something else."""
    assert {name: service["command"] for name, service in services.items()} == {
        role: ["python", "-m", role] for role in PROCESS_CONFIGS
    }


def test_only_settings_that_their_process_reads(services: dict[str, Any]) -> None:
    """Guards against a variable that was renamed, or given to the wrong container: it would be ignored."""
    for role, service in services.items():
        read = {item.variable for item in settings_of(PROCESS_CONFIGS[role]).values()}
        shared_by_all = {"STRATA_MAX_CONTEXT", "STRATA_PARALLEL", "STRATA_PREFILL"}
        given = set(service["environment"]) - shared_by_all
        assert given <= read | set(OTHER_VARIABLES), role


def test_the_gateway_ends_first(services: dict[str, Any]) -> None:
    """Compose stops dependents first, which is how running answers get to finish."""
    assert services["gateway"]["depends_on"] == ["gpu_worker"]
    assert set(services["gpu_worker"]["depends_on"]) == {"cpu_worker", "stager"}


def test_answers_can_finish_before_docker_kills(services: dict[str, Any]) -> None:
    """The grace period has to be longer than the drain."""
    for service in services.values():
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s > float(service["environment"]["STRATA_DRAIN_TIMEOUT_S"])


def test_docker_compose_accepts_the_file() -> None:
    """The schema, where a compose is installed to check it."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0:
            checked = subprocess.run(
                [*command, "-f", str(_FILE), "config", "--quiet"], capture_output=True, text=True, check=False
            )
            assert checked.returncode == 0, checked.stderr
            return
    pytest.skip("docker compose is not installed")
