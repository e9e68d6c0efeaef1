"""Read and write the published layouts of heads; see `treeopt.files.shipped.LAYOUTS`.

files.py finds and reads tensors · checks.py checks them · layouts.py, hydra.py, eagle.py and layer.py name them and
tell layouts apart · load.py and save.py read and write any of them · convert.py does both.
"""

from __future__ import annotations

from treeopt.runtime.checkpoints.checks import Base, LoadedHeads
from treeopt.runtime.checkpoints.convert import convert
from treeopt.runtime.checkpoints.load import load_heads
from treeopt.runtime.checkpoints.save import save_heads

__all__ = ["Base", "LoadedHeads", "convert", "load_heads", "save_heads"]
