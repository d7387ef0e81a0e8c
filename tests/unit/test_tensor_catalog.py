"""The list of tensors: complete, and refusing files that have something else."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared import tensor_catalog
from shared.errors import UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.quants import SUPPORTED
from shared.quants.matrix import MAX_WIDTH
from shared.tensor_catalog import COMPUTABLE_TYPES, TensorClass, check_tensors, classify, expected_tensors
from tests.support.tiny_model import TinyModel, TinyTensor, tiny_model


def check(model: TinyModel, folder: Path) -> None:
    with GGUFModel(model.write(folder / "tiny.gguf")) as opened:
        check_tensors(opened, read_model_config(opened))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Qwen4ExpConfig:
    """The shape of the tiny model."""
    with GGUFModel(tiny_model().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as opened:
        return read_model_config(opened)


@pytest.mark.parametrize("has_prediction", [False, True])
def test_the_list_is_the_file(has_prediction: bool, tmp_path: Path) -> None:
    """Neither a tensor that nobody checks, nor one that no file has: the tiny file is written from the
    description of the format, the list is what the code expects."""
    model = tiny_model(has_prediction=has_prediction)
    with GGUFModel(model.write(tmp_path / "tiny.gguf")) as opened:
        expected = {
            tensor.name: tensor.shape for tensor in expected_tensors(read_model_config(opened), opened)
        }
    assert expected == {
        name: tensor.shape if name != "per_layer_token_embd.weight" else (424, 32)
        for name, tensor in model.tensors.items()
    }
    check(model, tmp_path)


def test_missing_tensors(tmp_path: Path) -> None:
    """A tensor that is not there is named before anything is loaded; only the head may be missing, since the
    embedding stands in for it."""
    not_needed = "blk.0.", "blk.2.", "token_embd"
    names = [name for name in tiny_model(has_prediction=True).tensors if not name.startswith(not_needed)]
    for name in names:
        model = tiny_model(has_prediction=True)
        del model.tensors[name]
        if name == "output.weight":
            check(model, tmp_path)
            continue
        with pytest.raises(UnsupportedModelError, match=rf"tiny\.gguf: the tensor {name} is missing"):
            check(model, tmp_path)


def _reshape(name: str, *shape: int) -> Callable[[TinyModel], None]:
    def change(model: TinyModel) -> None:
        model.tensors[name].shape = shape

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_reshape("output.weight", 271, 32), r"output.weight has shape \(271, 32\), .* asks for \(271, 64\)"),
        (_reshape("blk.3.attn_q.weight", 64, 64), r"attn_q.weight has shape \(64, 64\), .* for \(128, 64\)"),
        (_reshape("blk.0.hc_attn_norm.weight", 2, 32), r"norm.weight has shape \(2, 32\), .* for \(128,\)"),
        (_reshape("blk.2.ffn_up_exps.weight", 8, 16, 64), r"has shape \(8, 16, 64\), .* for \(8, 32, 64\)"),
        (_reshape("blk.2.ffn_down_exps.weight", 8, 64, 16), r"has shape \(8, 32, 64\), .* for \(8, 16, 64\)"),
        (_reshape("blk.2.ffn_up_shexp.weight", 32, 64), r"has shape \(32, 64\), .* for \(48, 64\)"),
        (_reshape("per_layer_token_embd.weight", 419, 32), r"has shape \(419, 32\), .* asks for \(420, 32\)"),
        (_reshape("blk.1.ple_key.weight", 128, 64), r"ple_key.weight has shape \(128, 64\), .* \(128, 128\)"),
    ],
)
def test_other_shapes(change: Callable[[TinyModel], None], message: str, tmp_path: Path) -> None:
    """A shape that the metadata does not ask for is refused with both; for the n-gram table, rows that a hash
    could reach and the file has not."""
    model = tiny_model()
    change(model)
    with pytest.raises(UnsupportedModelError, match=rf"tiny\.gguf: tensor .*{message} \(rows first\)"):
        check(model, tmp_path)


def test_norms_as_matrices(tmp_path: Path) -> None:
    """Some converters store the norm of all streams as [streams, hidden]; the bytes are the same."""
    model = tiny_model()
    for tensor in model.tensors.values():
        if tensor.shape == (128,):
            tensor.shape = (2, 64)
    model.tensors["blk.0.ffn_gate_inp_shexp.weight"].shape = (1, 64)
    check(model, tmp_path)


def test_types_without_kernels(tmp_path: Path) -> None:
    """A type that GGUF knows and Strata cannot compute with is refused at start, by file, tensor and type;
    the workers would otherwise fail one after the other while they load, and be restarted."""
    model = tiny_model()
    tensor = model.tensors["blk.3.ffn_up_exps.weight"]
    tensor.type_name, tensor.data = "I8", bytes(8 * 32 * 64)
    with pytest.raises(
        UnsupportedModelError,
        match=r"tiny\.gguf: tensor blk\.3\.ffn_up_exps\.weight has type I8, which .* it can with F32, .*Q8_0",
    ):
        check(model, tmp_path)


def test_prediction_block_that_is_not_used(tmp_path: Path) -> None:
    """It is not looked at; nor are an embedding and a head of its own in one that is."""
    model = tiny_model(has_prediction=True)
    for name in ("embed_tokens", "shared_head_head"):
        model.tensors[f"blk.4.nextn.{name}.weight"] = TinyTensor((1, 64))
    check(model, tmp_path)
    del model.tensors["blk.4.attn_q.weight"]
    with GGUFModel(model.write(tmp_path / "tiny.gguf")) as opened:
        config = read_model_config(opened, with_prediction=False)
        check_tensors(opened, config)
        assert not [tensor for tensor in expected_tensors(config, opened) if "blk.4." in tensor.name]


def test_types_with_kernels() -> None:
    """The list here is the list of `shared.quants`, which is too slow to import for it."""
    assert set(COMPUTABLE_TYPES) == set(SUPPORTED)
    assert tensor_catalog.MAX_WIDTH == MAX_WIDTH


def test_rows_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels have no room for a tile of them."""
    monkeypatch.setattr(tensor_catalog, "MAX_WIDTH", 63)
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: the rows of tensor \S+ have \d+ .*most 63"):
        check(tiny_model(), tmp_path)


def test_the_file_of_a_tensor_is_named(tmp_path: Path) -> None:
    """In a split set the message names the part that holds the tensor."""
    model = tiny_model()
    model.tensors["per_layer_token_embd.weight"].shape = (400, 32)
    parts = model.write_split(tmp_path / "tiny.gguf", lambda name: name.startswith("per_layer"))
    with (
        GGUFModel(parts[0]) as opened,
        pytest.raises(UnsupportedModelError, match=r"tiny-00002-of-00002\.gguf"),
    ):
        check_tensors(opened, read_model_config(opened))


@pytest.mark.parametrize(
    ("name", "tensor_class"),
    [
        ("token_embd.weight", TensorClass.EMBEDDING),
        ("output.weight", TensorClass.HEAD),
        ("per_layer_token_embd.weight", TensorClass.NGRAM_TABLE),
        ("output_hc_up.weight", TensorClass.HYPER_CONNECTION),
        ("output_hc_norm.weight", TensorClass.NORM),
        ("blk.1.ple_key.weight", TensorClass.NGRAM),
        ("blk.0.ffn_gate_up_exps.weight", TensorClass.EXPERTS_GATE_UP),
        ("blk.0.ffn_down_exps.weight", TensorClass.EXPERTS_DOWN),
        ("blk.0.ffn_gate_inp.weight", TensorClass.ROUTER),
        ("blk.0.ffn_gate_inp_shexp.weight", TensorClass.SHARED_EXPERT),
        ("blk.3.attn_output.weight", TensorClass.ATTENTION),
        ("blk.3.indexer.q_proj.weight", TensorClass.INDEXER),
        ("blk.0.attn_gate.weight", TensorClass.DELTA_NET),
        ("blk.4.attn_q.weight", TensorClass.PREDICTION),
        ("blk.4.nextn.enorm.weight", TensorClass.PREDICTION),
        ("something.else", TensorClass.NORM),
    ],
)
def test_classes(name: str, tensor_class: TensorClass, config: Qwen4ExpConfig) -> None:
    """The classes of the report, of names that contain each other too."""
    assert classify(name, config) is tensor_class


def test_classes_agree(tmp_path: Path) -> None:
    """A tensor is reported as what it is checked as."""
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as opened:
        config = read_model_config(opened)
        for expected in expected_tensors(config, opened):
            assert classify(expected.name, config) is expected.tensor_class, expected.name
