"""What the tasks of attention and indexer know of a span: one record, filled before each step."""

from shared.native.memory import integers_at
from shared.native.records import fields, reader
from shared.quants.jit import jitable

ATTENTION_SPAN = fields(
    "start",  # first token of the step
    "num_tokens",
    "position",  # of the first token
    "pages",  # i64 [pages]: their numbers, in the order of positions
    "page_tokens",
    "keys",  # rows of a format (`shared.kv_format`) [rows, kv heads]
    "values",
    "block_keys",  # f32 [rows / ratio, indexer dim]
    "raw_keys",  # f32 [ring_rows, indexer dim]
    "ring_rows",
    "snapshots",  # INDEXER_SNAPSHOT [num_snapshots]
    "num_snapshots",
)
INDEXER_SNAPSHOT = fields(
    "number",  # of the token in the span that it is before
    "raw_keys",  # f32 [ring_rows, indexer dim]
)
SPAN_BYTES, SNAPSHOT_BYTES = ATTENTION_SPAN.itemsize, INDEXER_SNAPSHOT.itemsize

span_at = reader(ATTENTION_SPAN)
snapshot_at = reader(INDEXER_SNAPSHOT)


@jitable
def row_of(pages: int, page_tokens: int, position: int) -> int:
    """The row of a position, in a store whose pages have so many rows. Compiled code only."""
    page = position // page_tokens
    return int(integers_at(pages)[page]) * page_tokens + (position - page * page_tokens)
