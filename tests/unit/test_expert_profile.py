"""The learned profile: saved, refused where it is another model's, and what is loaded first by it."""

import os
from pathlib import Path

import msgpack
import numpy as np
import pytest

from gpu_worker.experts.profile_store import ProfileStore
from shared.errors import ConfigError
from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config
from shared.placement.profile import ModelIdentity, assign_slots, fill_order, load, model_identity, save
from shared.placement.table import ResidencyTable
from tests.support.tiny_model import tiny_model
from tools.gguf_writer import ValueType

IDENTITY = ModelIdentity("qwen", 2, 3, "abc")
COUNTS = np.array([[1, 5, 2], [4, 0, 3]], np.float32)


def test_saved_and_loaded(tmp_path: Path) -> None:
    """Over what was there, and nothing else is left."""
    path = tmp_path / "p.experts"
    save(path, np.zeros((2, 3), np.float32), IDENTITY)
    save(path, COUNTS, IDENTITY)
    loaded = load(path, IDENTITY)
    assert np.array_equal(loaded, COUNTS)
    loaded[0, 0] = 7
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full must not cost what was learned."""
    path = tmp_path / "p.experts"
    save(path, COUNTS, IDENTITY)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(path, COUNTS * 2, IDENTITY)
    assert np.array_equal(load(path, IDENTITY), COUNTS)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ModelIdentity("other", 2, 3, "abc"), "its model is 'qwen', here it is 'other'"),
        (ModelIdentity("qwen", 4, 3, "abc"), "its num_layers is 2, here it is 4"),
        (ModelIdentity("qwen", 2, 8, "abc"), "its num_experts is 3, here it is 8"),
        (ModelIdentity("qwen", 2, 3, "xyz"), "its fingerprint is 'abc', here it is 'xyz'"),
    ],
)
def test_another_models_profile(tmp_path: Path, other: ModelIdentity, message: str) -> None:
    """Its counts would place experts that are not used."""
    save(tmp_path / "p", COUNTS, IDENTITY)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "p", other)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no expert profile"),
        (b"\x93\x01", "is no expert profile"),
        (b"GGUF and more", "is no expert profile"),
        (msgpack.packb({"format": 99}), "is no expert profile that this version reads"),
        (
            msgpack.packb(
                {"format": 1, "model": "qwen", "num_layers": 2, "num_experts": 3, "fingerprint": "abc"}
            ),
            "the counts are not those of 2 x 3 experts",
        ),
    ],
)
def test_what_is_no_profile(tmp_path: Path, content: bytes, message: str) -> None:
    """Told with the file's name, not by a traceback."""
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(path, IDENTITY)


def test_counts_that_are_no_counts(tmp_path: Path) -> None:
    """NaN would be hottest of all."""
    save(tmp_path / "p", np.full((2, 3), np.nan, np.float32), IDENTITY)
    with pytest.raises(ConfigError, match="negative or no numbers"):
        load(tmp_path / "p", IDENTITY)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(tmp_path / "none", IDENTITY)


def test_identity_of_a_model(tmp_path: Path) -> None:
    """Another file of the same name and extents is another model."""
    described = tiny_model()
    identities = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with GGUFModel(described.write(tmp_path / name / "tiny.gguf")) as model:
            identities.append(model_identity(model, read_model_config(model)))
        described.metadata["general.name"] = ValueType.STRING, "another"
    first, second = identities
    assert (first.model, first.num_layers) == ("tiny", second.num_layers)
    assert first.fingerprint != second.fingerprint


def test_hottest_first() -> None:
    """Over all layers; experts as hot as each other take turns of the layers."""
    layers, experts = fill_order(COUNTS)
    assert list(zip(layers.tolist(), experts.tolist(), strict=True)) == [
        (0, 1),
        (1, 0),
        (1, 2),
        (0, 2),
        (0, 0),
        (1, 1),
    ]
    layers, experts = fill_order(np.zeros((3, 2), np.float32))
    assert layers.tolist() == [0, 1, 2, 0, 1, 2]
    assert experts.tolist() == [0, 0, 0, 1, 1, 1]


def test_slots_within_bounds() -> None:
    """A byte more than there is would be an allocation that fails at start."""
    order = fill_order(COUNTS)
    blobs = np.array([1000, 257], np.int64)  # 1024 and 512 in a slot
    layers, experts = assign_slots(order, blobs, budget_bytes=1024 + 512 + 511)
    assert (layers.tolist(), experts.tolist()) == ([0, 1], [1, 0])
    assert len(assign_slots(order, blobs, budget_bytes=1024 + 512 + 512)[0]) == 3
    assert len(assign_slots(order, blobs, budget_bytes=1023)[0]) == 0
    assert len(assign_slots(order, blobs, num_slots=4)[0]) == 4
    assert len(assign_slots(order, blobs, budget_bytes=1600, num_slots=4)[0]) == 2
    slot_layers, _ = assign_slots(order, blobs, num_slots=99)
    assert len(slot_layers) == 6
    assert ResidencyTable(slot_layers, 2, 3).num_slots == 6
    with pytest.raises(ValueError, match="neither a budget in bytes nor a number of slots"):
        assign_slots(order, blobs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is no file; name another file"),
        ("pipe", "is no file; name another file"),
        ("x" * 300, "cannot be read: File name too long; name another file"),
    ],
)
def test_what_cannot_be_a_profile(tmp_path: Path, name: str, message: str) -> None:
    """Is refused at the start where it was asked for: a directory, a pipe, a name that is too long. A file
    that is not there yet is none of that."""
    os.mkfifo(tmp_path / "pipe")
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as file:
        config = read_model_config(file)
        assert ProfileStore(tmp_path / "profile", file, config).load() is None
        with pytest.raises(ConfigError, match=message):
            ProfileStore(tmp_path / name, file, config).load()


def test_a_profile_that_was_named(tmp_path: Path) -> None:
    """Is the user's: nobody is told to delete it, and no folder is made for it."""
    (tmp_path / "mine").write_bytes(b"GGUF and more")
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as file:
        config = read_model_config(file)
        with pytest.raises(ConfigError, match="one that does not exist is created") as told:
            ProfileStore(tmp_path / "mine", file, config).load()
        assert "delete" not in str(told.value)
        with pytest.raises(
            ConfigError, match=r"--expert-profile is .*/new/p, but there is no folder .*/new; make"
        ):
            ProfileStore(tmp_path / "new" / "p", file, config).load()
    assert not (tmp_path / "new").exists()


def test_the_profile_of_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Has its folder made, and is begun anew where it is damaged."""
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "cache"))
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as file:
        config = read_model_config(file)
        store = ProfileStore(None, file, config)
        assert store.load() is None
        counts = np.ones((config.num_layers, config.num_experts), np.float32)
        store.save(counts)
        assert store.path.parent == tmp_path / "cache" / "profiles"
        loaded = store.load()
        assert loaded is not None
        assert np.array_equal(loaded, counts)
        store.path.write_bytes(b"GGUF and more")
        assert store.load() is None
    assert "the profile is begun anew: " in caplog.text
    assert "; delete it" in caplog.text
