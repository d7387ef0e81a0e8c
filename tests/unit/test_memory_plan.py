"""What fits: slots, the complement, work space; held against the sizes that the original engine logged."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from gpu_worker.device.torch_device import TorchDevice
from gpu_worker.model.qwen4exp import Qwen4Exp
from gpu_worker.state.pages import PagePool
from gpu_worker.state.sequence_state import SequenceState
from shared.gguf.model import GGUFModel
from shared.kv_format import KV_FORMATS, KvFormat
from shared.memory_budget import Memory, Needs
from shared.model_config import read_model_config
from shared.placement.memory_plan import (
    Placement,
    device_needs,
    expert_ram_bytes,
    headroom_bytes,
    slots_in,
    slots_of,
    work_space,
)
from shared.placement.sizes import (
    ExpertSizes,
    active_weights,
    context_bytes,
    dense_device_bytes,
    dense_file_bytes,
    expert_sizes,
    prediction_expert_bytes,
    state_bytes,
    widest_matrix_bytes,
)
from tests.support.real_sizes import GIB, LOGGED_SLOTS, MIB, REAL_CONFIG, logged_placement
from tests.support.tiny_model import NUM_EXPERTS, NUM_LAYERS, tiny_model

LOGGED_BORROW = {256: 0.26, 1024: 0.72, 2048: 1.15, 4096: 2.03, 8192: 3.77, 18432: 8.14, 32768: 14.25}
LOGGED_COMPLEMENT = {
    256: 15.28,
    1024: 15.74,
    2048: 16.17,
    4096: 17.05,
    8192: 18.79,
    18432: 23.16,
    32768: 29.26,
}
SMALL = ExpertSizes((256, 512, 1024), num_experts=4, num_used=2)


@pytest.mark.parametrize(("chunk", "logged"), LOGGED_BORROW.items())
def test_work_space_is_what_the_original_lends(chunk: int, logged: float) -> None:
    """Seven logged sizes, from 256 to 32768 tokens."""
    placement = logged_placement()
    assert placement.work_space.num_bytes(chunk) / GIB == pytest.approx(logged, abs=0.02)
    # A part of a slot cannot be lent.
    more = placement.lent_bytes(chunk) - placement.work_space.num_bytes(chunk)
    assert 0 <= more <= placement.sizes.mean_slot_bytes


@pytest.mark.parametrize(("chunk", "logged"), LOGGED_COMPLEMENT.items())
def test_complement_is_what_the_original_keeps_in_ram(chunk: int, logged: float) -> None:
    """(experts - slots + lent slots) x blob, for seven logged configurations."""
    placement = logged_placement()
    assert placement.num_slots == LOGGED_SLOTS
    assert placement.complement_bytes() / GIB == pytest.approx(15.02, abs=0.001)
    assert placement.complement_bytes(chunk) / GIB == pytest.approx(logged, abs=0.01)


def test_work_space_of_other_models() -> None:
    """It scales with the width of the residual streams; the ring, for chunks that stream, with the blob."""
    sizes = ExpertSizes((4096,) * 48, num_experts=512, num_used=10)
    real = work_space(REAL_CONFIG, sizes, 512)
    half = work_space(replace(REAL_CONFIG, hidden=1280), sizes, 512)
    assert half.num_bytes(511) == pytest.approx(real.num_bytes(511) / 2, abs=1)
    assert real.num_bytes(512) - real.num_bytes(511) == pytest.approx(96 * 4096 + 0.4365 * MIB, abs=1)
    # A layer of few experts needs no larger ring.
    few = work_space(REAL_CONFIG, replace(sizes, num_experts=8), 512)
    assert few.ring_bytes == 8 * 4096


def test_more_is_lent_than_there_is() -> None:
    """The complement is all experts then, and not more; the number of slots tells."""
    placement = logged_placement(num_slots=100)
    assert placement.lent_slots(8192) > 100
    assert placement.complement_bytes(8192) == placement.sizes.num_bytes
    nothing = logged_placement(num_slots=0)
    assert (nothing.num_slots, nothing.coverage, nothing.cache_bytes) == (0, 0, 0)
    assert nothing.complement_bytes(256) == nothing.sizes.num_bytes


def test_slots_that_fit() -> None:
    """All layers alike, what is left to the first whose slots fit; or in the order of a profile."""
    assert slots_in(SMALL, 2 * 1792) == (2, 2, 2)
    assert slots_in(SMALL, 2 * 1792 + 800) == (3, 3, 2)
    assert slots_in(SMALL, 2 * 1792 + 1100) == (3, 3, 2)
    assert slots_in(SMALL, 1 << 30) == (4, 4, 4)
    assert slots_in(SMALL, 255) == slots_in(SMALL, -5) == (0, 0, 0)
    assert slots_in(SMALL, 2000, order=[2, 1, 0, 0]) == (1, 1, 1)
    # What does not fit is not passed over for what is wanted less.
    assert slots_in(SMALL, 2000, order=[2, 2, 1, 0, 0]) == (0, 0, 1)


def test_slots_that_are_asked_for() -> None:
    """Shared out evenly, and not more than there are experts."""
    assert slots_of(SMALL, 5) == (2, 2, 1)
    assert slots_of(SMALL, 100) == (4, 4, 4)
    assert slots_of(SMALL, 0) == (0, 0, 0)
    placement = Placement(SMALL, slots_of(SMALL, 5), work_space(REAL_CONFIG, SMALL, 1024))
    assert placement.cache_bytes == 2 * 256 + 2 * 512 + 1024
    assert placement.coverage == 5 / 12


def test_slots_hold_blobs(tmp_path: Path) -> None:
    """Rounded up to what a slot is a multiple of; an odd part is rounded first."""
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
        sizes = expert_sizes(model, config)
        file_bytes = sum(model.info(name).num_bytes for name in model if "_exps." in name)
    assert (sizes.num_layers, sizes.num_experts, sizes.num_pairs) == (NUM_LAYERS, NUM_EXPERTS, 32)
    assert all(num_bytes % 256 == 0 for num_bytes in sizes.slot_bytes)
    assert file_bytes <= sizes.num_bytes < file_bytes + 32 * 512


def test_experts_of_the_prediction_block(tmp_path: Path) -> None:
    """They get no slots; RAM has them, unless the block is not used."""
    with GGUFModel(tiny_model(has_prediction=True).write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
        assert expert_sizes(model, config).num_layers == NUM_LAYERS
        assert prediction_expert_bytes(model, config) == 3 * NUM_EXPERTS * 64 * 32 * 4
        trunk = config.without_prediction()
        assert expert_sizes(model, trunk) == expert_sizes(model, config)
        assert prediction_expert_bytes(model, trunk) == 0
        assert dense_file_bytes(model, trunk) < dense_file_bytes(model, config)
        with_block, without = (Needs(0, 0, 0, 0, prediction=size) for size in (GIB, 0))
    memory = Memory(total=32 * GIB, available=30 * GIB)
    for budget_gib in (0.0, 8.0):
        assert expert_ram_bytes(memory, without, budget_gib) - GIB == expert_ram_bytes(
            memory, with_block, budget_gib
        )


@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=KV_FORMATS)
def test_states_are_as_large_as_sequences_make_them(tmp_path: Path, kv_format: KvFormat) -> None:
    """What the plan counts is what a sequence holds after so many tokens, on any device."""
    with GGUFModel(tiny_model(has_prediction=True).write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
    pool = PagePool(config, torch.device("cpu"), kv_format)
    state = SequenceState(config, pool)
    fixed = sum(
        getattr(delta, field.name).nbytes for delta in state.delta.values() for field in fields(delta)
    )
    fixed += sum(attention.raw_keys.nbytes for attention in state.attention.values())
    assert state.ngram_inputs is not None
    fixed += state.ngram_inputs.nbytes
    state.reserve(1024)
    growing = sum(
        rows.nbytes for store in pool.stores.values() for rows in (store.keys, store.values, store.block_keys)
    )
    assert context_bytes(config, 1024, kv_format) == growing == pool.num_bytes
    assert state_bytes(config) == fixed


def test_dense_weights_are_as_large_as_the_device_makes_them(tmp_path: Path) -> None:
    """Quantised matrices as float16, the rest as they are, whatever is loaded for the layers and the head."""
    source = tiny_model(has_prediction=True)
    source.tensors["output.weight"].type_name = "Q8_0"
    source.tensors["output.weight"].data = bytes(source.tensors["output.weight"].shape[0] * 2 * 34)
    loaded: dict[int, int] = {}
    with GGUFModel(source.write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
        device = TorchDevice(model, torch.device("cpu"))
        tensor = device.tensor

        def counted(name: str) -> torch.Tensor:
            made = tensor(name)
            loaded[made.data_ptr()] = made.nbytes
            kept.append(made)
            return made

        kept: list[torch.Tensor] = []
        device.tensor = counted  # type: ignore[method-assign]
        Qwen4Exp(device, config, has_own_head=True, report=lambda activity, progress: None)
        loaded |= {weight.data_ptr(): weight.nbytes for weight in device._uploaded.values()}
        assert dense_device_bytes(model, config) == sum(loaded.values())
        assert dense_file_bytes(model, config) < dense_device_bytes(model, config)
        widest = max(weight.numel() for name, weight in device._uploaded.items() if "token" not in name)
        assert widest_matrix_bytes(model, config) == 4 * widest
        assert active_weights(model, config) < dense_device_bytes(model, config)


def test_real_states() -> None:
    """50,688 bytes of each position, fewer where less is kept of them; 113 MB of delta nets, 16.2 MB of their
    inputs, 14.2 MB of their tokens that are pending."""
    for kv_type, of_head in (("f32", 2048), ("f16", 1024), ("int8", 2 * 264), ("k8v4", 264 + 144)):
        num_bytes = context_bytes(REAL_CONFIG, 32768, KV_FORMATS[kv_type])
        assert num_bytes == 32768 * 12 * (2 * of_head + 128)
    assert 144e6 < state_bytes(REAL_CONFIG) < 145e6


def test_what_the_device_needs_beside_experts() -> None:
    """The context once, however many requests run; a part of it where it may grow; states of all of them."""
    dense, widest, reserve = 5 * GIB, 3 * GIB, 700 * MIB
    int8 = KV_FORMATS["int8"]

    def needs(max_context: int, parallel: int, *, kv_grow: bool) -> tuple[int, int, int]:
        found = device_needs(
            REAL_CONFIG,
            dense=dense,
            widest_matrix=widest,
            max_context=max_context,
            parallel=parallel,
            kv_grow=kv_grow,
            kv_format=int8,
            reserve=reserve,
        )
        assert found.total == dense + reserve + found.context + found.states + found.buffers
        return found.context, found.states, found.buffers

    state, buffers = state_bytes(REAL_CONFIG), (256 + 96) * MIB
    assert needs(32768, 1, kv_grow=False) == (context_bytes(REAL_CONFIG, 32768, int8), state, buffers)
    assert needs(32768, 4, kv_grow=True) == (context_bytes(REAL_CONFIG, 16384, int8), 4 * state, buffers)
    assert needs(8192, 4, kv_grow=True) == (context_bytes(REAL_CONFIG, 8192, int8), 4 * state, buffers)


def test_ram_for_experts() -> None:
    """Beside what else is needed and the headroom; a budget overrules both, but not the floor."""
    memory, needs = Memory(total=32 * GIB, available=30 * GIB), Needs(GIB, GIB, GIB, GIB)
    assert expert_ram_bytes(memory, needs) == (30 - 4 - 4) * GIB
    assert expert_ram_bytes(memory, replace(needs, dense=40 * GIB)) == 0
    assert expert_ram_bytes(memory, needs, 25.0) == 25 * GIB
    assert expert_ram_bytes(memory, needs, 29.0) == 28 * GIB


@pytest.mark.parametrize(("total", "free"), [(62.8, 4), (32, 4), (8, 1), (128, 8), (0.5, 0.125)])
def test_headroom(total: float, free: float) -> None:
    """4 GiB; less on small machines, more where loading keeps more free."""
    memory = Memory(total=int(total * GIB), available=int(total * GIB))
    assert headroom_bytes(memory) == free * GIB
