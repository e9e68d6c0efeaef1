"""Read and write the published layouts of Medusa heads; see `treeopt.library.LAYOUTS`.

files.py finds and reads tensors · layouts.py names them and tells layouts apart · load.py checks and
stacks them · save.py writes them · convert.py does both.
"""

from __future__ import annotations

from treeopt.runtime.checkpoints.convert import Conversion, convert
from treeopt.runtime.checkpoints.load import LoadedHeads, load_heads
from treeopt.runtime.checkpoints.save import save_heads

__all__ = ["Conversion", "LoadedHeads", "convert", "load_heads", "save_heads"]
