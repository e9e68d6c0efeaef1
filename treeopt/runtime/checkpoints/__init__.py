"""Read and write the published layouts of heads; see `treeopt.records.drafters.LAYOUTS`.

files.py finds and reads tensors · reading.py opens any checkpoint and checks it · medusa.py, eagle3.py, dflash.py and
layer.py name tensors and tell layouts apart, as drafters/hydra.py does · save.py writes any of them, and rewrites one as another.
"""

from treeopt.runtime.checkpoints.reading import Base, LoadedHeads, load_heads
from treeopt.runtime.checkpoints.save import convert, save_heads

__all__ = ["Base", "LoadedHeads", "convert", "load_heads", "save_heads"]
