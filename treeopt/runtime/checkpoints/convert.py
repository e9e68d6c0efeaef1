"""Rewrite published heads in another layout."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.runtime.checkpoints.checks import Base, LoadedHeads
from treeopt.runtime.checkpoints.files import find_checkpoint
from treeopt.runtime.checkpoints.load import open_checkpoint
from treeopt.runtime.checkpoints.save import check_kind, kind_of, read_lm_head, save_heads

WITH_WEIGHTS = ("merged", "modelopt")  # layouts that contain the base
WITHOUT_LM_HEAD = ("medusa-shared", "eagle-1")  # whose heads guess with the base's


def convert(
    source: str,
    layout: str,
    folder: Path,
    *,
    base: str | None = None,
    lm_head: Tensor | None = None,
    revision: str | None = None,
) -> tuple[LoadedHeads, list[Path]]:
    """Write the heads of ``source`` (a file, a folder or a hub id) to ``folder``: they, and the files written.

    base is the base model, a name, a folder or a hub id; by default what the source's config.json names,
    and for a source that contains its base the source itself. Its weights, or its lm_head where that is not
    given, are looked for, and downloaded, only where the source or the layout needs them. revision is the
    source's.
    """
    checkpoint = open_checkpoint(source, revision)
    check_kind(kind_of(checkpoint.layout), layout)
    base_folder = checkpoint.stored.folder if base is None and checkpoint.layout in WITH_WEIGHTS else None
    own = any(name.endswith("lm_head.weight") for name in checkpoint.stored.parts)
    shares = checkpoint.layout in WITHOUT_LM_HEAD or (checkpoint.layout == "eagle-3" and not own)
    needs_lm_head = lm_head is None and (layout == "medusa-shared" or shares)
    if base is not None and (needs_lm_head or layout in WITH_WEIGHTS):
        base_folder = find_checkpoint(base)
    if needs_lm_head:
        if base_folder is None:
            raise InvalidInput(
                f"{source} is {checkpoint.layout!r}, and heads of the layouts "
                f"{' and '.join(map(repr, WITHOUT_LM_HEAD))} share the base's lm_head: pass it with --model."
            )
        lm_head = read_lm_head(base_folder)
    loaded = checkpoint.build(Base(lm_head))
    name = base or (str(base_folder) if base_folder else None) or loaded.base
    if name is None and layout.startswith(("medusa", "hydra")):
        raise InvalidInput(
            f"The layout {layout!r} names its base model, but {source} names none: pass it with --model."
        )
    return loaded, save_heads(loaded.heads, layout, folder, base=name or "", base_folder=base_folder, lm_head=lm_head)
