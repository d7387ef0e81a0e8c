"""Token ids to text, a few at a time, without ever splitting a character.

A token may end in the middle of a UTF-8 sequence, so its last bytes are held back until the rest arrives.
Called by whatever streams or detokenizes; knows nothing of stop strings or reasoning.
"""

import codecs
from collections.abc import Iterable

from gateway.tokenizer import Tokenizer


class Detokenizer:
    """One stream. The text of all `feed` calls and the `flush` together is that of the joined bytes, with
    U+FFFD for what is not UTF-8, no matter how the ids were portioned out.

    Control tokens leave no text unless `show_control` is set; user-defined ones such as `<think>` always do,
    since they are part of what the model says.
    """

    def __init__(self, tokenizer: Tokenizer, show_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that is complete with these ids; may be empty. Raises IndexError for an id outside the
        vocabulary."""
        tokenizer = self._tokenizer
        return self._decoder.decode(
            b"".join(
                tokenizer.token_bytes(token_id)
                for token_id in token_ids
                if self._show_control or not tokenizer.is_control(token_id)
            )
        )

    @property
    def holds_bytes(self) -> bool:
        """Whether the last ids ended within a character, which is yet to come."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """Ends the stream: U+FFFD for a character that was cut off, else nothing."""
        return self._decoder.decode(b"", final=True)


def detokenize(tokenizer: Tokenizer, token_ids: Iterable[int], show_control: bool = False) -> str:
    """The text of a whole sequence at once."""
    stream = Detokenizer(tokenizer, show_control)
    return stream.feed(token_ids) + stream.flush()
