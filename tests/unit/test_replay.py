"""Replays of traces: shares that add up, loads that take their time, and what `strata simulate` prints."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.cli import main
from shared.demo_model import DEMO_MODEL_PATH, DEMO_TRACE_PATH
from shared.expert_blobs import BlobLayout
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement import profile
from shared.placement.hotness import Counts
from shared.placement.rates import ASSUMED_CPU, ASSUMED_LINK
from shared.placement.replay import Replay, Scenario
from shared.placement.trace import TraceHeader, TraceReader, TraceStep, TraceWriter
from tests.support.placement import ids_of
from tests.support.tiny_model import tiny_model

HEADER = TraceHeader("m", 1, 8, "abc", 2)
BLOB_BYTES = np.array([1000])


def replay_of(policy: str = "adaptive", slots: int = 2, **settings: float) -> Replay:
    scenario = Scenario(policy, slots, **{"pcie_frac": 0.0} | settings)
    return Replay(HEADER, scenario, BLOB_BYTES)


def window(*tokens: Sequence[int]) -> TraceStep:
    return TraceStep(ids_of(*tokens)[None], 0)


def prompt(*tokens: Sequence[int]) -> TraceStep:
    return TraceStep(ids_of(*tokens)[None], len(tokens))


def simulate(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["simulate", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def drawn(num_tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
    return np.argsort(rng.random((3, num_tokens, 16)), axis=2)[:, :, :4].astype(np.int32)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    with TraceWriter(tmp_path / "t.trace", TraceHeader("m", 3, 16, "abc", 4)) as writer:
        writer.append(drawn(40, rng), 40)
        for _ in range(40):
            writer.append(drawn(2, rng), 0)
    return tmp_path / "t.trace"


@pytest.mark.parametrize("load_windows", [0, 1, 2])
def test_a_swap_can_be_read_once_it_is_loaded(load_windows: int) -> None:
    """Experts 0 and 1 are there; 5 and 6 are wanted. The first round is after the first window."""
    replay = replay_of(adapt_every=1, load_windows=load_windows)
    for _ in range(5):
        replay.step(window([5, 6], [5, 6]))
    assert replay.hit_rate() == (4 - load_windows) / 5
    assert (replay.hit_rate(0, 0.2), replay.hit_rate(0.8, 1)) == (0, 1)
    assert (replay.num_swaps, replay.swap_bytes) == (2, 2000)


def test_a_static_table_stays() -> None:
    """And the CPU has what is missed, as no transfers are allowed."""
    replay = replay_of("static")
    for _ in range(50):
        replay.step(window([0, 7]))
    assert replay.num_swaps == 0
    assert replay.decode.shares == {"device": 0.5, "transferred": 0, "cpu": 0.5, "skipped": 0}
    assert replay.decode.transfer_bytes == 0


def test_prompts_are_counted_apart_and_move_nothing() -> None:
    """A hit rate of decoding that prompts were mixed into would be compared with nothing."""
    replay = replay_of(adapt_every=1, pcie_frac=1.0)
    for _ in range(3):
        replay.step(prompt([5, 6], [5, 6]))
    assert (replay.prefill.num_steps, replay.prefill.num_tokens, replay.num_swaps) == (3, 6, 0)
    assert replay.prefill.shares["transferred"] == 1
    assert replay.prefill.transfer_bytes == 3 * 2 * 1000
    replay.step(window([0, 1]))
    assert (replay.decode.num_steps, replay.decode.shares["device"], replay.num_swaps) == (1, 1, 2)


def test_a_step_with_a_prompt_is_no_window() -> None:
    """As in the engine, whatever else is decoded in it: no round follows, no rate is noted, and nothing is
    left out. It is streamed by its prompt, not by its size."""
    replay = replay_of(adapt_every=1, prefill_stream_min=3, route_tail_skip=1, pcie_frac=0.0)
    for _ in range(3):
        replay.step(TraceStep(ids_of([5, 6], [7, 6], [5, 7], [5, 6])[None], 2))
    assert (replay.decode.num_steps, replay.num_swaps) == (0, 0)
    assert replay.prefill.shares == {"device": 0, "transferred": 0, "cpu": 1, "skipped": 0}
    replay.step(window(*[[6, 5]] * 10))
    assert replay.decode.shares == {"device": 0, "transferred": 0, "cpu": 0.5, "skipped": 0.5}
    assert replay.num_swaps == 2


def test_large_prompts_are_streamed() -> None:
    """All that is not resident is transferred, wanted or not."""
    replay = replay_of("static", prefill_stream_min=2)
    replay.step(prompt([0, 6], [6, 1], [-1, 6]))
    assert replay.prefill.shares == {"device": 0.4, "transferred": 0.6, "cpu": 0, "skipped": 0}
    assert replay.prefill.transfer_bytes == 6 * 1000


def test_the_share_follows_the_rates() -> None:
    """Those of a case that was logged: 13.1 and 45.4 GB/s are 0.15, after 48 windows."""
    replay = Replay(HEADER, Scenario("static", 2, link_gb_s=13.1, cpu_gb_s=45.4), BLOB_BYTES)
    for number in range(48):
        assert replay.link_share.share == pytest.approx(0.55 * 13.1 / 20), number
        replay.step(window([2, 3], [4, 5], [6, 7]))
    assert replay.link_share.share == 0.15


def test_simulate_prints_a_row_for_each_scenario(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And for prompts another one."""
    flags = ("--policy", "static,adaptive,lru", "--slots", "25%,48")
    assert simulate(str(trace), *flags) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first == "m: 3 layers of 16 experts"
    assert header.split()[:4] == ["policy", "slots", "routes", "steps"]
    names = [row.split()[:5] for row in rows]
    assert names == [
        [policy, slots, *what]
        for slots in ("12", "48")
        for policy in ("static", "adaptive", "lru")
        for what in (["decode", "40", "80"], ["prefill", "1", "40"])
    ]
    assert all(row.split()[5] == "100.00" for row in rows if row.split()[1] == "48")


def test_simulate_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every route went some way."""
    flags = ("--slots", "16", "--route-tail-skip", "2", "--pcie-frac", "0.5", "--blob-mib", "1", "--json")
    assert simulate(str(trace), *flags) == 0
    shown = json.loads(capsys.readouterr().out)
    (scenario,) = shown["scenarios"]
    assert (shown["model"], shown["num_pairs"]) == ("m", 48)
    assert scenario["decode"]["num_routes"] == 3 * 80 * 4
    for part in ("decode", "prefill"):
        assert sum(scenario[part]["shares"].values()) == pytest.approx(1)
        assert scenario[part]["transfer_bytes"] % 2**20 == 0
    assert min(scenario["decode"]["shares"].values()) > 0
    assert scenario["hit_rate"] == pytest.approx(scenario["decode"]["shares"]["device"])
    assert scenario["pcie_frac"] == 0.5


def test_simulate_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that is shipped: whoever tries the command sees what exchanges are good for. Its topics are
    different enough that what is used by one is not all that another needs."""
    assert simulate("--policy", "static,adaptive,lru", "--slots", "50%,100%", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    for scenario in shown["scenarios"]:
        assert (scenario["decode"]["num_steps"], scenario["prefill"]["num_steps"]) == (1610, 133)
        assert sum(scenario["decode"]["shares"].values()) == pytest.approx(1)
    half, whole = shown["scenarios"][:3], shown["scenarios"][3:]
    assert [scenario["hit_rate"] for scenario in whole] == [1, 1, 1]
    static, adaptive, lru = (scenario["hit_rate"] for scenario in half)
    assert 0.4 < static < 0.55
    assert static + 0.1 < lru < adaptive < 0.9


def test_exchanges_are_worth_more_than_what_stays() -> None:
    """On the shipped trace: than a profile of the first topic, and even than the best choice in hindsight. 48
    windows after the topic has changed, the hit rate is what it is later on."""
    with TraceReader(DEMO_TRACE_PATH) as reader:
        header, steps = reader.header, list(reader)
    windows = [step.expert_ids for step in steps if not step.num_prefill_tokens]
    shape = header.num_layers, header.num_experts

    def used(expert_ids: Sequence[NDArray[np.int32]]) -> Counts:
        counts = np.zeros(shape, np.float32)
        for layers in expert_ids:
            for layer, chosen in enumerate(layers):
                counts[layer] += np.bincount(chosen.ravel(), minlength=header.num_experts)
        return counts

    def replayed(policy: str, counts: Counts) -> Replay:
        replay = Replay(header, Scenario(policy, 128), np.full(header.num_layers, 1000), counts)
        for step in steps:
            replay.step(step)
        return replay

    # Where topics begin, as the model's card says.
    starts, count = (404, 805, 1209), len(windows)
    first = used(windows[: starts[0]])
    adaptive, static = replayed("adaptive", first), replayed("static", first)
    assert adaptive.hit_rate() > static.hit_rate() + 0.1
    assert adaptive.hit_rate() > replayed("static", used(windows)).hit_rate() + 0.03
    for start, stop in zip(starts, (*starts[1:], count), strict=True):
        change, recovered, later = (
            adaptive.hit_rate(begin / count, end / count)
            for begin, end in ((start, start + 8), (start + 48, start + 112), (start + 112, stop))
        )
        assert change < recovered - 0.1
        assert recovered > later - 0.04


def test_simulate_other_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of the adaptive policy are to be tried before they are changed."""
    rates, swaps = [], []
    for flags in ((), ("--adapt-decay", "0.95"), ("--adapt-every", "16"), ("--adapt-swaps", "0")):
        assert simulate("--json", *flags) == 0
        (scenario,) = json.loads(capsys.readouterr().out)["scenarios"]
        rates.append(scenario["hit_rate"])
        swaps.append(scenario["num_swaps"])
    assert len(set(rates)) == 4
    assert swaps[0] > swaps[1] > swaps[3] == 0
    assert swaps[0] > swaps[2] > 0


def test_the_shipped_trace_is_of_the_shipped_model() -> None:
    """After a new model it has to be recorded anew: `python -m tools.demo_model.record_trace`."""
    with GGUFModel(DEMO_MODEL_PATH) as model, TraceReader(DEMO_TRACE_PATH) as reader:
        config = read_model_config(model)
        identity = profile.model_identity(model, config)
        assert reader.header == TraceHeader.of(identity, config.num_experts_used)
    assert DEMO_TRACE_PATH.stat().st_size <= 300_000


def test_simulate_from_a_profile(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is hottest in it is there from the start; one of another model is refused."""
    rng = np.random.default_rng(0)
    counts = np.zeros((3, 16), np.float32)
    for step in [drawn(40, rng), *(drawn(2, rng) for _ in range(40))]:
        for layer in range(3):
            counts[layer] += np.bincount(step[layer].ravel(), minlength=16)
    profile.save(tmp_path / "p", counts, profile.ModelIdentity("m", 3, 16, "abc"))
    flags = (str(trace), "--policy", "static", "--slots", "12", "--json")
    rates = []
    for more in ((), ("--profile", str(tmp_path / "p"))):
        assert simulate(*flags, *more) == 0
        rates.append(json.loads(capsys.readouterr().out)["scenarios"][0]["hit_rate"])
    assert rates[1] > rates[0]
    profile.save(tmp_path / "p", counts, profile.ModelIdentity("m", 3, 16, "xyz"))
    assert simulate(*flags, "--profile", str(tmp_path / "p")) == 2
    assert "its fingerprint is 'xyz', here it is 'abc'" in capsys.readouterr().err


def test_simulate_with_the_sizes_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the one that was traced, and of no other."""
    path = tiny_model().write(tmp_path / "tiny.gguf")
    with GGUFModel(path) as model:
        config = read_model_config(model)
        identity = profile.model_identity(model, config)
        layer_bytes = [
            sum(part.num_bytes for part in layer.parts)
            for layer in BlobLayout(model, config.num_layers).layers
        ]
    header = TraceHeader.of(identity, config.num_experts_used)
    with TraceWriter(tmp_path / "t", header) as writer:
        ids = np.zeros((config.num_layers, 1, config.num_experts_used), np.int32)
        ids[:] = np.arange(config.num_experts_used)
        writer.append(ids, 0)
    flags = ("--slots", "0", "--pcie-frac", "1", "--json", "--model", str(path))
    assert simulate(str(tmp_path / "t"), *flags) == 0
    (scenario,) = json.loads(capsys.readouterr().out)["scenarios"]
    assert scenario["decode"]["transfer_bytes"] == config.num_experts_used * sum(layer_bytes)
    with TraceWriter(tmp_path / "t", HEADER):
        pass
    assert simulate(str(tmp_path / "t"), *flags) == 2
    assert "the trace is of m (abc); name the model that was traced" in capsys.readouterr().err


def test_a_damaged_trace_is_told(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a traceback, and no table of half of it."""
    trace.write_bytes(trace.read_bytes()[:-1])
    assert simulate(str(trace)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "the 40 steps before it can be had by cutting the file" in shown.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "best"), "'best' is no policy; there are adaptive, lru, static"),
        (("--slots", "half"), "'half' is neither a number of slots nor a percentage"),
        (("--slots", "120%"), "slots are 0 or more, and at most 100 %"),
        (("--slots", "nan%"), "slots are 0 or more, and at most 100 %"),
        (("--pcie-frac", "2"), "'2' is no share from 0 to 1"),
        (("--blob-mib", "0"), "'0' is no number above 0"),
        (("--adapt-every", "0"), "'0' is no number above 0"),
        (("--adapt-decay", "1.5"), "'1.5' is no share from 0 to 1"),
        (("--route-tail-skip", "-1"), "'-1' is no number of 0 or more"),
        (("--model", "m.gguf", "--blob-mib", "1"), "not allowed with argument"),
    ],
)
def test_mistakes(
    trace: Path, flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the flag and what it can be."""
    assert simulate(str(trace), *flags) == 2
    assert message in capsys.readouterr().err


def test_a_tail_skip_that_skips_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token uses four experts: none ranks fifth."""
    assert simulate(str(trace), "--route-tail-skip", "4") == 2
    assert "--route-tail-skip is 4, but a token of m uses 4 experts" in capsys.readouterr().err
    assert simulate(str(trace), "--route-tail-skip", "3") == 0
    assert capsys.readouterr().err.endswith("100 %  replaying t.trace\n")


def test_rates_are_those_of_plans() -> None:
    """Assumed once for both."""
    assert (Scenario("static", 1).link_gb_s, Scenario("static", 1).cpu_gb_s) == (
        ASSUMED_LINK / 1e9,
        ASSUMED_CPU / 1e9,
    )
