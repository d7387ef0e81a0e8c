"""The small trained model that Strata serves when it is given no other."""

from pathlib import Path

DEMO_MODEL_PATH = Path(__file__).with_name("strata-demo.gguf")
