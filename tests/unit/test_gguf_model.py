"""Models of several files: opened from any part, and only where every part belongs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.errors import ModelFileError
from shared.gguf.model import GGUFModel, part_paths
from tools.gguf_writer import GGUFWriter, ValueType


def writer_of(*tensors: str, name: str = "small") -> GGUFWriter:
    writer = GGUFWriter()
    writer.add("general.name", ValueType.STRING, name)
    for number, tensor in enumerate(tensors):
        values = np.arange(8, dtype=np.float32) + 10 * number
        writer.add_tensor(tensor, "F32", (2, 4), values.tobytes())
    return writer


def write_part(path: Path, number: object, count: object, *tensors: str, total: int = 2) -> Path:
    """One part by hand, with numbers that may be wrong; None leaves a key out."""
    writer = writer_of(*tensors)
    for key, value in (("split.no", number), ("split.count", count), ("split.tensors.count", total)):
        if value is not None:
            writer.add(key, ValueType.UINT16, value)
    writer.write(path)
    return path


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A set of two parts."""
    return writer_of("a", "b", "c").write_split(tmp_path / "m.gguf", lambda name: name == "b")


@pytest.mark.parametrize("named", [0, 1])
def test_any_part_opens_the_set(parts: list[Path], named: int) -> None:
    """Users name whichever part they see; metadata always comes from the first, tensors from all."""
    with GGUFModel(parts[named]) as model:
        assert [part.path for part in model.parts] == parts
        assert model.metadata["general.name"] == "small"
        assert model.name == "m"
        assert sorted(model) == ["a", "b", "c"]
        assert model.home("b").path == parts[1]
        assert model.rows("b").view("<f4").tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
        assert model.info("c").shape == (2, 4)
        assert "d" not in model
        assert model.num_bytes == sum(part.stat().st_size for part in parts)


def test_a_part_without_tensors(tmp_path: Path) -> None:
    """Published sets exist whose first part has nothing but metadata."""
    parts = writer_of("a").write_split(tmp_path / "m.gguf", lambda name: True)
    with GGUFModel(parts[0]) as model:
        assert list(model) == ["a"]


def test_missing_part(parts: list[Path]) -> None:
    """The part that is not there is named, and how many are needed."""
    parts[1].unlink()
    with pytest.raises(
        ModelFileError, match=r"m-00002-of-00002\.gguf: this part .* is missing \(2 parts are"
    ):
        GGUFModel(parts[0])


def test_truncated_part(parts: list[Path]) -> None:
    """Of a set, the part that is cut is named."""
    parts[1].write_bytes(parts[1].read_bytes()[:-40])
    with pytest.raises(ModelFileError, match=r"m-00002-of-00002\.gguf: truncated: tensor b"):
        GGUFModel(parts[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m-00003-of-00002.gguf", "part 3 of 2"),
        ("m-00000-of-00002.gguf", "part 0 of 2"),
        ("m-00001-of-00000.gguf", "part 1 of 0"),
    ],
)
def test_impossible_part_names(parts: list[Path], name: str, message: str) -> None:
    """A name that cannot be part of a set is not taken for the set beside it."""
    with pytest.raises(ModelFileError, match=rf"{name}: the name says that it is {message}"):
        part_paths(parts[0].with_name(name))


def test_many_parts_named() -> None:
    """A huge number in a name costs no list of as many files."""
    with pytest.raises(ModelFileError, match=r"m-00001-of-99999\.gguf: this part .* is missing"):
        part_paths(Path("/nowhere/m-99999-of-99999.gguf"))


WRONG_SETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a part alone, renamed": (
        lambda folder: write_part(folder / "model.gguf", 0, 2, "a"),
        r"split.count is 2, but its name says 1 part\(s\); parts are named NAME-00001-of-0000N.gguf",
    ),
    "numbered twice": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", 0, 2, "a"),
            write_part(folder / "m-00002-of-00002.gguf", 0, 2, "b"),
        ),
        r"m-00002-of-00002.gguf: split.no is 0, but its name says 1 \(counted from 0\)",
    ),
    "without a number": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", None, 2, "a"),
            write_part(folder / "m-00002-of-00002.gguf", 1, 2, "b"),
        ),
        "m-00001-of-00002.gguf: split.no is None, but its name says 0",
    ),
    "no parts at all": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", None, None, "a"),
            write_part(folder / "m-00002-of-00002.gguf", None, None, "b"),
        ),
        r"m-00001-of-00002.gguf: split.count is None, but its name says 2 part\(s\)",
    ),
    "part of a set of three": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", 0, 2, "a"),
            write_part(folder / "m-00002-of-00002.gguf", 1, 3, "b"),
        ),
        r"m-00002-of-00002.gguf: split.count is 3, but its name says 2 part\(s\)",
    ),
    "a tensor twice": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", 0, 2, "a"),
            write_part(folder / "m-00002-of-00002.gguf", 1, 2, "a"),
        ),
        "m-00002-of-00002.gguf: tensor a is also in .*m-00001-of-00002.gguf",
    ),
    "a tensor too few": (
        lambda folder: (
            write_part(folder / "m-00001-of-00002.gguf", 0, 2, "a", total=3),
            write_part(folder / "m-00002-of-00002.gguf", 1, 2, "b", total=3),
        ),
        "the parts hold 2 tensors, split.tensors.count says 3",
    ),
}


@pytest.mark.parametrize("case", WRONG_SETS)
def test_sets_that_do_not_belong_together(case: str, tmp_path: Path) -> None:
    """Parts that were renamed or mixed up are refused by name, with the number that disagrees."""
    make, message = WRONG_SETS[case]
    make(tmp_path)
    with pytest.raises(ModelFileError, match=message):
        GGUFModel(sorted(tmp_path.iterdir())[0])


@pytest.mark.parametrize("key", ["split.count", "split.no", "split.tensors.count"])
def test_numbers_of_a_set_that_are_none(key: str, tmp_path: Path) -> None:
    """A list or a text where a number belongs is refused by name and value."""
    for add, shown in (
        (lambda writer: writer.add_array(key, ValueType.UINT16, [1, 2]), r"array\(\[1, 2\]"),
        (lambda writer: writer.add(key, ValueType.STRING, "2"), "'2'"),
        (lambda writer: writer.add(key, ValueType.BOOL, True), "True"),
    ):
        for number in range(2):
            writer = writer_of("ab"[number])
            for other, value in (("split.no", number), ("split.count", 2), ("split.tensors.count", 2)):
                if other != key:
                    writer.add(other, ValueType.UINT16, value)
            add(writer)
            writer.write(tmp_path / f"m-0000{number + 1}-of-00002.gguf")
        with pytest.raises(ModelFileError, match=rf"00001-of-00002\.gguf: {key} is {shown}.* a number"):
            GGUFModel(tmp_path / "m-00001-of-00002.gguf")


def test_a_set_of_one(tmp_path: Path) -> None:
    """Splitters also write sets of one part, and converters the keys of a set into a single file."""
    write_part(tmp_path / "m-00001-of-00001.gguf", 0, 1, "a", total=1)
    write_part(tmp_path / "single.gguf", 0, 0, "a", total=0)
    for path in tmp_path.iterdir():
        with GGUFModel(path) as model:
            assert list(model) == ["a"]


def test_fingerprint(tmp_path: Path) -> None:
    """Equal for the same model wherever it lies, another one for another name, shape or set of tensors: it is
    what keeps processes of one stack from serving two models."""

    def fingerprint(writer: GGUFWriter, folder: str) -> str:
        path = tmp_path / folder / "m.gguf"
        path.parent.mkdir()
        writer.write(path)
        with GGUFModel(path) as model:
            return model.fingerprint()

    same = fingerprint(writer_of("a", "b"), "one")
    assert fingerprint(writer_of("a", "b"), "two") == same
    others = {
        fingerprint(writer_of("a", "b", name="tuned"), "name"),
        fingerprint(writer_of("a", "c"), "tensor"),
        fingerprint(writer_of("a"), "fewer"),
    }
    assert len(others | {same}) == 4
