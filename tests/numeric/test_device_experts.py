"""Experts computed from slots of a device: against float64, and against what the cpu_worker makes of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cpu_worker.expert_layer import ExpertLayer
from gpu_worker.device import torch_slot_experts
from gpu_worker.device.cpu_slot_experts import CpuSlotExperts
from gpu_worker.device.expert_slots import DeviceExperts
from gpu_worker.device.torch_slot_experts import TorchSlotExperts
from shared.gguf.model import GGUFModel
from shared.gguf.types import tensor_type_named
from shared.native.team import Team
from shared.placement.sizes import PART_ALIGNMENT, SLOT_ALIGNMENT
from shared.quants import SUPPORTED, block_format, decode_rows
from shared.work_slots import PARTS
from tests.support.kernels import using_kernels
from tests.support.meta_memory import MetaMemory
from tests.support.quant_blocks import random_rows

# A thread that never returns from native code can only be ended with its process.
pytestmark = pytest.mark.timeout(method="thread")

Floats = NDArray[np.float32]

HIDDEN, WIDTH, NUM_EXPERTS = 512, 256, 12
MIXES = {
    "float": ("F32", "F32", "F32"),
    "plain": ("Q8_0", "Q8_0", "Q4_0"),
    "mixed": ("IQ2_XS", "Q4_K", "IQ4_NL"),
    "grids": ("IQ1_M", "IQ3_S", "Q2_0"),
}
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.cuda,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    ],
)


@dataclass
class Case:
    """A layer's experts: the model as far as it is asked for, and for each expert gate, up and down as they
    are stored and as they decode."""

    model: GGUFModel
    raw: list[list[NDArray[np.uint8]]]
    decoded: list[list[NDArray[np.float64]]]

    def slots(self, experts: DeviceExperts, device: str, numbers: Sequence[int]) -> list[Tensor]:
        """A slot with each expert. What lies between its parts, and before it, is noise."""
        num_bytes, slots = experts.slot_bytes(0), []
        for number in numbers:
            slot = np.random.default_rng(number).integers(0, 256, num_bytes, np.uint8)
            for at, part in zip(experts.part_offsets(0), self.raw[number], strict=True):
                slot[at : at + part.size] = part.reshape(-1)
            slots.append(torch.from_numpy(slot).to(device))
        return slots


def made(mix: str) -> Case:
    """Experts with rows of random blocks, whose scales keep values near 1."""
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    infos, tensors, raw, decoded = {}, {}, [[] for _ in range(NUM_EXPERTS)], [[] for _ in range(NUM_EXPERTS)]
    for part, type_name in zip(PARTS, MIXES[mix], strict=True):
        kind, name = tensor_type_named(type_name), f"blk.0.ffn_{part}_exps.weight"
        num_rows, width = shapes[part]
        if type_name == "F32":
            values = np.random.default_rng(7).normal(0, 0.1, (NUM_EXPERTS * num_rows, width))
            rows = values.astype(np.float32).view(np.uint8)
        else:
            rows = random_rows(type_name, NUM_EXPERTS * num_rows, width, seed=7)
        infos[name] = SimpleNamespace(type=kind, shape=(NUM_EXPERTS, num_rows, width))
        tensors[name] = rows.reshape(NUM_EXPERTS, num_rows, -1)
        for expert in range(NUM_EXPERTS):
            raw[expert].append(tensors[name][expert])
            values = decode_rows(block_format(kind.type_id), tensors[name][expert])
            decoded[expert].append(values.astype(np.float64))
    model = SimpleNamespace(rows=tensors.__getitem__, info=infos.__getitem__)
    return Case(cast("GGUFModel", model), raw, decoded)


@pytest.fixture(scope="module", params=MIXES)
def case(request: pytest.FixtureRequest) -> Case:
    """Experts of several formats."""
    return made(request.param)


@pytest.fixture(scope="module")
def floats() -> Case:
    """Experts of floats alone."""
    return made("float")


@pytest.fixture
def team() -> Iterator[Team]:
    """Two threads."""
    made = Team(2)
    yield made
    made.close()


@dataclass
class Work:
    """Arguments of `compute`: groups of the experts `numbers`, and activations."""

    numbers: list[int]
    starts: list[int]
    tokens: NDArray[np.int32]
    weights: Floats
    x: Floats

    def on(self, experts: DeviceExperts, case: Case, device: str = "cpu") -> Floats:
        """What a device adds to a sum of ones."""
        x = torch.from_numpy(self.x).to(device)
        out = torch.ones_like(x)
        tokens, weights = self.tokens.copy(), self.weights.copy()
        slots = case.slots(experts, device, self.numbers)
        experts.compute(0, slots, self.starts, tokens, weights, x, out)
        # They may change once the call is back.
        tokens[:], weights[:] = 0, np.nan
        return out.cpu().numpy() - 1

    def in_float64(self, case: Case) -> NDArray[np.float64]:
        """The rule, route by route."""
        out = np.zeros(self.x.shape)
        for group, number in enumerate(self.numbers):
            gate, up, down = case.decoded[number]
            for route in range(self.starts[group], self.starts[group + 1]):
                token = self.tokens[route]
                x = self.x[token].astype(np.float64)
                gated = gate @ x
                h = gated / (1 + np.exp(-gated)) * (up @ x)
                out[token] += self.weights[route] * (down @ h)
        return out


def work(sizes: dict[int, int], num_tokens: int, seed: int = 0) -> Work:
    """Groups of so many routes (by expert), with tokens drawn without repetition."""
    rng = np.random.default_rng(seed)
    tokens = [rng.permutation(num_tokens)[:size] for size in sizes.values()]
    starts = [0, *np.cumsum(list(sizes.values())).tolist()]
    return Work(
        list(sizes),
        starts,
        np.concatenate(tokens).astype(np.int32),
        rng.uniform(0.05, 1, starts[-1]).astype(np.float32),
        rng.normal(0, 0.3, (num_tokens, HIDDEN)).astype(np.float32),
    )


# One token as in decoding; some tokens; a group too large to be padded beside small and empty ones; more
# routes than one wave has, with groups in two and in three of them.
WORKS = {
    "one token": lambda: work(dict.fromkeys(range(10), 1), num_tokens=1),
    "window": lambda: work({0: 3, 2: 1, 3: 5, 7: 2, 11: 5}, num_tokens=5),
    "chunk": lambda: work({0: 40, 1: 0, 2: 33, 3: 32, 4: 1, 5: 0, 6: 0, 9: 60}, num_tokens=60),
    "waves": lambda: work({0: 300, 1: 700, 3: 0, 4: 500, 5: 1, 8: 36}, num_tokens=700),
    "nothing": lambda: work({4: 0}, num_tokens=3),
}


def assert_close(got: NDArray[np.generic], expected: NDArray[np.generic], limit: float) -> None:
    """Relative to the largest value; 1 was added to and taken from what was got."""
    assert np.abs(got - expected).max() <= limit * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_torch(case: Case, name: str, device: str) -> None:
    """Products are float32 ones of weights that are decoded exactly: 1e-5."""
    done = WORKS[name]()
    experts = TorchSlotExperts(case.model, 1, torch.device(device))
    assert_close(done.on(experts, case, device), done.in_float64(case), 1e-5)


@pytest.mark.parametrize("name", WORKS)
def test_torch_in_small_pieces(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two experts' matrices at a time, and hardly any padding."""
    monkeypatch.setattr(torch_slot_experts, "DECODED_BYTES", 2 * HIDDEN * WIDTH * 4)
    monkeypatch.setattr(torch_slot_experts, "_MOST_PADDED_ROUTES", 2)
    monkeypatch.setattr(torch_slot_experts, "_MOST_ROUTES", 37)
    done = WORKS[name]()
    experts = TorchSlotExperts(case.model, 1, torch.device("cpu"))
    assert_close(done.on(experts, case), done.in_float64(case), 1e-5)


@pytest.mark.parametrize("name", WORKS)
def test_cpu_against_float64(case: Case, team: Team, name: str) -> None:
    """By kernels that round no activations only the order of additions differs: 1e-5."""
    done = WORKS[name]()
    with using_kernels("portable"):
        got = done.on(CpuSlotExperts(case.model, 1, team), case)
    assert_close(got, done.in_float64(case), 1e-5)


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_cpu_against_the_cpu_worker(case: Case, team: Team, activations: str) -> None:
    """Whether an expert is in a slot or in RAM does not change an answer: activations are rounded alike, and
    now and then the other way where sums differ in their last bits (limits as in tests of the cpu_worker)."""
    rng = np.random.default_rng(5)
    x = rng.normal(0, 0.3, (30, HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((30, NUM_EXPERTS)), axis=1)[:, :4].astype(np.int32)
    weights = rng.random(ids.shape).astype(np.float32)
    order = np.argsort(ids.reshape(-1), kind="stable").astype(np.int32)
    starts = np.searchsorted(ids.reshape(-1)[order], range(NUM_EXPERTS + 1)).tolist()
    routes = Work(list(range(NUM_EXPERTS)), starts, order // 4, weights.reshape(-1)[order], x)
    with using_kernels("auto", activations):
        expected = np.empty_like(x)
        ExpertLayer(case.model, 0).compute(x, ids, weights, expected, team)
        got = routes.on(CpuSlotExperts(case.model, 1, team), case)
    assert_close(got, expected, {"int16": 2e-5, "int8": 5e-3}[activations])


@pytest.mark.parametrize("name", WORKS)
def test_nothing_is_read_back(case: Case, name: str) -> None:
    """On the device `meta` tensors have no values: an operation that needs some on the host, for which it
    would have to wait for the device, fails there; so does one with a tensor of the CPU."""
    experts = TorchSlotExperts(case.model, 1, torch.device("meta"))
    done = WORKS[name]()
    slots = case.slots(experts, "meta", done.numbers)
    x = torch.from_numpy(done.x).to("meta")
    experts.compute(0, slots, done.starts, done.tokens, done.weights, x, torch.empty_like(x))


def of_real_size(type_name: str) -> GGUFModel:
    """A layer of the real model's shape, as far as layouts are made from it."""
    hidden, width, infos = 2560, 640, {}
    for part, num_rows, num_columns in (
        ("gate", width, hidden),
        ("up", width, hidden),
        ("down", hidden, width),
    ):
        kind = tensor_type_named(type_name)
        if num_columns % kind.block_size:
            kind = tensor_type_named("IQ4_NL")
        infos[f"blk.0.ffn_{part}_exps.weight"] = SimpleNamespace(
            type=kind, shape=(512, num_rows, num_columns)
        )
    return cast("GGUFModel", SimpleNamespace(info=infos.__getitem__))


@pytest.mark.parametrize("type_name", SUPPORTED)
def test_memory_for_work(type_name: str) -> None:
    """What is set aside for it is enough, and not many times too much, for one token and for large chunks."""
    nowhere = torch.device("meta")
    experts = TorchSlotExperts(of_real_size(type_name), 1, nowhere)
    slot = torch.empty(experts.slot_bytes(0), dtype=torch.uint8, device=nowhere)
    for num_tokens, sizes in (
        (1, 10 * [1]),
        (32, 30 * [32]),
        (600, [32] * 40 + [600]),
        (8192, [8192, 31, 8192, 1, 300]),
    ):
        done = work(dict(enumerate(sizes)), num_tokens)
        x = torch.empty(num_tokens, 2560, device=nowhere)
        out = torch.empty_like(x)
        with MetaMemory() as memory:
            slots = [slot] * len(sizes)
            experts.compute(0, slots, done.starts, done.tokens, done.weights, x, out)
        limit = experts.work_bytes(num_tokens)
        assert limit / 3 <= memory.peak_bytes <= limit, (num_tokens, memory.peak_bytes / limit)


Make = Callable[[Case], DeviceExperts]
KINDS: dict[str, Make] = {
    "cpu": lambda case: CpuSlotExperts(case.model, 1, Team(1)),
    "torch": lambda case: TorchSlotExperts(case.model, 1, torch.device("cpu")),
}


@pytest.fixture(params=KINDS)
def experts(request: pytest.FixtureRequest, floats: Case) -> DeviceExperts:
    """Each way to compute them on the CPU."""
    return KINDS[request.param](floats)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", KINDS)
def test_layout(mix: str, kind: str) -> None:
    """Parts lie in order, apart, each from its border on; slots end on one."""
    case = made(mix)
    experts = KINDS[kind](case)
    offsets, sizes = experts.part_offsets(0), [part.size for part in case.raw[0]]
    assert offsets[0] == 0
    assert all(at % PART_ALIGNMENT == 0 for at in offsets)
    ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
    assert offsets[1] - ends[0] in range(PART_ALIGNMENT)
    assert offsets[2] - ends[1] in range(PART_ALIGNMENT)
    assert experts.slot_bytes(0) % SLOT_ALIGNMENT == 0
    assert experts.slot_bytes(0) - ends[2] in range(SLOT_ALIGNMENT)


def test_a_slot_with_another_expert(experts: DeviceExperts, floats: Case) -> None:
    """Nothing is remembered of what was in a slot before."""
    first, second = work({1: 4}, 4), work({8: 4}, 4)
    (slot,), (other,) = (floats.slots(experts, "cpu", done.numbers) for done in (first, second))
    for done, content in ((first, slot.clone()), (second, other), (first, slot.clone())):
        slot.copy_(content)
        out = torch.zeros(4, HIDDEN)
        experts.compute(0, [slot], done.starts, done.tokens, done.weights, torch.from_numpy(done.x), out)
        assert_close(out.numpy(), done.in_float64(floats), 1e-5)


def test_an_expert_that_comes_twice_for_a_token(experts: DeviceExperts, floats: Case) -> None:
    """Both routes count, in one group and in two."""
    done = work({1: 3, 1 + 1: 2}, 3)
    done.tokens[:] = [1, 1, 1, 2, 2]
    assert_close(done.on(experts, floats), done.in_float64(floats), 1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_stays_with_its_token(experts: DeviceExperts, floats: Case, bad: float) -> None:
    """Another request's token shares the group and the padding, and must not see it."""
    done = work({0: 6, 1: 2, 2: 1}, 6)
    clean = done.on(experts, floats)
    done.x[3, 5] = bad
    spoiled = done.on(experts, floats)
    others = [0, 1, 2, 4, 5]
    np.testing.assert_array_equal(spoiled[others], clean[others])
    assert not np.isfinite(spoiled[3]).all()


def test_repeatable(experts: DeviceExperts, floats: Case) -> None:
    """The same bits each time."""
    done = WORKS["chunk"]()
    assert done.on(experts, floats).tobytes() == done.on(experts, floats).tobytes()


def test_threads_and_sizes_do_not_change_a_bit(case: Case) -> None:
    """The same bits for any number of threads, and whatever a team's memory was used for before."""
    alone, teams = {}, [Team(1), Team(2), Team(5)]
    for team in teams:
        experts = CpuSlotExperts(case.model, 1, team)
        for name in ("window", "one token", "waves", "nothing", "one token", "chunk", "window"):
            got = WORKS[name]().on(experts, case).tobytes()
            assert alone.setdefault(name, got) == got
        team.close()


def test_arguments_that_do_not_fit(experts: DeviceExperts, floats: Case) -> None:
    """Compiled code and devices check no bounds, so these are refused before."""
    x = torch.zeros(4, HIDDEN)
    slots = floats.slots(experts, "cpu", [0, 1])
    starts, tokens, weights = [0, 1, 3], np.zeros(3, np.int32), np.zeros(3, np.float32)
    for arguments, message in (
        ((slots, starts, tokens, weights, x[:, :64], x), "width of 512"),
        ((slots, starts, tokens, weights, x, x[:2].clone()), "width of 512"),
        ((slots, [0, 3], tokens, weights, x, x), "for 3 routes"),
        ((slots, [0, 1, 2], tokens, weights, x, x), "for 3 routes"),
        ((slots, [0, 4, 3], tokens, weights, x, x), "not in order"),
        ((slots, starts, tokens + 4, weights, x, x), "4 to 4 of 4"),
        ((slots, starts, tokens - 1, weights, x, x), "-1 to -1 of 4"),
        ((slots, starts, tokens, weights[:2], x, x), "of 3 routes"),
        ((slots, starts, tokens, weights.astype(np.float64), x, x), "weights float64"),
        ((slots, starts, tokens, weights, x, x.double()), "float64"),
        ((slots, starts, tokens, weights, x, torch.zeros(HIDDEN, 4).T), "width of 512"),
        ((slots, starts, tokens.astype(np.int64), weights, x, x), "int64"),
        (([slots[0], slots[1][:-256]], starts, tokens, weights, x, x), "a slot of"),
    ):
        with pytest.raises(ValueError, match=message):
            experts.compute(0, *arguments)
