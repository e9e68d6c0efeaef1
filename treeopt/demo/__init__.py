"""The embedded demo model: a small code model with four Medusa-1 heads, and the recipe that made it."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
HEADS = Path(__file__).parent / "heads"
NAME = "demo"  # what --model and --drafter call it
