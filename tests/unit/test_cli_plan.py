"""`strata plan`: what it says of the demo model and of a file of the real size, its exit codes, its settings.

On two cores it takes 0.4 s, imports included, for a header of 68 GB; that is not asserted here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.cli import main
from shared.cli.plan import parse_size
from shared.placement import rates
from tests.support.real_file import write_real_header
from tests.support.tiny_model import tiny_model

GIB = 1 << 30


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_header(tmp_path_factory.mktemp("plan") / "real.gguf", "ista-iq2xs")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STRATA_")]:
        monkeypatch.delenv(name)


def planned(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["plan", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    """The plan, and that its exit code says whether all fits."""
    code = planned(*arguments, "--json")
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["fits"] == (code == 0) == (not plan["short"])
    return plan


def test_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments: this machine, no device; said so, with what is assumed."""
    assert planned("--device", "cpu", "--ram", "8GiB") == 0
    report = capsys.readouterr().out
    assert report.startswith("model    strata-demo: 4 layers of 64 experts, ")
    assert "device   none (--device cpu): no slots for experts" in report
    assert re.search(r"RAM +8\.00 GiB available", report)
    assert re.search(r"headroom +1\.00 GiB  stays free", report)
    assert "CPU 5.9 GB/s (assumed)" in report
    assert "in RAM 100.0%" in report
    assert report.endswith("fits: chunks of 512 tokens, no slots of experts on the device\n")
    assert planned("--ram", "8GiB") == 0
    assert "device   none (no --vram given" in capsys.readouterr().out


def test_slots_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """RAM plays the memory of a device: slots are counted there, and a link is estimated."""
    assert planned("--device", "cpu", "--expert-cache", "50", "--ram", "8GiB") == 0
    report = capsys.readouterr().out
    assert "50 slots, 19.5% of experts, kept in RAM" in report
    assert re.search(r"slots +2\.5 MiB  the device's memory is RAM", report)
    assert "link 13.1 GB/s (assumed)" in report
    plan = as_json(capsys, "--device", "cpu", "--expert-cache", "50", "--ram", "8GiB")
    assert plan["slots"]["count"] == 50
    assert plan["ram"]["slots"] == plan["slots"]["bytes"]


def test_a_device_smaller_than_the_model(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A card of 24 GB, 62.8 GiB of RAM: every byte of the device is accounted for, the complement is what has
    no slot, and more of what a setting frees is slots."""
    plan = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB")
    device, slots, ram = plan["device"], plan["slots"], plan["ram"]
    used = sum(device[name] for name in ("dense", "context", "states", "buffers", "reserve"))
    assert 0 <= device["free"] - used - slots["bytes"] < 2 << 20
    assert device["reserve"] == 700 << 20
    assert device["context"] == 32768 * 12 * (4 * 256 * 4 + 128)
    chosen = next(each for each in plan["chunks"] if each["tokens"] == plan["chunk"])
    assert chosen["obstacle"] is None
    assert ram["complement"] == chosen["complement_bytes"] <= ram["for_experts"]
    assert ram["complement"] == pytest.approx(
        plan["experts"]["bytes"] - slots["bytes"] + chosen["lent_bytes"], abs=1
    )
    assert (ram["dense"], ram["context"], ram["headroom"]) == (0, 0, 4 * GIB)
    assert sum(plan["shares"].values()) == pytest.approx(1)
    freed = {each["setting"]: each for each in plan["frees"]}
    halved = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", "--context", "16384")
    assert halved["slots"]["count"] - slots["count"] == freed["--max-context 16384"]["num_slots"] > 0
    assert device["context"] - halved["device"]["context"] == freed["--max-context 16384"]["num_bytes"]
    grown = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", "--kv-grow")
    assert grown["slots"]["count"] - slots["count"] == freed["--kv-grow"]["num_slots"]
    smaller = next(name for name in freed if name.startswith("--prefill"))
    less = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", *smaller.split())
    assert ram["complement"] - less["ram"]["complement"] == freed[smaller]["num_bytes"]


def test_report_of_a_device(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person reads: slots, the table of chunks with the chosen one marked, the verdict last."""
    assert planned(real, "--vram", "24GiB", "--ram", "62.8GiB", "--link-gb-s", "17.9") == 0
    report = capsys.readouterr().out
    assert "n-gram table 26.82 GiB" in report
    assert re.search(r"experts +\d+\.\d\d GiB  \d+ slots, \d\d\.\d% of experts", report)
    assert len(re.findall(r"^ +> +\d+ .* yes$", report, re.MULTILINE)) == 1
    assert "link 17.9 GB/s (given)" in report
    assert "disk 500 MB/s (assumed)" in report
    assert re.search(r"--kv-grow +\d+ MiB of device memory, \d+ slots more", report)
    assert report.splitlines()[-1].startswith("fits: chunks of ")
    assert max(map(len, report.splitlines())) < 200


def test_short_of_ram(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By how much, and a chunk that fits where there is one; otherwise the disk is read."""
    assert planned(real, "--vram", "24GiB", "--ram", "24GiB") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        r"does not fit: short of \d+\.\d\d GiB of RAM; free memory, or have .* from the disk.*", last
    )
    roomy = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB")["chunks"]
    needed = {each["tokens"]: each["complement_bytes"] for each in roomy}
    budget = f"{(needed[2048] + 1) / GIB:.9f}"
    sizes = ("--vram", "24GiB", "--ram", "62.8GiB", "--ram-budget", budget)
    assert as_json(capsys, real, *sizes)["chunk"] <= 2048
    plan = as_json(capsys, real, *sizes, "--prefill", "8192")
    (shortage,) = plan["short"]
    assert (shortage["memory"], shortage["remedy"]) == ("RAM", "--prefill 2048 fits")
    assert shortage["num_bytes"] == pytest.approx(needed[8192] - needed[2048], abs=100)


def test_short_of_device_memory(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense weights alone are too much, slots that were asked for are, a chunk borrows too many."""
    plan = as_json(capsys, real, "--vram", "8GiB", "--ram", "62.8GiB")
    assert plan["short"][0]["memory"] == "device memory"
    used = sum(plan["device"][name] for name in ("dense", "context", "states", "buffers", "reserve"))
    assert plan["short"][0]["num_bytes"] == used - 8 * GIB
    assert plan["slots"]["count"] == 0
    fitting = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB")["slots"]["count"]
    asked = ("--expert-cache", "20000")
    (shortage,) = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", *asked)["short"]
    assert shortage["remedy"] == f"--expert-cache {fitting} fits, or auto"
    few = ("--expert-cache", "500", "--vram-reserve-mib", "0", "--prefill", "65536")
    plan = as_json(capsys, real, "--vram", "20GiB", "--ram", "80GiB", *few)
    assert [each["remedy"] for each in plan["short"]] == ["lower --prefill, or take --prefill auto"]


def test_work_space_that_is_not_borrowed(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slots make way for it for good; nothing is lent."""
    sizes = ("--vram", "24GiB", "--ram", "62.8GiB", "--prefill", "2048")
    lending = as_json(capsys, real, *sizes)
    without = as_json(capsys, real, *sizes, "--no-prefill-borrow")
    lent = next(each["lent_slots"] for each in lending["chunks"] if each["tokens"] == 2048)
    assert abs(lending["slots"]["count"] - without["slots"]["count"] - lent) <= 48
    assert without["ram"]["complement"] == pytest.approx(lending["ram"]["complement"], rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu", "--vram", "8GiB"), "--vram is of a CUDA device, but --device is 'cpu'"),
        (("--device", "cuda:1"), "--device is 'cuda:1', which is not looked at here; say how much"),
        (("--device", "gpu"), "--device is 'gpu'; it can be"),
        (("--expert-cache", "half"), "--expert-cache is 'half'; it can be auto"),
        (("--prefill", "auto:"), "--prefill is 'auto:'; it can be"),
        (("gone.gguf",), "gone.gguf: no such model file"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line, as from every command."""
    assert planned(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_sizes() -> None:
    """With a unit that says what it means."""
    assert parse_size("24GiB") == 24 * GIB
    assert parse_size("24gb") == 24 * 10**9
    assert parse_size("512 MiB") == 512 << 20
    assert parse_size("1.5TiB") == 3 << 39
    for text in ("24", "24G", "GiB", "-1GiB", "1e3GiB", "24XiB"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size; write it as 24GiB"):
            parse_size(text)


def test_nothing_heavy_is_imported() -> None:
    """It shall be there at once: neither torch nor compiled kernels are loaded."""
    program = (
        "import sys\nfrom shared.cli.main import main\n"
        "try: main(['plan', '--device', 'cpu', '--json'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'numba', 'llvmlite', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates are said to be; what cannot be measured is assumed."""
    monkeypatch.setattr(rates, "_PROBE_SECONDS", 0.005)
    path = tiny_model().write(tmp_path / "tiny.gguf")
    plan = as_json(capsys, path, "--device", "cpu", "--expert-cache", "4", "--probe", "--disk-mb-s", "100")
    origins = {name: rate["origin"] for name, rate in plan["rates"].items()}
    assert origins == {
        "link": "measured",
        "cpu": "measured",
        "disk": "given",
        "prompt_tokens": "assumed",
    }
    assert plan["rates"]["disk"]["value"] == 100e6
    assert all(rate["value"] > 0 for rate in plan["rates"].values())


def test_probe_of_a_disk(tmp_path: Path) -> None:
    """A rate where the file system has direct reads; nothing of files too small for it."""
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    rate = rates.probe_disk(path, 5000)
    assert rate is None or rate > 0
    assert rates.probe_disk(path, 1 << 19) is None
