"""Read and write the published layouts of heads; see `treeopt.records.drafters.LAYOUTS`.

files.py finds and reads tensors · reading.py checks them · layouts.py (of medusa.py), hydra.py, eagle.py, eagle3.py and
layer.py name them and tell layouts apart · save.py writes any of them · convert.py reads any, and rewrites it.
"""

from __future__ import annotations

from treeopt.runtime.checkpoints.convert import convert, load_heads
from treeopt.runtime.checkpoints.reading import Base, LoadedHeads
from treeopt.runtime.checkpoints.save import save_heads

__all__ = ["Base", "LoadedHeads", "convert", "load_heads", "save_heads"]
