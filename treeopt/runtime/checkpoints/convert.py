"""Rewrite published heads in another layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.files.shipped import LAYOUTS
from treeopt.runtime.checkpoints.checks import Base, LoadedHeads
from treeopt.runtime.checkpoints.files import find_checkpoint
from treeopt.runtime.checkpoints.load import build_heads, open_checkpoint
from treeopt.runtime.checkpoints.save import check_kind, kind_of, read_lm_head, save_heads

WITH_WEIGHTS = ("merged", "modelopt")  # layouts that contain the base
WITHOUT_LM_HEAD = ("medusa-shared", "eagle-1")  # whose heads guess with the base's


@dataclass(frozen=True)
class Conversion:
    """The heads that were read, and the files that were written."""

    source: LoadedHeads
    files: tuple[Path, ...]


def convert(
    source: str,
    layout: str,
    folder: Path,
    *,
    base: str | None = None,
    base_folder: Path | None = None,
    lm_head: Tensor | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Conversion:
    """Write the heads of ``source`` (a file, a folder or a hub id) to ``folder`` in one of `LAYOUTS`.

    base is the base model, a name, a folder or a hub id; by default what the source's config.json names,
    and for a source that contains its base the source itself. Its weights (base_folder, or lm_head alone)
    are looked for, and downloaded, only where the source or the layout needs them. dtype None keeps the
    stored one; revision is the source's.
    """
    if layout not in LAYOUTS:
        raise InvalidInput(f"--to must be one of {', '.join(LAYOUTS)}, but got {layout!r}.")
    checkpoint = open_checkpoint(source, revision)
    from_layout = checkpoint.recognised.layout
    check_kind(kind_of(from_layout), layout)
    if base is None and base_folder is None and from_layout in WITH_WEIGHTS:
        base_folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    needs_lm_head = lm_head is None and (layout == "medusa-shared" or from_layout in WITHOUT_LM_HEAD)
    if base_folder is None and base is not None and (needs_lm_head or layout in WITH_WEIGHTS):
        base_folder = find_checkpoint(base)
    if needs_lm_head:
        if base_folder is None:
            raise InvalidInput(
                f"{source} is {from_layout!r}, and heads of the layouts {' and '.join(map(repr, WITHOUT_LM_HEAD))} "
                "share the base's lm_head: pass it with --model."
            )
        lm_head = read_lm_head(base_folder)
    loaded = build_heads(checkpoint, Base(lm_head), dtype=dtype, device="cpu")
    name = base or (str(base_folder) if base_folder else None) or loaded.base
    if name is None and layout.startswith(("medusa", "hydra")):
        raise InvalidInput(
            f"The layout {layout!r} names its base model, but {source} names none: pass it with --model."
        )
    files = save_heads(loaded.heads, layout, folder, base=name or "", base_folder=base_folder, lm_head=lm_head)
    return Conversion(loaded, tuple(files))
