"""The model's shape from metadata: every way to write it, and refusal of what this version does not run."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.errors import UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig, read_model_config
from tests.support.tiny_model import TinyModel, tiny_model
from tools.gguf_writer import ValueType

INTEGER_TYPES = (
    ValueType.UINT8,
    ValueType.UINT16,
    ValueType.INT16,
    ValueType.UINT32,
    ValueType.INT32,
    ValueType.UINT64,
    ValueType.INT64,
)


def read(model: TinyModel, folder: Path) -> Qwen4ExpConfig:
    with GGUFModel(model.write(folder / "tiny.gguf")) as opened:
        return read_model_config(opened)


def test_everything_is_read(tmp_path: Path) -> None:
    """Two keys that are mixed up would make a model that runs and talks nonsense."""
    model = tiny_model()
    model.metadata["qwen4exp.expert_weights_scale"] = (ValueType.FLOAT32, 2.5)
    config = read(model, tmp_path)
    assert (config.num_layers, config.num_prediction_layers) == (4, 0)
    assert (config.context_length, config.vocab_size, config.hidden) == (512, 271, 64)
    assert (config.num_streams, config.stream_rank, config.stream_width) == (2, 16, 128)
    assert config.rms_epsilon == pytest.approx(1e-6)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (2, 1, 32)
    assert (config.rope_dim, config.rope_base) == (16, 10000)
    assert (config.indexer.num_heads, config.indexer.head_dim, config.indexer.token_budget) == (2, 32, 16)
    assert config.compress_ratios == (0, 0, 0, 4)
    assert config.is_recurrent == (True, True, True, False)
    assert (config.conv_kernel, config.delta_head_dim) == (4, 16)
    assert (config.num_delta_key_heads, config.num_delta_value_heads, config.delta_channels) == (2, 4, 128)
    assert (config.num_experts, config.num_experts_used, config.expert_weights_scale) == (8, 2, 2.5)
    ngram = config.ngram
    assert ngram is not None
    assert (ngram.layer, ngram.ngram_size, ngram.heads_per_ngram, ngram.conv_kernel) == (1, 3, 2, 4)
    assert ngram.eos_token_id == 268
    assert ngram.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (ngram.head_vocab_sizes, ngram.head_offsets) == ((101, 103, 107, 109), (0, 101, 204, 311))
    assert (ngram.row_width, ngram.num_heads, ngram.feature_width, ngram.history_length) == (32, 4, 128, 9)


@pytest.mark.parametrize("kind", INTEGER_TYPES)
def test_any_integer_width(kind: ValueType, tmp_path: Path) -> None:
    """Converters disagree about widths; every one of them means the same number."""
    model = tiny_model()
    for key in ("block_count", "attention.head_count"):
        model.metadata[f"qwen4exp.{key}"] = (kind, model.metadata[f"qwen4exp.{key}"][1])
    model.metadata["qwen4exp.attention.compress_ratios"] = (kind, [0, 0, 0, 4])
    config = read(model, tmp_path)
    assert (config.num_layers, config.num_query_heads, config.compress_ratios[3]) == (4, 2, 4)


@pytest.mark.parametrize("kind", [ValueType.UINT64, ValueType.INT64])
def test_multipliers_stay_exact(kind: ValueType, tmp_path: Path) -> None:
    """Hash multipliers beyond 2^53 lose their last bits in a float, and the hash finds wrong rows."""
    multipliers = [2**53 + 1, 2**54 - 1, 3]
    model = tiny_model()
    model.metadata["qwen4exp.ple.layer_multipliers"] = (kind, multipliers)
    ngram = read(model, tmp_path).ngram
    assert ngram is not None
    assert ngram.multipliers == tuple(multipliers)


def test_per_layer_arrays_of_one_value(tmp_path: Path) -> None:
    """Some converters write per-layer arrays where one number would do."""
    model = tiny_model()
    model.metadata["qwen4exp.attention.head_count"] = (ValueType.INT32, [2, 2, 2, 2])
    assert read(model, tmp_path).num_query_heads == 2
    model.metadata["qwen4exp.attention.head_count"] = (ValueType.INT32, [0, 0, 0, 2])
    with pytest.raises(UnsupportedModelError, match=r"head_count is array\(\[0, 0, 0, 2\].*an integer"):
        read(model, tmp_path)


@pytest.mark.parametrize("kind", [ValueType.BOOL, ValueType.UINT8])
def test_listed_recurrent_layers_win(kind: ValueType, tmp_path: Path) -> None:
    """Newer converters list the layers, and the interval may then be absent or wrong."""
    model = tiny_model()
    model.metadata["qwen4exp.attention.recurrent_layers"] = (kind, [False, True, True, True])
    model.drop("full_attention_interval")
    model.set("attention.compress_ratios", [4, 0, 0, 0])
    assert read(model, tmp_path).is_recurrent == (False, True, True, True)


@pytest.mark.parametrize("ratio", [0, 4])
def test_prediction_block(tmp_path: Path, ratio: int) -> None:
    """A file with the prediction block counts it among its blocks; the trunk is one shorter. The block
    attends, though the interval would have it a delta net."""
    model = tiny_model()
    model.set("block_count", 5)
    model.metadata["qwen4exp.nextn_predict_layers"] = (ValueType.UINT32, 1)
    model.set("attention.compress_ratios", [0, 0, 0, 4, ratio])
    config = read(model, tmp_path)
    assert (config.num_layers, config.num_prediction_layers, config.num_expert_layers) == (4, 1, 5)
    assert config.is_recurrent == (True, True, True, False, False)
    assert config.compress_ratios == (0, 0, 0, 4, ratio)
    trunk = config.without_prediction()
    assert (trunk.num_prediction_layers, trunk.num_expert_layers) == (0, 4)
    assert (trunk.is_recurrent, trunk.compress_ratios) == ((True, True, True, False), (0, 0, 0, 4))


def test_without_ngrams(tmp_path: Path) -> None:
    """Models without the table exist: no key, or an empty list of layers."""
    model = tiny_model()
    model.set("ple.layers", [])
    assert read(model, tmp_path).ngram is None
    model.drop_ngrams()
    assert read(model, tmp_path).ngram is None


def test_scale_of_zero_means_none(tmp_path: Path) -> None:
    """Converters write 0 where the model has no scale; taken literally it would silence every expert."""
    model = tiny_model()
    model.metadata["qwen4exp.expert_weights_scale"] = (ValueType.FLOAT32, 0.0)
    assert read(model, tmp_path).expert_weights_scale == 1.0


REQUIRED = [key.removeprefix("qwen4exp.") for key in tiny_model().metadata if key.startswith("qwen4exp.")]
OPTIONAL = ("attention.value_length", "ssm.inner_size", "ple.layers")
RARE = (
    "nextn_predict_layers",
    "attention.recurrent_layers",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "expert_gating_func",
    "expert_weights_scale",
)


@pytest.mark.parametrize("key", [key for key in REQUIRED if key not in OPTIONAL])
def test_missing_keys(key: str, tmp_path: Path) -> None:
    """A key that is not there is named; no default stands in for it."""
    model = tiny_model()
    model.drop(key)
    with pytest.raises(UnsupportedModelError, match=rf"tiny\.gguf: the key qwen4exp\.{key} is missing"):
        read(model, tmp_path)


@pytest.mark.parametrize("key", OPTIONAL)
def test_optional_keys(key: str, tmp_path: Path) -> None:
    """What follows from other keys need not be there."""
    model = tiny_model()
    model.drop(key)
    read(model, tmp_path)


def _set(key: str, value: object, kind: ValueType | None = None) -> Callable[[TinyModel], None]:
    def change(model: TinyModel) -> None:
        name = f"qwen4exp.{key}"
        model.metadata[name] = (kind if kind is not None else model.metadata[name][0], value)

    return change


def _other_architecture(model: TinyModel) -> None:
    model.metadata["general.architecture"] = (ValueType.STRING, "llama")


def _no_architecture(model: TinyModel) -> None:
    del model.metadata["general.architecture"]


def _no_embedding(model: TinyModel) -> None:
    del model.tensors["token_embd.weight"]


def _embedding_of_other_width(model: TinyModel) -> None:
    model.tensors["token_embd.weight"].shape = (271, 32)


def _more_tokens_than_rows(model: TinyModel) -> None:
    model.tensors["token_embd.weight"].shape = (200, 64)


# Times the largest token id, 270, this is just beyond 63 bits.
HUGE = 2**63 // 270 + 1
REFUSED: dict[str, tuple[Callable[[TinyModel], None], str]] = {
    "architecture": (_other_architecture, "general.architecture is 'llama'.*qwen4exp"),
    "no architecture": (_no_architecture, "general.architecture is None"),
    "text for a number": (_set("block_count", "4", ValueType.STRING), "block_count is '4'.*an integer"),
    "a flag for a number": (_set("block_count", True, ValueType.BOOL), "block_count is True.*an integer"),
    "a fraction": (_set("block_count", 4.0, ValueType.FLOAT32), "block_count is 4.0.*an integer"),
    "too few": (_set("expert_used_count", 0), "expert_used_count is 0.*at least 1"),
    "negative": (_set("embedding_length", -64, ValueType.INT32), "embedding_length is -64.*at least 1"),
    "more blocks than listed": (_set("block_count", 2**32 - 1), "compress_ratios is .*array of 4294967295"),
    "two prediction blocks": (
        _set("nextn_predict_layers", 2, ValueType.UINT32),
        "nextn_predict_layers is 2.*1",
    ),
    "a list too short": (_set("attention.compress_ratios", [4]), "compress_ratios is .*an array of 4"),
    "a list of fractions": (
        _set("attention.compress_ratios", [0.0] * 4, ValueType.FLOAT32),
        "compress_ratios is .*an array of integers",
    ),
    "negative ratio": (
        _set("attention.compress_ratios", [0, 0, 0, -4]),
        "compress_ratios is .*0 to the token",
    ),
    "ratio above budget": (
        _set("attention.compress_ratios", [0, 0, 0, 17]),
        "compress_ratios is .*budget, 16",
    ),
    "recurrent layers too few": (
        _set("attention.recurrent_layers", [True], ValueType.BOOL),
        "recurrent_layers is .*an array of 4 booleans",
    ),
    "values of other width": (_set("attention.value_length", 64), "value_length is 64.*the key length, 32"),
    "positions scaled otherwise": (
        _set("rope.scaling.type", "longrope", ValueType.STRING),
        "scaling.type is 'longrope'.*'none', 'linear', 'yarn'",
    ),
    "sigmoid router": (_set("expert_gating_func", 2, ValueType.UINT32), "gating_func is 2.*softmax"),
    "epsilon of zero": (_set("attention.layer_norm_rms_epsilon", 0.0), "rms_epsilon is 0.0.*above 0"),
    "epsilon not a number": (
        _set("attention.layer_norm_rms_epsilon", float("nan")),
        "epsilon is nan.*a number",
    ),
    "negative rotary base": (_set("rope.freq_base", -1.0), "freq_base is -1.0.*above 0"),
    "odd rotary width": (_set("rope.dimension_count", 15), "dimension_count is 15.*an even number"),
    "rotary wider than head": (_set("rope.dimension_count", 34), "dimension_count is 34.*key_length, 32"),
    "more used than experts": (_set("expert_used_count", 9), "expert_used_count is 9.*the 8 experts"),
    "uneven kv heads": (_set("attention.head_count_kv", 3), "head_count is 2.*a multiple of 3 kv heads"),
    "uneven value heads": (_set("ssm.time_step_rank", 3), "time_step_rank is 3.*the 2 key heads"),
    "other inner size": (_set("ssm.inner_size", 65), "inner_size is 65.*head size, 64"),
    "two n-gram layers": (_set("ple.layers", [0, 1]), r"ple.layers is .*\[0, 1\].*one n-gram layer"),
    "n-grams at attention": (_set("ple.layers", [3]), r"ple.layers is \[3\].*on a delta-net block"),
    "n-grams past the end": (_set("ple.layers", [4]), r"ple.layers is \[4\].*on a delta-net block"),
    "single tokens": (_set("ple.ngram_size", 1), "ngram_size is 1.*at least 2"),
    "multipliers too few": (_set("ple.layer_multipliers", [3, 5]), "layer_multipliers is .*an array of 3"),
    "multiplier too large": (
        _set("ple.layer_multipliers", [HUGE, 3, 5]),
        "layer_multipliers is .*below 2\\^63",
    ),
    "multiplier of zero": (
        _set("ple.layer_multipliers", [3, 0, 5]),
        "layer_multipliers is .*positive products",
    ),
    "empty head": (_set("ple.head_vocab_sizes", [101, 0, 107, 109]), "head_vocab_sizes is .*at least 1"),
    "negative offset": (
        _set("ple.head_offsets", [0, -1, 204, 311], ValueType.INT64),
        "head_offsets is .*at least 0",
    ),
    "end of text unknown": (_set("ple.eos_token_id", 271), "ple.eos_token_id is 271.*ids below 271"),
    "no embedding": (_no_embedding, "the tensor token_embd.weight is missing"),
    "narrow embedding": (_embedding_of_other_width, r"has shape \(271, 32\), expected \(vocabulary, 64\)"),
    "unknown tokens": (_more_tokens_than_rows, "lists 271 tokens, but token_embd.weight has only 200 rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, tmp_path: Path) -> None:
    """What this version does not run is refused at start with the file, the key, the value and what would
    do, instead of failing in the middle of a forward pass or computing something else."""
    change, message = REFUSED[case]
    model = tiny_model()
    change(model)
    with pytest.raises(UnsupportedModelError, match=rf"tiny\.gguf: .*{message}"):
        read(model, tmp_path)


def test_long_values_are_cut(tmp_path: Path) -> None:
    """A message does not print a vocabulary."""
    model = tiny_model()
    model.metadata["qwen4exp.block_count"] = (ValueType.STRING, "x" * 5000)
    with pytest.raises(UnsupportedModelError) as caught:
        read(model, tmp_path)
    assert len(str(caught.value)) < 300


WRONG_KINDS = (
    *("", "none", "qwen4exp", True, False, 0, -1, 1, 3, 2**31, 2**64 - 1, 0.5, float("nan"), float("inf")),
    *([], ["a"], np.array([]), np.array([], np.int32), np.array([1, 2]), np.array([3]), np.array([-1, -1])),
    *(np.array([0.5, 0.5]), np.array([True, False, True, False]), np.full(4, 2**64 - 1, np.uint64)),
)


@pytest.mark.parametrize("key", ["general.architecture", *(f"qwen4exp.{key}" for key in [*REQUIRED, *RARE])])
def test_values_of_any_kind(key: str, tmp_path: Path) -> None:
    """Whatever stands under a key, it is taken or refused in words; nothing is allocated by its size."""
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as opened:
        for value in WRONG_KINDS:
            opened.metadata[key] = value
            try:
                read_model_config(opened)
            except UnsupportedModelError as error:
                refusal = str(error)
            else:
                refusal = ""
            assert refusal == "" or refusal.startswith(str(opened.path))
