"""The embedded demo model: a small code model with drafters of its own, and how they were made (README.md here)."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
HEADS = Path(__file__).parent / "heads"
# What --drafter calls them with the demo model.
DRAFTERS = {"medusa": HEADS, **{name: Path(__file__).parent / name for name in ("hydra", "eagle3", "draft")}}
NAME = "demo"  # what --model and --drafter call it
TITLE = "treeopt demo model"  # what records call it
