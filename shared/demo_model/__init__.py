"""The small trained model that Strata serves when it is given no other, and routes that it took."""

from pathlib import Path

DEMO_MODEL_PATH = Path(__file__).with_name("strata-demo.gguf")
DEMO_TRACE_PATH = Path(__file__).with_name("strata-demo.trace")
"""A routing trace of that model: questions about one topic, then about the next."""
