"""A prediction block in a file of its own: with the model it is what one file would be, or it is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.cli import main
from shared.draft_model import open_model
from shared.errors import ModelFileError, UnsupportedModelError
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement.profile import model_identity
from shared.tensor_catalog import check_tensors
from tests.support.draft_models import split_draft
from tests.support.tiny_model import tiny_model

Change = Callable[[dict[str, object]], None]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Both in one file."""
    return tiny_model(has_prediction=True).write(tmp_path / "whole.gguf")


def set_to(key: str, value: object) -> Change:
    return lambda metadata: metadata.update({f"qwen4exp.{key}": value})


def without(key: str) -> Change:
    def drop(metadata: dict[str, object]) -> None:
        del metadata[f"qwen4exp.{key}"]

    return drop


def nothing(metadata: dict[str, object]) -> None:
    pass


@pytest.mark.parametrize("ratio", [0, 4])
def test_as_if_it_were_one_file(tmp_path: Path, ratio: int) -> None:
    """The same shape, tensors and bytes; the ratio is what the draft model says."""
    description = tiny_model(has_prediction=True)
    description.set("attention.compress_ratios", [0, 0, 0, 4, ratio])
    path = description.write(tmp_path / "whole.gguf")
    main_path, draft_path = split_draft(path, tmp_path)
    with GGUFModel(path) as one, open_model(main_path, draft_path) as two:
        config = read_model_config(two)
        assert config == read_model_config(one)
        assert config.compress_ratios == (0, 0, 0, 4, ratio)
        assert set(two) == set(one)
        check_tensors(two, config)
        for name in one:
            assert two.home(name).path == (draft_path if name.startswith("blk.4.") else main_path)
            assert np.array_equal(two.rows(name), one.rows(name))
        assert (two.path, two.name) == (main_path, "main")
        assert [part.path for part in two.parts] == [main_path, draft_path]


def test_layers_that_are_listed(tmp_path: Path) -> None:
    """The main file's list has no entry for the block."""
    description = tiny_model(has_prediction=True)
    kind, _ = description.metadata["qwen4exp.attention.compress_ratios"]
    description.metadata["qwen4exp.attention.recurrent_layers"] = (kind, [1, 1, 1, 0, 0])
    main_path, draft_path = split_draft(description.write(tmp_path / "whole.gguf"), tmp_path)
    with open_model(main_path, draft_path) as model:
        assert read_model_config(model).is_recurrent == (True, True, True, False, False)


def test_other_experts_with_another_draft_model(whole: Path, tmp_path: Path) -> None:
    """What is kept about a model is told apart by the draft model too."""
    main_path, draft_path = split_draft(whole, tmp_path)
    with open_model(main_path) as alone, open_model(main_path, draft_path) as both:
        assert not read_model_config(alone).num_prediction_layers
        identities = [model_identity(model, read_model_config(model)) for model in (alone, both)]
        assert identities[0].num_layers == identities[1].num_layers
        assert identities[0].fingerprint != identities[1].fingerprint


BAD: dict[str, tuple[Change, str]] = {
    "no block": (set_to("nextn_predict_layers", 0), "nextn_predict_layers is 0; a draft model has 1"),
    "too many blocks": (
        set_to("block_count", 6),
        r"block_count is 6; that of \S*main.gguf is 4, .* one more",
    ),
    "other width": (
        set_to("embedding_length", 128),
        r"embedding_length is 128; in \S*main.gguf it is 64; take",
    ),
    "other heads": (set_to("attention.head_count", 4), r"head_count is 4; in \S*main.gguf it is 2"),
    "other experts": (set_to("expert_count", 9), r"expert_count is 9; in \S*main.gguf it is 8"),
    "other streams": (set_to("hyper_connection.count", 4), r"connection.count is 4; in \S*main.gguf it is 2"),
    "other budget": (set_to("attention.indexer.top_k", 8), r"top_k is 8; in \S*main.gguf it is 16"),
    "other weights": (set_to("expert_weights_scale", 2.0), r"scale is 2.0; in \S*main.gguf it is 1.0"),
    "key missing": (without("rope.freq_base"), r"draft.gguf: the key qwen4exp.rope.freq_base is missing"),
    "other architecture": (
        lambda metadata: metadata.update({"general.architecture": "llama"}),
        "general.architecture is 'llama'; a draft model has 'qwen4exp'",
    ),
    "too few ratios": (
        set_to("attention.compress_ratios", np.array([4], np.int32)),
        r"compress_ratios is array\(\[4\].*; an array of 5 is needed",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_of_another_model(whole: Path, tmp_path: Path, change: Change, message: str) -> None:
    """Named with what differs, and both files."""
    main_path, draft_path = split_draft(whole, tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=rf"draft.gguf: .*{message.removeprefix('draft.gguf: ')}"):
        open_model(main_path, draft_path)


def test_tensor_that_is_missing(tmp_path: Path) -> None:
    """The draft model is named, not the model."""
    description = tiny_model(has_prediction=True)
    del description.tensors["blk.4.nextn.eh_proj.weight"]
    main_path, draft_path = split_draft(description.write(tmp_path / "whole.gguf"), tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"draft.gguf: the tensor blk.4.nextn.eh_proj.weight is mi"
    ):
        open_model(main_path, draft_path)


def test_other_vocabulary(whole: Path, tmp_path: Path) -> None:
    """An embedding of its own shows it."""
    main_path, _ = split_draft(whole, tmp_path)
    other = tiny_model(has_prediction=True)
    other.tensors["token_embd.weight"].shape = (300, 64)
    (tmp_path / "other").mkdir()
    _, draft_path = split_draft(other.write(tmp_path / "other.gguf"), tmp_path / "other")
    with pytest.raises(
        UnsupportedModelError, match=r"token_embd.weight has shape \(300, 64\), in .* \(271, 64\)"
    ):
        open_model(main_path, draft_path)


def test_a_model_that_has_a_block(whole: Path, tmp_path: Path) -> None:
    """Two are one too many."""
    _, draft_path = split_draft(whole, tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"whole.gguf: .*of its own; leave --draft-model \S*draft.gguf"
    ):
        open_model(whole, draft_path)


def test_no_file(whole: Path, tmp_path: Path) -> None:
    """As for the model itself."""
    main_path, _ = split_draft(whole, tmp_path)
    with pytest.raises(ModelFileError, match=r"gone\.gguf"):
        open_model(main_path, tmp_path / "gone.gguf")


def test_inspect(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both files are told, and the block."""
    main_path, draft_path = split_draft(whole, tmp_path)
    with pytest.raises(SystemExit) as ended:
        main.main(["inspect", str(main_path), "--draft-model", str(draft_path)])
    assert ended.value.code == 0
    report = capsys.readouterr().out
    assert str(main_path) in report
    assert str(draft_path) in report
    assert "1 attention; 1 prediction block(s)" in report
    assert re.search(r"prediction block +\d.*F32 x32", report)
