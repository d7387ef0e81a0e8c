"""Compiled kernels survive the process that compiled them, and a bad cache never stops a start."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shared.quants
from shared.gguf.types import tensor_type_named
from shared.quants import SUPPORTED, UnsupportedTensorType, block_format, warm
from shared.quants.compile_cache import cache_folder
from shared.quants.simd.instruction_set import supported

# Prints, for each type named, the product of a row of 32 weights with ones, and the sum of the decoded row:
# codes of 1, scale 2.
_PROGRAM = """
import logging, sys
import numpy as np
from shared.gguf.types import tensor_type_named
from shared.quants import block_format, choose_kernels, decode_rows, matmul
logging.basicConfig(format="LOG %(levelname)s %(message)s")
choose_kernels(sys.argv[1])
for name in sys.argv[2:]:
    kind = tensor_type_named(name)
    raw = np.full((1, kind.block_bytes), {"Q8_0": 0x01, "Q4_0": 0x99}[name], np.uint8)
    raw[0, :2] = 0x00, 0x40
    out = np.empty((1, 1), np.float32)
    matmul(block_format(kind.type_id), raw, np.ones((1, 32), np.float32), out)
    print(round(float(out[0, 0]), 4), decode_rows(block_format(kind.type_id), raw).sum())
"""
# With kernels made for this CPU: a file for activations, two for products with each format, and an index and
# a code file for decoding each. Portable ones need no activations, and have two files for everything.
_NUM_FILES = {"auto": 1 + 2 * (2 + 2), "portable": 2 * (2 + 2)}

either_way = pytest.mark.parametrize("kernels", ["auto", "portable"])


@pytest.fixture(autouse=True)
def _has_kernels(request: pytest.FixtureRequest) -> None:
    kernels = getattr(request.node, "callspec", None) and request.node.callspec.params.get("kernels")
    if kernels == "auto" and not supported():
        pytest.skip("this CPU has no kernels but the portable ones")


def _start(cache: Path, kernels: str, *formats: str) -> subprocess.Popen[str]:
    root = str(Path(shared.quants.__file__).parents[2])
    environment = os.environ | {"STRATA_CACHE_DIR": str(cache), "PYTHONPATH": root}
    command = [sys.executable, "-c", _PROGRAM, kernels, *formats]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def _finish(process: subprocess.Popen[str]) -> list[str]:
    """Checks that the process computed the right values; returns the lines it logged."""
    printed, logged = process.communicate(timeout=100)
    assert process.returncode == 0, logged
    assert set(printed.split()) == {"64.0"}
    return [line for line in logged.splitlines() if line.startswith("LOG")]


def _files(cache: Path) -> dict[Path, tuple[int, int]]:
    """Every file with what changes when numba writes it again."""
    files = [path for path in cache.rglob("*") if path.is_file()]
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@either_way
def test_processes_share_kernels(kernels: str, tmp_path: Path) -> None:
    """Two that start at once, on an empty cache, compute and store the right kernels; a third compiles
    nothing. Guards against kernels whose cache key differs from process to process, and against two kernels
    in one index file, where one could be stored under the other's name."""
    both = [_start(tmp_path, kernels, "Q8_0", "Q4_0"), _start(tmp_path, kernels, "Q4_0", "Q8_0")]
    assert [_finish(process) for process in both] == [[], []]
    stored = _files(tmp_path)
    assert len(stored) == _NUM_FILES[kernels]

    assert _finish(_start(tmp_path, kernels, "Q8_0", "Q4_0")) == []
    assert _files(tmp_path) == stored


@either_way
def test_damaged_files_are_replaced(kernels: str, tmp_path: Path) -> None:
    """As a power cut may leave them: the start that finds them warns and works, the next finds none."""
    _finish(_start(tmp_path, kernels, "Q8_0"))
    num_files = len(_files(tmp_path))
    for path in _files(tmp_path):
        path.write_bytes(path.read_bytes()[:100] if "decode" in path.name else b"")
    logged = _finish(_start(tmp_path, kernels, "Q8_0"))
    num_kernels = {"auto": 4, "portable": 2}[kernels]
    assert [("WARNING" in line, "is not usable" in line) for line in logged] == num_kernels * [(True, True)]
    assert _finish(_start(tmp_path, kernels, "Q8_0")) == []
    assert len(_files(tmp_path)) == num_files


@either_way
def test_unwritable_directory_costs_a_warning(kernels: str, tmp_path: Path) -> None:
    """Without a cache the kernels are compiled in memory; the log says once what to do about it."""
    (tmp_path / "file").touch()
    logged = _finish(_start(tmp_path / "file" / "cache", kernels, "Q8_0"))
    assert len(logged) == 1
    assert "WARNING" in logged[0]
    assert "STRATA_CACHE_DIR" in logged[0]


def test_folders_of_earlier_versions_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a new one is made, and no start has used them for a month; all else stays."""
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path))
    kernels = tmp_path / "kernels"
    month_ago = time.time() - 31 * 24 * 3600
    for name in ("old", "recent"):
        (kernels / name).mkdir(parents=True)
        (kernels / name / "kernel.o").touch()
    os.utime(kernels / "old", (month_ago, month_ago))
    folder = cache_folder.__wrapped__()
    assert folder is not None
    assert sorted(path.name for path in kernels.iterdir()) == sorted(["recent", folder.name])
    os.utime(folder, (month_ago, month_ago))
    cache_folder.__wrapped__()
    assert folder.stat().st_mtime > month_ago + 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"STRATA_CACHE_DIR": "chosen", "XDG_CACHE_HOME": "user", "HOME": "home"}, "chosen/kernels"),
        ({"XDG_CACHE_HOME": "user", "HOME": "home"}, "user/strata/kernels"),
        ({"HOME": "home"}, "home/.cache/strata/kernels"),
    ],
)
def test_where_the_cache_is(
    environment: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder follows the usual variables, is this user's alone, and its name tells versions apart."""
    for variable in ("STRATA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(tmp_path / value))
    folder = cache_folder.__wrapped__()
    assert folder is not None
    assert folder.parent == tmp_path / expected
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "-numba" in folder.name


def test_unknown_type_is_named() -> None:
    """A file made by a newer quantiser is refused with the type's name and what would do."""
    with pytest.raises(UnsupportedTensorType, match=r"type 34 \(TQ1_0\) is not supported.*Q4_K") as caught:
        block_format(34)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnsupportedTensorType, match="type 9999"):
        block_format(9999)


def test_every_supported_type_is_found() -> None:
    """The list of names in the error message and the table behind it are the same."""
    assert [block_format(tensor_type_named(name).type_id).type.name for name in SUPPORTED] == list(SUPPORTED)


def test_warming_reports_progress() -> None:
    """Whoever waits for kernels at start sees how far they are; a format named twice counts once."""
    quantised, floats = (block_format(tensor_type_named(name).type_id) for name in ("Q8_0", "F32"))
    seen: list[tuple[int, int, str]] = []
    warm([quantised, floats, quantised], [floats], on_progress=lambda *progress: seen.append(progress))
    activations = ["activations"] if quantised.activation_bytes else []
    names = [*activations, "products with F32", "products with Q8_0", "rows of F32"]
    assert seen == [(number, len(names), name) for number, name in enumerate(names, start=1)]
