"""Reading one GGUF file: every value type, and refusal of whatever is missing, cut, hostile or damaged."""

import mmap
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ModelFileError, StartError, UnsupportedModelError
from shared.gguf.file import GGUFFile, StringArray
from tools.gguf_writer import GGUFWriter, ValueType

U32, U64, F32 = ValueType.UINT32, ValueType.UINT64, 0


def text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    """One metadata entry."""
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: str, dimensions: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    """One entry of the tensor list; dimensions fastest first, as in the file."""
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def gguf(
    metadata: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    head: bytes = b"GGUF\x03\0\0\0",
    num_metadata: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A whole file, with counts that may lie."""
    counts = struct.pack(
        "<QQ",
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_metadata is None else num_metadata,
    )
    header = head + counts + b"".join(metadata) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + data


def write(path: Path, content: bytes) -> Path:
    file = path / "model.gguf"
    file.write_bytes(content)
    return file


def small_file() -> bytes:
    """Two tensors and one value of most kinds."""
    return gguf(
        (
            entry("general.name", 8, text("Grüße")),
            entry("a.number", 4, struct.pack("<I", 7)),
            entry("a.list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
            entry("some.words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("")),
        ),
        (tensor("first", (4, 2)), tensor("second", (3,), offset=32)),
        struct.pack("<8f", *range(8)) + struct.pack("<3f", 8, 9, 10) + bytes(20),
    )


SMALL_FILE_END_OF_DATA = len(small_file()) - 20


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ValueType.UINT8, 255),
        (ValueType.INT8, -128),
        (ValueType.UINT16, 65535),
        (ValueType.INT16, -32768),
        (ValueType.UINT32, 4294967295),
        (ValueType.INT32, -2147483648),
        (ValueType.UINT64, 18446744073709551615),
        (ValueType.INT64, -9223372036854775808),
        (ValueType.FLOAT32, 0.5),
        (ValueType.FLOAT64, 1e300),
        (ValueType.BOOL, True),
        (ValueType.BOOL, False),
        (ValueType.STRING, "Ünï\n"),
        (ValueType.STRING, ""),
    ],
)
def test_scalars(kind: ValueType, value: object, tmp_path: Path) -> None:
    """Each type is read with its own width and sign, and is a plain Python value of the right type: a bool
    that is an int, or a 64-bit number gone through a float, would be found much later."""
    writer = GGUFWriter()
    writer.add("k", kind, value)
    with GGUFFile(writer.write(tmp_path / "f.gguf")[0]) as file:
        assert file.metadata["k"] == value
        assert type(file.metadata["k"]) is type(value)


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        (ValueType.UINT8, [0, 255], "u1"),
        (ValueType.INT32, [-1, 2], "<i4"),
        (ValueType.UINT64, [2**63 + 1, 23703573157769], "<u8"),
        (ValueType.FLOAT32, [0.25, -1.0], "<f4"),
        (ValueType.BOOL, [True, False], "?"),
        (ValueType.INT64, [], "<i8"),
    ],
)
def test_arrays_of_numbers(kind: ValueType, values: list[object], dtype: str, tmp_path: Path) -> None:
    """Arrays keep their type: hash multipliers beyond 2^53 stay exact."""
    writer = GGUFWriter()
    writer.add_array("k", kind, values)
    with GGUFFile(writer.write(tmp_path / "f.gguf")[0]) as file:
        read = file.metadata["k"]
    assert isinstance(read, np.ndarray)
    assert read.dtype == np.dtype(dtype)
    assert read.tolist() == values


def test_array_of_strings(tmp_path: Path) -> None:
    """The one loop that is written for speed reads what the plain one would."""
    words = ["", "a", "ß" * 300, "\u2801", "x"]
    writer = GGUFWriter()
    writer.add_array("k", ValueType.STRING, words)
    writer.add("after", U32, 5)
    with GGUFFile(writer.write(tmp_path / "f.gguf")[0]) as file:
        read = file.metadata["k"]
        assert isinstance(read, StringArray)
        assert list(read) == words
        assert len(read) == len(words)
        assert file.metadata["after"] == 5


def test_array_element_that_is_not_text(tmp_path: Path) -> None:
    """Strings of an array are decoded when they are read, which is when damage in them has to be named."""
    with GGUFFile(write(tmp_path, array(8, 1, text(b"\x80")))) as file:
        read = file.metadata["k"]
        assert isinstance(read, StringArray)
        with pytest.raises(
            ModelFileError, match=r"model\.gguf: an element of k is not valid UTF-8: b'\\x80'"
        ):
            list(read)


def test_tensors(tmp_path: Path) -> None:
    """Shapes are in numpy order, places absolute, and the view holds exactly the tensor's bytes."""
    with GGUFFile(write(tmp_path, small_file())) as file:
        assert list(file.tensors) == ["first", "second"]
        first, second = file.tensors.values()
        assert first.shape == (2, 4)
        assert (first.num_weights, first.num_bytes, first.type.name) == (8, 32, "F32")
        assert file.raw(second).view("<f4").tolist() == [8.0, 9.0, 10.0]
        assert not file.raw(second).flags.writeable
        assert file.num_bytes == len(small_file())


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    """A file with its own alignment begins its data, and its tensors, there."""
    writer = GGUFWriter()
    writer.add("general.alignment", U32, 32)
    content = bytearray(writer.write(tmp_path / "f.gguf")[0].read_bytes())
    assert len(content) % 32 == 0
    aligned = gguf((entry("general.alignment", 4, struct.pack("<I", 128)),), (tensor("t", (2,)),))
    aligned += b"\0" * (-len(aligned) % 128) + struct.pack("<2f", 1.5, 2.5)
    with GGUFFile(write(tmp_path, aligned)) as file:
        info = file.tensors["t"]
        assert info.offset % 128 == 0
        assert file.raw(info).view("<f4").tolist() == [1.5, 2.5]


def test_every_cut_is_refused(tmp_path: Path) -> None:
    """A download that broke off anywhere is refused by name, with the way out; none is taken for a smaller
    model, none ends in another kind of exception."""
    content = small_file()
    for length in range(1, SMALL_FILE_END_OF_DATA):
        path = write(tmp_path, content[:length])
        with pytest.raises(ModelFileError, match=r"model\.gguf: (truncated: .*copy it again|.*, more than)"):
            GGUFFile(path)


def test_a_file_without_its_last_padding_is_whole(tmp_path: Path) -> None:
    """Some writers leave the padding after the last tensor out; nothing is missing then."""
    with GGUFFile(write(tmp_path, small_file()[:SMALL_FILE_END_OF_DATA])) as file:
        assert file.raw(file.tensors["second"]).view("<f4").tolist() == [8.0, 9.0, 10.0]


def test_truncation_says_where(tmp_path: Path) -> None:
    """The message has the tensor, the bytes it needs and the bytes there are."""
    content = small_file()[: SMALL_FILE_END_OF_DATA - 1]
    needed = rf"tensor second needs bytes {SMALL_FILE_END_OF_DATA - 12} to {SMALL_FILE_END_OF_DATA}"
    with pytest.raises(ModelFileError, match=rf"{needed}, but the file ends at {len(content)}"):
        GGUFFile(write(tmp_path, content))


NUMBER = entry("k", 4, struct.pack("<I", 1))


def alignment(kind: int, payload: bytes) -> bytes:
    return gguf((entry("general.alignment", kind, payload),))


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return gguf((entry("k", 9, struct.pack("<IQ", kind, count) + payload),))


def tensors(*entries: bytes) -> bytes:
    return gguf((), entries, bytes(64))


HOSTILE = {
    "empty": (b"", "the file is empty; download or copy it again"),
    "web page": (b"<html>Not found", r"not a GGUF file: it begins with b'<htm', expected b'GGUF'"),
    "version 1": (gguf(head=b"GGUF\1\0\0\0"), "GGUF version 1 is not supported; convert .* version 3"),
    "big-endian": (gguf(head=b"GGUF\0\0\0\3"), "the file is big-endian; .*little-endian"),
    "many tensors": (gguf(num_tensors=2**60), f"number of tensors is {2**60}, more than the file can hold"),
    "many keys": (gguf(num_metadata=2**63), f"number of metadata entries is {2**63}, more than the file"),
    "long key": (gguf((struct.pack("<Q", 2**64 - 1) + b"k" * 20,)), "truncated: .*inside a metadata key "),
    "long string": (gguf((entry("k", 8, struct.pack("<Q", 2**40)),)), "truncated: .*inside k "),
    "long array": (array(6, 2**61), f"the length of k is {2**61}, more than the file can hold"),
    "array past the end": (array(12, 30), "truncated: .*inside k "),
    "long element": (array(8, 1, struct.pack("<Q", 2**50)), "truncated: .*inside an element of k "),
    "too few elements": (array(8, 5), "truncated: .*inside an element of k "),
    "no such type": (gguf((entry("k", 13, bytes(8)),)), "k has the value type 13, which is not supported"),
    "array of arrays": (array(9, 1, bytes(40)), "k has the value type 9, which is not supported"),
    "key twice": (gguf((NUMBER, NUMBER)), "the metadata key k is listed twice"),
    "key not UTF-8": (gguf((entry(b"\xff", 4, bytes(4)),)), r"a metadata key is not valid UTF-8: b'\\xff'"),
    "string not UTF-8": (gguf((entry("k", 8, text(b"a\xc3")),)), r"k is not valid UTF-8: b'a\\xc3'"),
    "alignment 0": (alignment(4, struct.pack("<I", 0)), "general.alignment is 0, expected a power of two"),
    "alignment 48": (alignment(4, struct.pack("<I", 48)), "general.alignment is 48, expected a power"),
    "alignment true": (alignment(7, b"\1"), "general.alignment is True, expected a power of two"),
    "alignment huge": (alignment(10, struct.pack("<Q", 2**40)), "general.alignment is 1099511627776, expec"),
    "alignment text": (alignment(8, text("32")), "general.alignment is '32', expected a power of two"),
    "tensor twice": (tensors(tensor("t", (2,)), tensor("t", (2,), offset=32)), "t is listed twice"),
    "tensor not UTF-8": (
        tensors(tensor("t", (2,)).replace(b"t", b"\xfe")),
        "a tensor name is not valid UTF-8",
    ),
    "rank 0": (tensors(tensor("t", ())), "tensor t has rank 0, expected 1 to 4"),
    "rank 5": (tensors(tensor("t", (1,) * 5)), "tensor t has rank 5, expected 1 to 4"),
    "rank 2^32 - 1": (tensors(text("t") + b"\xff" * 30), "tensor t has rank 4294967295, expected 1 to 4"),
    "no rows": (tensors(tensor("t", (3, 0))), r"tensor t has an empty dimension: \[3, 0\]"),
    "misaligned": (
        tensors(tensor("t", (2,), offset=8)),
        "t begins at byte 8 .* multiple of the alignment, 32",
    ),
    "part of a block": (tensors(tensor("t", (33,), 8)), "rows of 33 weights.*multiple of the 32 .* of Q8_0"),
    "huge tensor": (tensors(tensor("t", (2**62, 2**62))), "truncated: tensor t needs bytes 96 to"),
    "far away": (tensors(tensor("t", (2,), offset=2**63)), "truncated: tensor t needs bytes"),
    "overlap": (tensors(tensor("t", (9,)), tensor("u", (2,), offset=32)), "tensors t and u overlap at byte"),
    "same place": (tensors(tensor("t", (2,)), tensor("u", (2,))), "tensors t and u overlap at byte"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(name: str, tmp_path: Path) -> None:
    """What a damaged or made-up header may claim is refused by file, thing and value, and before anything of
    the claimed size is allocated."""
    content, message = HOSTILE[name]
    with pytest.raises(ModelFileError, match=rf"model\.gguf: .*{message}"):
        GGUFFile(write(tmp_path, content))


def test_unknown_tensor_type(tmp_path: Path) -> None:
    """A type that a newer quantiser invented is another matter than damage: the file is fine."""
    with pytest.raises(UnsupportedModelError, match=r"tensor t has type 97, which this version .* not know"):
        GGUFFile(write(tmp_path, gguf((), (tensor("t", (2,), 97),), bytes(64))))


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    """Missing, a directory, a named pipe (which must not block), unreadable: each by name."""
    with pytest.raises(ModelFileError, match=r"gone\.gguf: no such model file"):
        GGUFFile(tmp_path / "gone.gguf")
    with pytest.raises(ModelFileError, match=r"not a file; name the \.gguf file itself"):
        GGUFFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="pipe: not a file"):
        GGUFFile(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="cannot be opened: Not a directory"):
        GGUFFile(write(tmp_path, b"GGUF") / "model.gguf")


def test_size_does_not_matter(tmp_path: Path) -> None:
    """A file of 68 GB costs its header: nothing of its data is read, offsets beyond 32 bits are right."""
    num_rows = 34 * 2**30 // 64
    halves = (tensor("a", (64, num_rows), 24), tensor("b", (64, num_rows), 24, offset=num_rows * 64))
    path = write(tmp_path, gguf((), halves))
    os.truncate(path, path.stat().st_size + 2 * num_rows * 64)
    with GGUFFile(path) as file:
        assert file.num_bytes > 68 * 2**30
        assert file.tensors["b"].offset == file.header_bytes + (-file.header_bytes % 32) + 34 * 2**30
        assert not file.raw(file.tensors["b"])[-4096:].any()
    assert path.stat().st_blocks * 512 < 2**20


def test_advice_takes_any_tensor(tmp_path: Path) -> None:
    """Advice is given for pages, tensors begin anywhere: the last of the file, shorter than a page, too."""
    with GGUFFile(write(tmp_path, small_file())) as file:
        for info in file.tensors.values():
            start, num_bytes = file.pages(info)
            assert start % mmap.PAGESIZE == 0
            assert info.offset - mmap.PAGESIZE < start <= info.offset
            assert start + num_bytes == info.offset + info.num_bytes
            file.will_need(start, num_bytes)
            file.populate(start, num_bytes)
        file.will_need(0, 10 * mmap.PAGESIZE)


def test_views_outlive_nothing(tmp_path: Path) -> None:
    """Closing while a view is in use is an error here, not a bus error later."""
    file = GGUFFile(write(tmp_path, small_file()))
    view = file.raw(file.tensors["first"])
    with pytest.raises(BufferError):
        file.close()
    del view
    file.close()


@settings(
    deadline=None,
    print_blob=True,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens to the bytes of a header: it is refused by name, or every tensor lies in the file."""
    content = bytearray(small_file())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, SMALL_FILE_END_OF_DATA - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 8, 9, 127, 128, 255]) | st.integers(0, 255))
    path = write(tmp_path, bytes(content))
    try:
        file = GGUFFile(path)
    except StartError as error:
        refusal = str(error)
    else:
        refusal = ""
        with file:
            for info in file.tensors.values():
                assert len(file.raw(info)) == info.num_bytes
    assert refusal == "" or str(path) in refusal
