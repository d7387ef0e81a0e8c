"""How many tokens a step may compute of a sequence and still take back."""

WINDOW_TOKENS = 8
"""Those of a verify window: the last token and its drafts. What a window changes is kept aside until it is
known how many of them stay."""
