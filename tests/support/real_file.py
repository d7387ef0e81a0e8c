"""A file with the real model's header and no data: 68 GB that take a few megabytes of disk."""

from pathlib import Path

from benchmarks.slices import REAL, byte_spelling, replaced, tensors, type_of
from shared.gguf.types import tensor_type_named
from tests.support.tiny_model import hole
from tools.demo_model.config import CONTROL_TOKENS
from tools.demo_model.metadata import byte_level_tokenizer, write_metadata
from tools.gguf_writer import GGUFWriter

_LAYERS, _NGRAM_BASE = 48, 20_000_000


def write_real_header(path: Path, profile: str = "iq2_xs") -> Path:
    """All 48 layers with the whole n-gram table, types as in a profile of `benchmarks.slices`."""
    config = replaced(REAL, num_hidden_layers=_LAYERS, ngram_vocab_size_base=_NGRAM_BASE)
    spelling = byte_spelling()
    tokenizer = byte_level_tokenizer(
        {token: number for number, token in enumerate(spelling)}, [], CONTROL_TOKENS
    )
    writer = GGUFWriter()
    # The few tokens there are; rows of the embedding beyond them are unused.
    write_metadata(writer, config, tokenizer, has_prediction=False, file_type=20)
    for name, shape in tensors(config):
        kind = type_of(profile, name)
        num_bytes = kind.row_bytes(shape[-1])
        for extent in shape[:-1]:
            num_bytes *= extent
        writer.add_tensor(name, kind.name, shape, hole(num_bytes))
    # A file ends with what was written, not with a hole.
    end = tensor_type_named("F32").row_bytes(8)
    writer.add_tensor("end", "F32", (8,), bytes(end))
    writer.write(path)
    return path
