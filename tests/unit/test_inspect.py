"""`strata inspect`: the report, its exit codes, and that the size of a file does not matter."""

import os
import re
from pathlib import Path

import pytest

from shared.cli import main
from shared.gguf.file import GGUFFile
from tests.support.tiny_model import hole, tiny_model
from tools.gguf_writer import ValueType


def inspect(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.main(["inspect", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def line_of(report: str, start: str) -> str:
    return next(line for line in report.splitlines() if line.startswith(start))


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, architecture, tensors by class with types and bytes, tokenizer: what users compare files by."""
    path = tiny_model().write(tmp_path / "tiny.gguf")
    assert inspect(str(path)) == 0
    report = capsys.readouterr().out
    assert f"{path}  1.63 MiB, 113 tensors, GGUF v3" in report
    assert "4: 3 delta net, 1 attention; 0 prediction block(s)" in report
    assert "8, 2 used per token" in report
    assert "2 query heads, 1 kv heads of 32, rotary 16, base 10000" in report
    assert "512 tokens, vocabulary 271" in report
    assert "up to 3, 4 rows of 32 per token, before layer 1" in report
    assert re.search(r"n-gram table +53\.00 KiB  F32 x1", report)
    assert re.search(r"experts, gate and up +512\.00 KiB  F32 x8", report)
    assert "gpt2, pre-tokenizer qwen35" in report
    assert "271, merges 6" in report
    assert re.search(r"end of text +264", report)
    assert re.search(r"chat template +\d+ bytes", report)


def test_scaled_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Why a file reaches further than the model was trained for."""
    model = tiny_model()
    model.metadata["qwen4exp.rope.scaling.type"] = (ValueType.STRING, "yarn")
    model.metadata["qwen4exp.rope.scaling.factor"] = (ValueType.FLOAT32, 4.0)
    inspect(str(model.write(tmp_path / "tiny.gguf")))
    assert "2048 tokens (yarn, 4 times 512 tokens), vocabulary 271" in capsys.readouterr().out


def test_bytes_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No tensor is left out of the classes."""
    path = tiny_model().write(tmp_path / "tiny.gguf")
    inspect(str(path))
    report = capsys.readouterr().out
    with GGUFFile(path) as file:
        total = sum(info.num_bytes for info in file.tensors.values())
    assert line_of(report, "tensors ") == f"tensors {total / 2**20:.2f} MiB in 113"
    counts = re.findall(r" x(\d+)", report)
    assert sum(map(int, counts)) == 113


def test_split_set_and_mixed_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From any part, all parts; several types in one class, the most frequent first."""
    model = tiny_model()
    for layer, type_name in ((0, "Q8_0"), (1, "Q8_0"), (2, "Q4_0")):
        tensor = model.tensors[f"blk.{layer}.ffn_down_exps.weight"]
        tensor.type_name = type_name
        tensor.data = bytes(8 * 64 * {"Q8_0": 34, "Q4_0": 18}[type_name])
    parts = model.write_split(tmp_path / "tiny.gguf", lambda name: name.startswith("per_layer"))
    assert inspect(str(parts[1])) == 0
    report = capsys.readouterr().out
    assert all(str(part) in report for part in parts)
    assert line_of(report, "  experts, down").endswith("Q8_0 x2, Q4_0 x1, F32 x1")


def test_without_ngrams_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file does not have is said to be missing."""
    model = tiny_model()
    model.drop_ngrams()
    for key in [key for key in model.metadata if key.startswith("tokenizer.")]:
        del model.metadata[key]
    assert inspect(str(model.write(tmp_path / "tiny.gguf"))) == 0
    report = capsys.readouterr().out
    assert re.search(r"n-grams +none", report)
    assert "missing, pre-tokenizer missing" in report
    assert re.search(r"chat template +none", report)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "no such model file"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "truncated: tensor "),
        (lambda path: path.write_bytes(b"\x80\x02}q" * 100), "not a GGUF file"),
    ],
)
def test_files_that_are_refused(
    spoil: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error, exit code 2, no traceback."""
    path = tiny_model().write(tmp_path / "tiny.gguf")
    spoil(path)  # type: ignore[operator]
    assert inspect(str(path)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"strata: {path}: {message}")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def test_a_missing_tensor_is_said_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be served can still be looked at."""
    model = tiny_model()
    del model.tensors["blk.0.ssm_a"]
    assert inspect(str(model.write(tmp_path / "tiny.gguf"))) == 2
    captured = capsys.readouterr()
    assert "delta net" in captured.out
    assert captured.err.endswith("tiny.gguf: the tensor blk.0.ssm_a is missing\n")


def test_size_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of 68 GB with a large vocabulary is reported from its header: were its data read, or the table
    decoded, this test would run out of time and memory."""
    vocabulary = [f"token{number}" for number in range(20_000)]
    model = tiny_model()
    model.metadata["tokenizer.ggml.tokens"] = (ValueType.STRING, list(vocabulary))
    model.metadata["tokenizer.ggml.token_type"] = (ValueType.INT32, [1] * len(vocabulary))
    model.metadata["tokenizer.ggml.merges"] = (ValueType.STRING, [f"a {word}" for word in vocabulary])
    for name in ("token_embd.weight", "output.weight"):
        model.tensors[name].shape = (len(vocabulary), 64)
    table = model.tensors["per_layer_token_embd.weight"]
    table.shape, table.data = (68 * 2**30 // 128, 32), hole(68 * 2**30)
    path = model.write(tmp_path / "large.gguf")
    assert path.stat().st_size > 68 * 2**30
    assert path.stat().st_blocks * 512 < 2**25
    assert inspect(str(path)) == 0
    report = capsys.readouterr().out
    assert re.search(r"n-gram table +68\.00 GiB  F32 x1", report)
    assert "20000, merges 20000" in report
