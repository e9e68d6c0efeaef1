"""Write trained heads in the layout that readers of their kind expect; with Medusa-2 the changed base too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from treeopt.files.writing import temporary
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.checkpoints.save import by_libraries
from treeopt.runtime.target import Target
from treeopt.runtime.training.recipe import MEDUSA_2

LAYOUTS = {  # by kind
    "medusa-1": "medusa",
    "medusa-shared": "medusa-shared",
    "medusa-2": "merged",
    "hydra": "hydra",
    "hydra++": "hydra++",
    "eagle3": "eagle-3",
}


def save_result(trainee: Any, target: Target, kind: str, folder: Path) -> list[Path]:
    """The files written. The heads take the target's dtype; Medusa-2's adapter becomes part of the base."""
    heads = trainee.heads.eval().requires_grad_(False).to(target.dtype)
    if kind != MEDUSA_2:
        lm_head = target.lm_head.weight if heads.shares_projection else None
        return save_heads(heads, LAYOUTS[kind], folder, base=target.name, lm_head=lm_head)
    base_folder = temporary(folder / "training" / "base")
    try:
        with by_libraries(base_folder):
            trainee.merged().save_pretrained(base_folder)
            if target.tokenizer is not None:
                target.tokenizer.save_pretrained(base_folder)
        return save_heads(heads, LAYOUTS[kind], folder, base=target.name, base_folder=base_folder)
    finally:
        shutil.rmtree(base_folder, ignore_errors=True)
