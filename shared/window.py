"""How many tokens a step may compute of a sequence and still take back."""

WINDOW_TOKENS = 8
"""Those of a verify window: the last token and its drafts. What a window changes is kept aside until it is
known how many of them stay. In a step of so many tokens, products for one of them do not depend on how many
others there are, to the bit (`shared.quants`)."""


def window_tokens(spec: int) -> int:
    """Tokens of a sequence in a step that generates, where `--spec` is this."""
    return 1 + min(spec, WINDOW_TOKENS - 1)
