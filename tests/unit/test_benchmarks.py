"""What benchmarks print, write and count: a wrong number that looks right is worse than none."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks import (
    cold_start,
    expert_cache,
    generation,
    kernels,
    kv_formats,
    low_memory,
    slices,
    step_profile,
    versus_llama_cpp,
)
from benchmarks.blocks import decode, random_blocks
from benchmarks.contenders import LlamaInProcess
from benchmarks.ggml import Ggml, GgmlProducts, LlamaUnavailableError, aligned_bytes
from benchmarks.kernels import CLAIMED_FORMATS, Cell, claims, compare_ours, interleave, own_claims
from benchmarks.peak import peak_mac_per_s
from benchmarks.processes import CpuWatch, cpu_seconds, family
from benchmarks.quality import NoReferenceError, Quality, compare
from benchmarks.read_limit import read_bytes_per_s, token_bytes
from benchmarks.report import Report, median, table
from benchmarks.slices import (
    PROFILES,
    REAL,
    ensure_slice,
    replaced,
    slice_bytes,
    slice_path,
    tensors,
    write_slice,
)
from benchmarks.step_profile import claims as profile_claims
from benchmarks.step_profile import profile
from benchmarks.streaming import AnswerError, Generation
from benchmarks.versus_llama_cpp import DECODE, MAX_FOREIGN_CPUS, Results, Run, speed_claims
from shared.gguf.model import GGUFModel
from shared.gguf.types import tensor_type_named
from shared.model_config import read_model_config
from shared.quants.simd.instruction_set import Target, supported
from shared.tensor_catalog import check_tensors
from tests.support.tiny_model import tiny_model
from tests.support.tiny_slice import TINY_SLICE


def _generation(tokens_per_s: float) -> Generation:
    return Generation(32, 3, (0.5, 0.5 + 1 / tokens_per_s, 0.5 + 2 / tokens_per_s))


def test_a_claim_is_one_line_and_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read standard output: anything but claims on it would be taken for one."""
    report = Report("kernels", {"is_quick": True}, model={"name": "m"})
    report.note("a remark")
    report.claim("decode_ratio", 1.23456)
    report.write(tmp_path / "r.json")
    shown = capsys.readouterr()
    assert shown.out == "decode_ratio: 1.235\n"
    assert shown.err == "a remark\n"
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["claims"] == {"decode_ratio": 1.23456}
    assert (stored["benchmark"], stored["settings"], stored["model"]) == (
        "kernels",
        {"is_quick": True},
        {"name": "m"},
    )
    assert stored["machine"]["memory_bytes"] > 0
    assert stored["machine"]["usable_cpus"] == sorted(os.sched_getaffinity(0))
    assert stored["versions"]["numpy"] == np.__version__
    with pytest.raises(ValueError, match="decode_ratio has been claimed already"):
        report.claim("decode_ratio", 1.0)


def test_tables_line_up() -> None:
    """A number under the wrong heading misleads."""
    assert table(("a", "bb"), [("ccc", "1")]) == "a    bb\nccc   1"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_slice_is_a_model(tmp_path: Path, profile: str) -> None:
    """Guards against a slice that writes for minutes and is then refused."""
    path = tmp_path / "slice.gguf"
    fractions: list[float] = []
    write_slice(path, TINY_SLICE, profile, 0, lambda _, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    with GGUFModel(path) as model:
        config = read_model_config(model)
        check_tensors(model, config)
        assert (config.num_layers, config.num_experts, config.vocab_size) == (4, 8, TINY_SLICE.vocab_size)
        assert set(model) == {name for name, _ in tensors(TINY_SLICE)}
        for name in model:
            info = model.info(name)
            if info.type.name in ("F32", "F16", "BF16"):
                continue
            rows = model.rows(name).reshape(-1, info.type.row_bytes(info.shape[-1]))
            values = decode(info.type.name, rows)
            assert np.isfinite(values).all()
            # Centred, or activations would drift away layer by layer.
            assert abs(values.mean()) < 0.15 * values.std(), name
            del rows


def test_real_slices_have_the_real_extents() -> None:
    """The numbers that make a slice stand for the model."""
    shapes = dict(tensors(REAL))
    assert shapes["blk.0.ffn_gate_exps.weight"] == (512, 640, 2560)
    assert shapes["blk.3.attn_q.weight"] == (12288, 2560)
    assert shapes["blk.0.attn_qkv.weight"] == (10240, 2560)
    assert shapes["output.weight"] == (248320, 2560)
    assert 3e9 < slice_bytes(REAL, "ista-iq2xs") < slice_bytes(REAL, "q4_k") < 9e9


def test_an_interrupted_slice_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written file must not be taken for a slice the next time."""

    def interrupted(path: Path, *_: object, **__: object) -> None:
        path.write_bytes(b"GGUF")
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.slices.write_slice", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_slice(tmp_path, "iq2_xs", REAL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("type_name", ["IQ2_XS", "Q2_0", "Q4_K"])
def test_products_by_ggml(type_name: str) -> None:
    """The anchor must compute what it is compared in, or its speed means nothing."""
    kind = tensor_type_named(type_name)
    num_matrices, num_rows, width, num_tokens = 2, 16, 512, 3
    rng = np.random.default_rng(0)
    weights = aligned_bytes((num_matrices, num_rows, kind.row_bytes(width)))
    weights[:] = random_blocks(type_name, weights.size // kind.block_bytes, 1.0, rng).reshape(weights.shape)
    x = rng.standard_normal((num_tokens, width), np.float32)
    try:
        ggml = Ggml()
    except LlamaUnavailableError as reason:
        pytest.skip(str(reason))
    with GgmlProducts(ggml, kind, weights, x) as products:
        for number, matrix in enumerate(weights):
            products.compute(number)
            expected = x.astype(np.float64) @ decode(type_name, matrix).astype(np.float64).T
            assert np.abs(products.out - expected).max() < 0.03 * np.abs(expected).max()


def test_a_type_that_ggml_numbers_otherwise_is_refused() -> None:
    """After a renumbering, products would be of garbage."""
    try:
        ggml = Ggml()
    except LlamaUnavailableError as reason:
        pytest.skip(str(reason))
    q8_0 = tensor_type_named("Q8_0")
    with pytest.raises(LlamaUnavailableError, match=r"ggml's type 8 is 'Q8_0', not Q4_K"):
        ggml.check_type(type(q8_0)(q8_0.type_id, "Q4_K", 256, 144))


def test_every_matrix_comes_before_any_comes_again() -> None:
    """A matrix that is still in a cache would make a memory-bound kernel look faster than it is."""
    seen: list[int] = []
    turns = {"one": seen.append, "other": seen.append}
    interleave(turns, 7, 0.01, np.random.default_rng(0))
    whole = len(seen) // 7
    assert whole >= 2
    assert all(sorted(seen[7 * turn : 7 * turn + 7]) == list(range(7)) for turn in range(whole))


def test_claims_of_kernels() -> None:
    """A median over the formats that happened to be measured would be another claim under the same name."""

    def cell(name: str, num_tokens: int, ours_s: float) -> Cell:
        return Cell(name, num_tokens, 1, 5, 1.0, ours_s, 2.0, 0.0, 0.0)

    cells = [cell(name, 4, 1.0 + place) for place, name in enumerate(CLAIMED_FORMATS)]
    cells += [cell("IQ2_XS", 1, 4.0), cell("Q2_0", 4, 2.0)]
    assert claims(cells) == {"kernel_n4_ratio": pytest.approx(0.5)}


def test_claims_about_our_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right one of two is the divisor, and the worst of several counts."""
    seconds = {("IQ2_XS", 4): 5.0, ("IQ2_XS", 1): 4.0, ("Q2_0", 1): 1.0, ("Q2_K", 1): 3.0}
    seconds |= {("Q2_0", 4): 2.0, ("Q2_K", 4): 4.0}
    monkeypatch.setattr("benchmarks.kernels.compare_ours", lambda a, b, *_: seconds[a] / seconds[b])
    assert own_claims(seconds, 2, 0.01) == {"iq2_xs_window4_cost": 1.25, "q2_0_over_q2_k": 2.0}
    assert own_claims([("IQ2_XS", 4), ("Q2_0", 1)], 2, 0.01) == {}


def test_our_kernels_take_turns() -> None:
    """With themselves they are level, give or take what a machine does to turns of a few milliseconds."""
    assert 0.2 < compare_ours(("Q8_0", 1), ("Q8_0", 1), 2, 0.05) < 5


def test_the_peak_is_a_peak() -> None:
    """For every way kernels multiply here; more than what no CPU can do would be a loop optimised away."""
    for instructions in supported():
        for num_bytes in (1, 2):
            assert 1e9 < peak_mac_per_s(Target(instructions, num_bytes)) < 5e12


def test_what_a_token_reads(tmp_path: Path) -> None:
    """All but tables and experts that are not chosen: what else is counted makes the limit too low."""
    path = tmp_path / "slice.gguf"
    write_slice(path, TINY_SLICE, "iq2_xs", 0, lambda *_: None)
    with GGUFModel(path) as model:
        sizes = {name: model.rows(name).nbytes for name in model}
        tables = sizes["token_embd.weight"] + sizes["per_layer_token_embd.weight"]
        experts = sum(size for name, size in sizes.items() if "_exps." in name)
        # Two of eight are chosen.
        assert token_bytes(model) == sum(sizes.values()) - tables - experts * 6 // 8
        assert read_bytes_per_s(model, os.sched_getaffinity(0)) > 0
    described = tiny_model()
    with GGUFModel(described.write(tmp_path / "own-head.gguf")) as model:
        with_own_head, head_bytes = token_bytes(model), model.rows("output.weight").nbytes
    del described.tensors["output.weight"]
    with GGUFModel(described.write(tmp_path / "tied.gguf")) as model:
        assert token_bytes(model) == with_own_head - head_bytes + model.rows("token_embd.weight").nbytes


def test_every_step_of_a_token_is_named_once(tmp_path: Path) -> None:
    """Weights that no step accounts for, or two, would make the table of a profile a wrong one."""
    path = tmp_path / "slice.gguf"
    write_slice(path, TINY_SLICE, "q4_k", 0, lambda *_: None)
    steps = profile(path, num_threads=1, num_tokens=3)
    with GGUFModel(path) as model:
        num_bytes = sum(step.num_runs * step.num_bytes for step in steps.values())
        # Vectors and convolutions are copied at load; of a model as small as this they are some percent.
        assert 0.92 * token_bytes(model) <= num_bytes <= token_bytes(model)
    assert steps["routed experts"].num_runs == TINY_SLICE.num_hidden_layers
    assert all(len(step.tokens) == 3 and "?" not in name for name, step in steps.items())
    found = profile_claims(steps, TINY_SLICE.num_hidden_layers)
    total = 1e6 * sum(step.seconds for step in steps.values())
    per_layer = sum(value for name, value in found.items() if name.endswith("_per_layer"))
    assert per_layer * TINY_SLICE.num_hidden_layers + found["head_us"] == pytest.approx(total)


@pytest.mark.parametrize("model", [(), ("--profile", "q4_k")], ids=["demo", "slice"])
def test_formats_of_keys_and_values(
    model: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All types read the same tokens, f16 is what others are held against, and fewer bits are fewer bytes."""
    monkeypatch.setattr(kv_formats, "model_path", lambda parsed: parsed.model or path)
    path = tmp_path / "slice.gguf"
    write_slice(path, TINY_SLICE, "q4_k", 0, lambda *_: None)
    sizes = ("--texts", "2", "--tokens", "70", "--contexts", "100", "--rounds", "1", "--threads", "1")
    out = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["program", *model, *sizes, "--json", str(out)])
    assert kv_formats.main() == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    found = report["claims"]
    assert report["details"]["num_tokens"] == 140
    assert "kl_k8v4: " in capsys.readouterr().out
    assert found["kl_f16"] == found["kl_f32_f32"] == 0
    assert found["top1_f16"] == found["memory_ratio_f16"] == 1
    assert 0 < found["kl_f32"] < found["kl_int8"] < found["kl_k8v4"] < 1e-2
    assert found["kl_f32_f16"] == pytest.approx(found["kl_f32"], rel=0.5)
    for larger, smaller in (("f32", "f16"), ("f16", "int8"), ("int8", "k8v4")):
        assert found[f"memory_ratio_{larger}"] > found[f"memory_ratio_{smaller}"]
    assert all(value > 0 for name, value in found.items() if "tokens_per_s" in name)


def test_speed_is_against_the_faster_llama_cpp() -> None:
    """The slower one of two would be a straw man."""
    results = Results()
    speeds = {"strata": 30.0, "llama.cpp server": 10.0, "llama.cpp in process": 20.0}
    for name, speed in speeds.items():
        results.runs[name][DECODE].append(Run(_generation(speed), 0.0))
    results.memory_bytes = {"strata": 3 << 20, "llama.cpp server": 2 << 20, "llama.cpp in process": 1 << 20}
    found = speed_claims(results)
    assert found["decode_ratio"] == pytest.approx(1.5)
    assert found["decode_ratio_server"] == pytest.approx(3.0)
    assert found["decode_ratio_in_process"] == pytest.approx(1.5)
    assert found["first_token_ratio"] == pytest.approx(1.0)
    assert found["memory_ratio"] == pytest.approx(3.0)
    assert found["strata_decode_tokens_per_s"] == pytest.approx(30.0)


def test_disturbed_runs_do_not_count() -> None:
    """One busy thread of a neighbour's has made llama.cpp 20 times slower, and a ratio of 0.6 one of 12."""
    results = Results()
    results.runs["strata"][DECODE].append(Run(_generation(20.0), 0.0))
    theirs = results.runs["llama.cpp in process"][DECODE]
    theirs.append(Run(_generation(1.7), MAX_FOREIGN_CPUS + 0.9))
    assert speed_claims(results) == {}
    assert len(results.missing()) == 1
    theirs.append(Run(_generation(32.0), MAX_FOREIGN_CPUS))
    assert speed_claims(results)["decode_ratio"] == pytest.approx(20 / 32)
    assert results.missing() == []


def test_a_busy_neighbour_is_noticed() -> None:
    """And whoever is measured is no neighbour of its own."""
    # As if somebody else had used a CPU all the time: what is measured gave some back.
    fake = iter([0.0, -50.0])
    watch = CpuWatch(os.sched_getaffinity(0), lambda: next(fake))
    assert watch.foreign_cpus() > MAX_FOREIGN_CPUS
    fake = iter([0.0, 1e6])
    watch = CpuWatch(os.sched_getaffinity(0), lambda: next(fake))
    assert watch.foreign_cpus() == 0


def test_this_process_is_of_its_own_family() -> None:
    """CPU time that is not found would be taken for a neighbour's."""
    assert family(os.getpid())[0] == os.getpid()
    assert cpu_seconds([os.getpid()]) > 0
    assert cpu_seconds([]) == 0


def test_quality_is_relative_and_absolute() -> None:
    """Strata fails only where it is both further from exact than llama.cpp and noticeably far."""
    assert Quality(0.002, 0.0001, 1, 1).is_equal
    assert Quality(0.014, 0.01, 1, 1).is_equal
    assert not Quality(0.016, 0.01, 1, 1).is_equal
    exact = np.random.default_rng(0).standard_normal((4, 9), np.float32)
    quality = compare(exact, exact * np.float32(1.001), -exact)
    assert quality.strata == pytest.approx(0, abs=1e-5)
    assert quality.strata_top1 == 1
    assert quality.llama_cpp > 0.1
    with pytest.raises(AnswerError, match="Strata's logits"):
        compare(exact, exact * np.float32(np.nan), exact)


def test_agreeing_with_oneself_is_no_quality() -> None:
    """A setting for exact kernels that was accepted and did nothing once gave a divergence of 0."""
    exact = np.random.default_rng(0).standard_normal((4, 9), np.float32)
    with pytest.raises(NoReferenceError, match="bit for bit the same with --cpu-kernels portable"):
        compare(exact, exact.copy(), -exact)


def test_a_contender_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    """Otherwise a missing file looks like a hang, and a child survives the benchmark."""
    before = set(family(os.getpid()))
    llama = LlamaInProcess(tmp_path / "missing.gguf", os.sched_getaffinity(0), 64)
    with pytest.raises(AnswerError, match=r"llama\.cpp in process has ended; its last words:"):
        llama.start()
    llama.stop()
    assert not llama.is_running
    assert set(family(os.getpid())) <= before
    llama.stop()


def test_median() -> None:
    """Of an even number of values it lies between two."""
    assert median([1, 4, 2, 3]) == 2.5


_REFUSED = (
    (slices, ["--profile", "iq2_xs", "--layers", "0"], "--layers: '0' is no number above 0"),
    (slices, ["--profile", "iq2_xs", "--layers", "1"], "--layers: 1 is too few, 2 is the least"),
    (slices, ["--profile", "iq2_xs", "--experts", "9"], "--experts: 9 is too few, 10 is the least"),
    (step_profile, ["--profile", "iq2_xs", "--threads", "0"], "--threads: '0' is no number above 0"),
    (step_profile, ["--profile", "iq2_xs", "--tokens=-1"], "--tokens: '-1' is no number above 0"),
    (step_profile, ["--profile", "iq2_xs", "--layers", "1"], "--layers: 1 is too few"),
    (versus_llama_cpp, ["--profile", "iq2_xs", "--threads=-2"], "--threads: '-2' is no number above 0"),
    (versus_llama_cpp, ["--profile", "iq2_xs", "--json", "/none/r.json"], "there is no directory /none"),
    (cold_start, ["--rounds", "0"], "--rounds: '0' is no number above 0"),
    (cold_start, ["--profile", "none"], "name a --profile"),
    (low_memory, ["--share", "1.5"], "--share: '1.5' is no share above 0"),
    (low_memory, ["--read-iops", "0"], "--read-iops: '0' is no number above 0"),
    (expert_cache, ["--slots", "half"], "--slots: 'half' is neither a number of slots nor a percentage"),
    (expert_cache, ["--windows", "15"], "--windows: 15 is too few, 16 is the least"),
    (kv_formats, ["--profile", "none"], "name a --profile"),
    (kv_formats, ["--contexts", "8192,0"], "--contexts: '0' is no number above 0"),
    (generation, ["--only", "speculation,none"], "--only: 'none' is none of speculation, reuse, parallel"),
    (generation, ["--layers", "1"], "--layers: 1 is too few"),
    (kernels, ["--json", "/"], "--json: / is a directory"),
    (kernels, ["--cpu", "99"], "--cpu: '99' is none of this process's CPUs"),
    (kernels, ["--cpu=-1"], "--cpu: '-1' is none of this process's CPUs"),
)


@pytest.mark.parametrize(("program", "arguments", "message"), _REFUSED)
def test_what_makes_no_sense_is_refused_first(
    program: ModuleType,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a traceback after minutes of measuring, and against a slice that nothing can read."""
    if program is not kernels:
        arguments = [*arguments, "--slice-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_slices_are_told_apart_by_name() -> None:
    """One taken for the other would be measured as it."""
    small = replaced(REAL, num_experts=32, ngram_vocab_size_base=5_500_000)
    assert slice_path(Path("/s"), "iq2_xs", REAL).name == "iq2_xs-4-layers-v1.gguf"
    assert slice_path(Path("/s"), "iq2_xs", small).name == "iq2_xs-4-layers-32-experts-5500000-ngrams-v1.gguf"
    assert dict(tensors(small))["per_layer_token_embd.weight"][0] * 90 > 7 << 30
