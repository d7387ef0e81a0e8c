"""The writer that tests, the demo model and benchmarks use: what it writes is what others read."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from shared.gguf.model import GGUFModel
from tools.gguf_writer import GGUFWriter, ValueType, Write


def test_the_gguf_package_reads_it(tmp_path: Path) -> None:
    """Guards against writer and reader of this project agreeing on something that is not GGUF."""
    weights = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer = GGUFWriter()
    writer.add("general.architecture", ValueType.STRING, "qwen4exp")
    writer.add("a.float", ValueType.FLOAT64, 0.1)
    writer.add("a.flag", ValueType.BOOL, True)
    writer.add_array("a.words", ValueType.STRING, ["eins", "zwei"])
    writer.add_array("a.numbers", ValueType.UINT64, [2**63, 3])
    writer.add_tensor("odd", "F32", (3,), np.ones(3, np.float32).tobytes())
    writer.add_tensor("weights", "F32", (2, 32), weights.tobytes())
    writer.add_tensor("quantised", "Q8_0", (2, 32), bytes(range(68)))
    reader = GGUFReader(writer.write(tmp_path / "m.gguf")[0])
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert values == {
        "general.architecture": "qwen4exp",
        "a.float": 0.1,
        "a.flag": True,
        "a.words": ["eins", "zwei"],
        "a.numbers": [2**63, 3],
    }
    odd, read, quantised = reader.tensors
    assert (odd.name, odd.data.tolist()) == ("odd", [1, 1, 1])
    assert np.array_equal(read.data, weights)
    assert quantised.data.tobytes() == bytes(range(68))


def test_types_that_the_gguf_package_lacks(tmp_path: Path) -> None:
    """Q2_0 is why the writer exists."""
    writer = GGUFWriter()
    writer.add_tensor("t", "Q2_0", (3, 128), bytes(108))
    with GGUFModel(writer.write(tmp_path / "m.gguf")[0]) as model:
        assert model.info("t").type.type_id == 42
        assert model.rows("t").shape == (3, 36)


def test_streamed_tensor(tmp_path: Path) -> None:
    """A tensor larger than memory comes in pieces and lands where the header says."""

    def stream(write: Write) -> None:
        for value in range(4):
            write(np.full(2, value, np.float32).tobytes())

    writer = GGUFWriter()
    writer.add_tensor("streamed", "F32", (4, 2), stream)
    writer.add_tensor("after", "F32", (2,), np.full(2, 9, np.float32).tobytes())
    with GGUFModel(writer.write(tmp_path / "m.gguf")[0]) as model:
        assert model.rows("streamed").view("<f4").tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert model.rows("after").view("<f4").tolist() == [9, 9]


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    """Bytes that do not fit would shift every tensor after them: refused by name and number."""
    writer = GGUFWriter()
    with pytest.raises(ValueError, match="t: rows of 33 weights do not divide into Q8_0 blocks"):
        writer.add_tensor("t", "Q8_0", (33,), bytes(34))
    with pytest.raises(ValueError, match="t: 4 bytes given, 8 expected"):
        writer.add_tensor("t", "F32", (2,), bytes(4))
    writer.add_tensor("t", "F32", (2,), lambda write: None)
    with pytest.raises(ValueError, match="t: streamed 0 bytes, 8 expected"):
        writer.write(tmp_path / "m.gguf")


def test_split(tmp_path: Path) -> None:
    """The parts carry their numbers as published sets do, and only the first has the metadata."""
    writer = GGUFWriter()
    writer.add("k", ValueType.UINT32, 5)
    for name in ("a", "b"):
        writer.add_tensor(name, "F32", (1,), bytes(4))
    first, second = writer.write_split(tmp_path / "m.gguf", lambda name: name == "b")
    assert (first.name, second.name) == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    with GGUFModel(first) as model:
        assert [part.metadata for part in model.parts] == [
            {"k": 5, "split.no": 0, "split.count": 2, "split.tensors.count": 2},
            {"split.no": 1, "split.count": 2, "split.tensors.count": 2},
        ]
