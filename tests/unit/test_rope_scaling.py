"""How positions are scaled: what files say of it, what flags make of that, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from shared.config import GpuWorkerConfig
from shared.errors import ConfigError, UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.rope_scaling import RopeScaling, ScalingType, with_settings
from tests.support.tiny_model import TinyModel, tiny_model
from tools.gguf_writer import ValueType

TRAINED = 512
"""Of the tiny model."""
NOT_SCALED = RopeScaling(ScalingType.NONE, TRAINED)
FOUR_TIMES = RopeScaling(ScalingType.YARN, TRAINED, 4.0)


def model_with(**keys: Any) -> TinyModel:
    """`rope.scaling.*` by name."""
    model = tiny_model()
    for key, value in keys.items():
        kind = {str: ValueType.STRING, int: ValueType.UINT32, float: ValueType.FLOAT32}[type(value)]
        model.metadata[f"qwen4exp.rope.scaling.{key}"] = (kind, value)
    return model


def read(model: TinyModel, folder: Path, **settings: Any) -> Qwen4ExpConfig:
    with GGUFModel(model.write(folder / "tiny.gguf")) as opened:
        return read_model_config(opened, GpuWorkerConfig(**settings) if settings else None)


@pytest.mark.parametrize(
    ("keys", "expected", "context"),
    [
        ({}, NOT_SCALED, 512),
        ({"type": "none"}, NOT_SCALED, 512),
        # Where the length was raised with the scaling, the original one is what is not scaled.
        ({"type": "none", "original_context_length": 128}, RopeScaling(ScalingType.NONE, 128), 128),
        ({"type": "yarn", "factor": 4.0}, FOUR_TIMES, 2048),
        ({"type": "yarn", "factor": 1.0}, RopeScaling(ScalingType.YARN, 512), 512),
        (
            {"type": "yarn", "factor": 2.5, "original_context_length": 128},
            RopeScaling(ScalingType.YARN, 128, 2.5),
            320,
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
            RopeScaling(ScalingType.YARN, 512, 4.0, 1.0, 16.0, 2.0),
            2048,
        ),
        # What llama.cpp writes for "not set", and what changes nothing.
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": -1.0, "attn_factor": 1.0}, FOUR_TIMES, 2048),
        (
            {"type": "yarn", "factor": 4.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0},
            FOUR_TIMES,
            2048,
        ),
        ({"type": "linear", "factor": 4.0}, RopeScaling(ScalingType.LINEAR, 128, 4.0), 512),
        (
            {"type": "linear", "factor": 4.0, "original_context_length": 512},
            RopeScaling(ScalingType.LINEAR, 512, 4.0),
            2048,
        ),
        ({"factor": 2.0}, RopeScaling(ScalingType.LINEAR, 256, 2.0), 512),
    ],
    ids=str,
)
def test_what_files_say(keys: dict[str, Any], expected: RopeScaling, context: int, tmp_path: Path) -> None:
    """The method, and the context that follows from it."""
    config = read(model_with(**keys), tmp_path)
    assert config.rope_scaling == expected
    assert config.context_length == context


def test_attention_factors(tmp_path: Path) -> None:
    """The recommended one, one that is multiplied with it, one that stands in for it, and none at all."""
    yarn = {"type": "yarn", "factor": 4.0}

    def factor(**keys: Any) -> float:
        return read(model_with(**keys), tmp_path).rope_scaling.attention_factor

    assert factor(**yarn) == pytest.approx(1.1386294)
    assert factor(**yarn, attn_factor=0.5) == pytest.approx(0.5693147)
    assert factor(**yarn, yarn_attn_factor=0.75) == pytest.approx(0.75)
    assert factor(type="yarn", factor=1.0) == 1
    assert factor(type="linear", factor=4.0) == factor() == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "longrope", "factor": 4.0}, "scaling.type is 'longrope'.*'none', 'linear', 'yarn'"),
        ({"type": "yarn"}, "scaling.factor is missing"),
        ({"type": "linear"}, "scaling.factor is missing"),
        ({"type": "yarn", "factor": 0.5}, "scaling.factor is 0.5.*from 1 on"),
        ({"type": "yarn", "factor": float("inf")}, "scaling.factor is inf.*a number"),
        ({"type": "yarn", "factor": "4"}, "scaling.factor is '4'.*a number"),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 0},
            "original_context_length is 0.*at least 1",
        ),
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5.*1 "),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1.*0 "),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_fast": 1.0}, "yarn_beta_fast is 1.0.*more than .*1"),
        ({"type": "yarn", "factor": 4.0, "yarn_beta_slow": 0.0}, "yarn_beta_slow is 0.0.*above 0"),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 0.0}, "attn_factor is 0.0.*above 0"),
        ({"type": "linear", "factor": 4.0, "attn_factor": 0.5}, "attn_factor is 0.5.*1, or .*'yarn'"),
        ({"type": "yarn", "factor": 4.0, "yarn_attn_factor": -1.0}, "yarn_attn_factor is -1.0.*above 0"),
    ],
    ids=str,
)
def test_files_that_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """With the key, its value, and what would do."""
    with pytest.raises(UnsupportedModelError, match=rf"tiny\.gguf: .*{message}"):
        read(model_with(**keys), tmp_path)


def test_a_base_that_does_not_turn(tmp_path: Path) -> None:
    """All pairs would turn alike, so none is fast or slow."""
    model = model_with(type="yarn", factor=4.0)
    model.set("rope.freq_base", 1.0)
    with pytest.raises(UnsupportedModelError, match=r"rope.freq_base is 1.0.*above 1"):
        read(model, tmp_path)


@pytest.mark.parametrize(
    ("written", "settings", "expected"),
    [
        (FOUR_TIMES, {}, FOUR_TIMES),
        (FOUR_TIMES, {"rope_scaling": "yarn"}, FOUR_TIMES),
        (FOUR_TIMES, {"rope_scaling": "none"}, NOT_SCALED),
        (FOUR_TIMES, {"rope_scale": 2.0}, RopeScaling(ScalingType.YARN, 512, 2.0)),
        (FOUR_TIMES, {"rope_scaling": "linear"}, RopeScaling(ScalingType.LINEAR, 512, 4.0)),
        (FOUR_TIMES, {"yarn_orig_ctx": 100}, RopeScaling(ScalingType.YARN, 100, 4.0)),
        (NOT_SCALED, {"rope_scaling": "yarn", "rope_scale": 4.0}, FOUR_TIMES),
        (
            NOT_SCALED,
            {"rope_scaling": "linear", "rope_scale": 3.0},
            RopeScaling(ScalingType.LINEAR, 512, 3.0),
        ),
        (
            RopeScaling(ScalingType.YARN, 512, 4.0, 0.5, 16.0, 2.0),
            {"yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0},
            FOUR_TIMES,
        ),
    ],
    ids=str,
)
def test_flags_win(written: RopeScaling, settings: dict[str, Any], expected: RopeScaling) -> None:
    """One by one; what they do not say is as written."""
    assert with_settings(written, GpuWorkerConfig(**settings)) == expected


def test_flags_and_metadata_give_the_same_model(tmp_path: Path) -> None:
    """A file that says it, and one that does not, with flags."""
    written = read(model_with(type="yarn", factor=4.0, yarn_beta_fast=16.0), tmp_path)
    flags = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_beta_fast": 16.0}
    assert read(tiny_model(), tmp_path, **flags) == written
    assert (
        read(model_with(type="linear", factor=9.0, original_context_length=512), tmp_path, **flags) == written
    )


@pytest.mark.parametrize(
    ("written", "settings", "message"),
    [
        (
            NOT_SCALED,
            {"rope_scale": 4.0},
            "--rope-scale is 4, .*'none', as the file says; add --rope-scaling yarn",
        ),
        (
            NOT_SCALED,
            {"rope_scaling": "none", "rope_scale": 4.0},
            "--rope-scale is 4, but --rope-scaling is 'none'; add",
        ),
        (NOT_SCALED, {"yarn_orig_ctx": 100}, "--yarn-orig-ctx is 100, .*add --rope-scaling yarn"),
        (NOT_SCALED, {"rope_scaling": "yarn"}, "neither --rope-scale nor the file.*add --rope-scale 2"),
        (
            NOT_SCALED,
            {"rope_scaling": "linear", "rope_scale": 2.0, "yarn_beta_fast": 8.0},
            "--yarn-beta-fast is 8, .*'linear'; add --rope-scaling yarn, or leave --yarn-beta-fast out",
        ),
        (FOUR_TIMES, {"yarn_beta_slow": 32.0}, "--yarn-beta-fast is 32 and --yarn-beta-slow 32; fast has"),
    ],
    ids=str,
)
def test_flags_that_are_refused(written: RopeScaling, settings: dict[str, Any], message: str) -> None:
    """Rather than to start with a context that is not what was meant."""
    with pytest.raises(ConfigError, match=message):
        with_settings(written, GpuWorkerConfig(**settings))


def test_longest_sequence(tmp_path: Path) -> None:
    """What is asked for, up to what scaled positions are good for; 0 is all of that."""
    config = read(tiny_model(), tmp_path, rope_scaling="yarn", rope_scale=4.0)
    assert [config.longest_sequence(asked) for asked in (0, 100, 2048, 2049)] == [2048, 100, 2048, 2048]
    assert read(tiny_model(), tmp_path).longest_sequence(2048) == 512


def test_positions_stay_exact() -> None:
    """Beyond 2^24 float32 no longer tells neighbours apart."""
    assert RopeScaling(ScalingType.YARN, 1 << 22, 1e30).context_length == 1 << 24


def test_shortfall() -> None:
    """Who asks for more than there is, learns what would give it; the default asks for nothing."""
    assert NOT_SCALED.shortfall(512) is NOT_SCALED.shortfall(0) is None
    assert NOT_SCALED.shortfall(GpuWorkerConfig().max_context) is None
    assert NOT_SCALED.shortfall(1025) == (
        "--max-context is 1025, but the model reaches 512 tokens (positions are not scaled); for more, add "
        "--rope-scaling yarn --rope-scale 3"
    )
    assert FOUR_TIMES.shortfall(2048) is None
    assert "(yarn, 4 times 512 tokens); for more, add --rope-scaling yarn --rope-scale 5" in str(
        FOUR_TIMES.shortfall(2049)
    )
