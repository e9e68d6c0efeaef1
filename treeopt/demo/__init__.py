"""Paths of the shipped models and drafters: the demo model with its drafters, and drafters for SmolLM2; how they were made is in README.md here."""

from pathlib import Path

_HERE = Path(__file__).parent
MODEL, HEADS = _HERE / "model", _HERE / "heads"
NAME = "demo"  # what --model and --drafter call the demo model and its Medusa heads
TITLE = "treeopt demo model"  # what records call it
SMOLLM2 = "smollm2"  # what --model calls SmolLM2-135M-Instruct, which a package of its own brings along
# What --drafter calls the drafters of a model: the first one is its default.
DRAFTERS = {
    NAME: {"medusa": HEADS, **{name: _HERE / name for name in ("hydra", "eagle3", "dflash", "draft")}},
    SMOLLM2: {folder.name: folder for folder in sorted((_HERE / SMOLLM2).glob("[a-z]*")) if folder.is_dir()},
}
