"""What the tasks of attention and indexer know of a span: one record, filled before each step."""

from shared.native.records import fields, reader

ATTENTION_SPAN = fields(
    "start",  # first token of the step
    "num_tokens",
    "position",  # of the first token
    "keys",  # f32 [positions, kv heads, head_dim], with room for those of this span
    "values",
    "block_keys",  # f32 [blocks, indexer dim], with room for the blocks that this span completes
    "open_keys",  # f32 [ratio, indexer dim]
    "num_open",  # of these, before the span
)
SPAN_BYTES = ATTENTION_SPAN.itemsize

span_at = reader(ATTENTION_SPAN)
