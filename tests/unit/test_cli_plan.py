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
    """The plan, and that its exit code says whether the stack starts."""
    code = planned(*arguments, "--json")
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["starts"] == (code == 0) == (not plan["short"])
    assert plan["fits"] == (plan["starts"] and not plan["ram"]["unread"])
    assert (plan["decode_tokens_s"] is None) == (plan["first_token_s"] is None) == (code == 1)
    return plan


def test_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments: this machine, no device; said so, with what is assumed."""
    assert planned("--device", "cpu", "--ram", "8GiB") == 0
    report = capsys.readouterr().out
    assert report.startswith("model    strata-demo: 4 layers of 64 experts, ")
    assert "device   none (--device cpu): no slots for experts" in report
    assert re.search(r"RAM +8\.00 GiB in all", report)
    assert "8192 tokens; at most 272 MiB, for 4 requests of 32768" in report
    assert "frees" not in report
    assert "expect   about " in report
    assert re.search(
        r"first token of a prompt of 4096 tokens after [0-9.]+ m?s, of 32768 tokens after", report
    )
    assert re.search(r"headroom +1\.00 GiB  stays free", report)
    assert "CPU 5.9 GB/s (assumed)" in report
    assert "in RAM 100.0%" in report
    assert report.endswith("fits: chunks of 512 tokens, no slots of experts on the device\n")
    assert planned("--ram", "8GiB", "--max-context", "1024", "--parallel", "1") == 0
    report = capsys.readouterr().out
    assert "device   none (no --vram given" in report
    assert "8192 tokens; at most 2.1 MiB, for 1024 tokens" in report
    assert planned("--device", "cpu") == 0
    assert re.search(r"RAM +\d+\.\d\d GiB available", capsys.readouterr().out)


def test_prediction_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Its experts are in RAM, its keys and values and dense weights count, unless nothing is drafted."""
    machine = ("--device", "cpu", "--ram", "8GiB")
    with_block, without = as_json(capsys, *machine), as_json(capsys, *machine, "--spec", "0")
    assert with_block["ram"]["prediction"] == with_block["experts"]["bytes"] // 4
    assert without["ram"]["prediction"] == 0
    for name in ("dense", "context"):
        assert with_block["ram"][name] > without["ram"][name]
    assert with_block["ram"]["for_experts"] + with_block["ram"]["prediction"] < without["ram"]["for_experts"]
    assert planned(*machine) == 0
    assert re.search(r"prediction block +3\.\d MiB  its experts", capsys.readouterr().out)
    assert planned(*machine, "--spec", "0") == 0
    assert "prediction" not in capsys.readouterr().out


def test_how_keys_and_values_are_kept(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Less is counted for them, in RAM and on a device, where the plan names it as a way to free memory."""
    machine = (real, "--ram", "64GiB", "--device", "cpu")
    f32, auto, int8, k8v4 = (
        as_json(capsys, *machine, "--kv-type", kv_type)["ram"]["context"]
        for kv_type in ("f32", "auto", "int8", "k8v4")
    )
    assert auto == f32 == 8192 * 12 * (2 * 2 * 1024 + 128)
    assert int8 == 8192 * 12 * (2 * 2 * 264 + 128)
    assert k8v4 == 8192 * 12 * (2 * (264 + 144) + 128)
    assert planned(*machine, "--kv-type", "int8") == 0
    assert "8192 tokens as int8; at most 1.73 GiB, for 4 requests of 32768" in capsys.readouterr().out
    machine = (real, "--ram", "64GiB", "--vram", "16GiB")
    plain, small = (as_json(capsys, *machine, *more) for more in ((), ("--kv-type", "k8v4")))
    assert plain["device"]["context"] == 4 * f32
    assert small["device"]["context"] == 4 * k8v4
    assert small["slots"]["count"] > plain["slots"]["count"]
    (saving,) = [saving for saving in plain["frees"] if saving["setting"] == "--kv-type int8"]
    assert saving["num_bytes"] == 4 * (f32 - int8)
    assert not [saving for saving in small["frees"] if "kv-type" in saving["setting"]]
    assert planned(*machine, "--kv-type", "k8v4", "--kv-grow") == 0
    assert "16384 of 32768 tokens as k8v4, grows" in capsys.readouterr().out


def test_too_little_ram_for_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """What is needed before any expert counts, and what stays free; nothing is expected of it then."""
    plan = as_json(capsys, "--device", "cpu", "--ram", "512MiB")
    (shortage,) = plan["short"]
    fixed = sum(
        plan["ram"][name]
        for name in ("dense", "context", "states", "conversations", "rows", "processes", "slots")
    )
    assert (shortage["purpose"], shortage["needed"]) == ("before any expert", fixed + (128 << 20))
    assert shortage["num_bytes"] == shortage["needed"] - (512 << 20)
    assert planned("--device", "cpu", "--ram", "512MiB") == 1
    report = capsys.readouterr().out
    assert "expect" not in report
    assert report.splitlines()[-1].startswith(
        "does not fit: 1.09 GiB of RAM are needed before any expert, 512 MiB are there; short of "
    )
    assert "disk, which" not in report


@pytest.mark.parametrize(
    ("flags", "purpose", "remedy"),
    [
        (("--expert-cache", "20000"), "with 20000 slots", r"--expert-cache \d+ fits"),
        (
            ("--experts", "resident"),
            "for --experts resident",
            "take --experts auto, which keeps those in use",
        ),
        (("--ram-budget", "30"), "for --ram-budget 30", r"lower it to 22\.50, or leave it out"),
    ],
)
def test_what_serve_refuses(
    real: Path, flags: tuple[str, ...], purpose: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slots, a mode and a budget that RAM is too small for."""
    (shortage,) = as_json(capsys, real, "--device", "cpu", "--ram", "24GiB", *flags)["short"]
    assert (shortage["memory"], shortage["purpose"]) == ("RAM", purpose)
    assert re.fullmatch(remedy, shortage["remedy"])
    if "--expert-cache" in flags:
        fitting = shortage["remedy"].split()[1]
        assert as_json(capsys, real, "--device", "cpu", "--ram", "24GiB", "--expert-cache", fitting)["starts"]


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
    assert planned("--device", "cpu", "--expert-cache", "900", "--ram", "8GiB") == 0
    assert "kept in RAM; the model has 256 experts, 256 slots are taken" in capsys.readouterr().out


def test_a_chunk_that_takes_all_slots_in_ram(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs, as activations have RAM: nothing is short, and no row says that it fits."""
    flags = ("--device", "cpu", "--expert-cache", "50", "--ram", "8GiB", "--prefill", "2048")
    assert planned(*flags) == 0
    report = capsys.readouterr().out
    assert re.search(r"^ +2048 .* no, over all slots$", report, re.MULTILINE)
    assert " > " not in report


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
    assert freed["--parallel 1"]["price"] == "one request at a time"
    assert not any(name.startswith("--prefill") for name in freed)
    large = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", "--prefill", "8192")
    freed = {each["setting"]: each for each in large["frees"]}
    less = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", "--prefill", "4096")
    assert large["ram"]["complement"] - less["ram"]["complement"] == freed["--prefill 4096"]["num_bytes"]


def test_report_of_a_device(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a person reads: slots, the table of chunks with the chosen one marked, the verdict last."""
    assert planned(real, "--vram", "24GiB", "--ram", "62.8GiB", "--link-gb-s", "17.9") == 0
    report = capsys.readouterr().out
    assert "n-gram table 26.82 GiB" in report
    assert re.search(r"n-gram rows +1\.00 GiB  cache; the table of 26\.82 GiB stays on the disk", report)
    assert re.search(r"dense weights +9\.\d\d GiB  decoded to float16 there", report)
    assert re.search(r"^ +256 .* \d\.\d min   yes$", report, re.MULTILINE)
    assert re.search(r"experts +\d+\.\d\d GiB  \d+ slots, \d\d\.\d% of experts", report)
    assert len(re.findall(r"^ +> +\d+ .* yes$", report, re.MULTILINE)) == 1
    assert "link 17.9 GB/s (given)" in report
    assert "disk 500 MB/s (assumed)" in report
    assert re.search(r"--kv-grow +\d+ MiB of device memory, \d+ slots more \(fewer slots while", report)
    assert " of RAM" not in report
    assert report.splitlines()[-1].startswith("fits: chunks of ")
    assert max(map(len, report.splitlines())) < 200


def test_short_of_ram(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The disk is read: by how much, and a chunk that fits where there is one."""
    assert planned(real, "--vram", "24GiB", "--ram", "24GiB") == 0
    report = capsys.readouterr().out
    assert re.fullmatch(
        r"runs with experts read from the disk: \d+\.\d\d GiB of them do not fit in RAM; to have them there, "
        "free memory",
        report.splitlines()[-1],
    )
    assert "expect   about " in report
    roomy = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB")["chunks"]
    needed = {each["tokens"]: each["complement_bytes"] for each in roomy}
    budget = f"{(needed[2048] + 1) / GIB:.9f}"
    sizes = ("--vram", "24GiB", "--ram", "62.8GiB", "--ram-budget", budget)
    assert as_json(capsys, real, *sizes)["chunk"] <= 2048
    plan = as_json(capsys, real, *sizes, "--prefill", "8192")
    assert plan["ram"]["unread"] == pytest.approx(needed[8192] - needed[2048], abs=100)
    assert planned(real, *sizes, "--prefill", "8192") == 0
    assert capsys.readouterr().out.endswith("to have them there, --prefill 2048 fits\n")


def test_short_of_device_memory(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dense weights alone are too much, slots that were asked for are, a chunk borrows too many."""
    plan = as_json(capsys, real, "--vram", "8GiB", "--ram", "62.8GiB")
    assert plan["short"][0]["memory"] == "device memory"
    used = sum(plan["device"][name] for name in ("dense", "context", "states", "buffers", "reserve"))
    assert plan["short"][0]["num_bytes"] == used - 8 * GIB
    assert plan["slots"]["count"] == 0
    freed = [each["setting"] for each in plan["frees"]]
    assert re.fullmatch(
        r"with all that frees some above 10\.\d\d GiB are needed still: take a device .*, or --device cpu",
        plan["short"][0]["remedy"],
    )
    plan = as_json(capsys, real, "--vram", "11.5GiB", "--ram", "62.8GiB")
    assert plan["short"][0]["remedy"] == "see what frees some above, or take --device cpu"
    everything = " ".join(freed).split()
    assert as_json(capsys, real, "--vram", "11.5GiB", "--ram", "62.8GiB", *everything)["starts"]
    fitting = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB")["slots"]["count"]
    asked = ("--expert-cache", "20000")
    (shortage,) = as_json(capsys, real, "--vram", "24GiB", "--ram", "62.8GiB", *asked)["short"]
    assert shortage["remedy"] == f"--expert-cache {fitting} fits, or auto"
    few = ("--expert-cache", "500", "--vram-reserve-mib", "0", "--prefill", "65536")
    plan = as_json(capsys, real, "--vram", "20GiB", "--ram", "80GiB", *few)
    remedy = "--prefill 16384 fits, or --prefill auto takes what does, or raise --expert-cache"
    assert [each["remedy"] for each in plan["short"]] == [remedy]
    few = ("--vram", "12.6GiB", "--ram", "84GiB", "--expert-cache", "100", "--conversation-cache-mib", "0")
    (shortage,) = as_json(capsys, real, *few)["short"]
    assert shortage["remedy"] == "raise --expert-cache, or take --expert-cache 0"
    assert as_json(capsys, real, *few, "--expert-cache", "0")["starts"]


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


def test_contexts_beyond_the_trained_length(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not reach so far says what would, and with that the plan is for the longer context."""
    machine = ("--vram", "24GiB", "--ram", "128GiB", "--kv-grow")
    assert as_json(capsys, real, *machine, "--context", "500000")["max_context"] == 262144
    planned(real, *machine, "--context", "500000")
    report = capsys.readouterr().out
    assert "context  --max-context is 500000, but the model reaches 262144 tokens (positions are" in report
    assert "for more, add --rope-scaling yarn --rope-scale 2" in report
    scaled = (*machine, "--context", "500000", "--rope-scaling", "yarn", "--rope-scale", "2")
    assert as_json(capsys, real, *scaled)["max_context"] == 500000
    planned(real, *scaled)
    assert (
        "context  500000 tokens at most; positions are scaled: yarn, 2 times 262144 tokens"
        in capsys.readouterr().out
    )


def test_scaling_that_cannot_be(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before anything is planned."""
    assert planned(real, "--device", "cpu", "--rope-scale", "2") == 2
    assert "--rope-scale is 2, but --rope-scaling is 'none'" in capsys.readouterr().err
