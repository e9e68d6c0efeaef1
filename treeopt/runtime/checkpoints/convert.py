"""Read published heads by the layouts of `treeopt.records.drafters`, and rewrite them in another layout."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from treeopt.errors import InvalidInput, TreeoptError, Unsupported, quoted
from treeopt.records.drafters import DRAFTERS, LAYOUTS, kind_of_layout
from treeopt.runtime.checkpoints.files import StoredTensors, find_checkpoint, find_tensors
from treeopt.runtime.checkpoints.reading import Base, Checkpoint, LoadedHeads
from treeopt.runtime.checkpoints.save import check_kind, read_lm_head, save_heads
from treeopt.runtime.drafters import part_of


def load_heads(path_or_id: str, base: Base, revision: str | None = None) -> LoadedHeads:
    """The heads in a file, a folder or a hub repository, in any published layout.

    Raises Unsupported, by name, for other drafters and InvalidInput for everything that does not fit together.
    """
    return open_checkpoint(path_or_id, revision).build(base)


def open_checkpoint(path_or_id: str, revision: str | None = None) -> Checkpoint:
    """Find and recognise a checkpoint by its names; no tensor of safetensors is read."""
    stored = find_tensors(find_checkpoint(path_or_id, revision))
    for kind, row in DRAFTERS.items():
        found: Checkpoint | None = part_of(kind, "recognises")(stored) if row.recognises else None
        if found is not None:
            return found
    raise _refusal(stored)


def _refusal(stored: StoredTensors) -> TreeoptError:
    """The error that names what the tensors are instead of heads in a published layout."""
    names = sorted(stored.parts)
    if any(name.startswith("speculator.") for name in names) or stored.config.get("model_type") == "mlp_speculator":
        return Unsupported(f"{stored.origin} holds an MLP speculator, whose layout is not read.")
    shown = ", ".join(map(quoted, names[:3])) + " ..." * (len(names) > 3)
    return InvalidInput(
        f"{stored.origin} must hold heads in a published layout ({', '.join(LAYOUTS)}), but its tensors are: {shown or 'none'}."
    )


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
    check_kind(kind_of_layout(checkpoint.layout), layout)
    ours, base_folder = LAYOUTS[layout], None
    needs_lm_head = lm_head is None and (ours.shares or checkpoint.shares)
    if base is None and LAYOUTS[checkpoint.layout].has_base:
        base_folder = checkpoint.stored.folder
    elif base is not None and (needs_lm_head or ours.has_base):
        base_folder = find_checkpoint(base)
    if needs_lm_head:
        if base_folder is None:
            raise InvalidInput(
                f"{source} is {checkpoint.layout!r}, and heads of the layouts "
                f"{' and '.join(repr(name) for name in LAYOUTS if LAYOUTS[name].shares)} share the base's lm_head: pass it "
                "with `model`."
            )
        lm_head = read_lm_head(base_folder)
    loaded = checkpoint.build(Base(lm_head))
    name = base or (str(base_folder) if base_folder else None) or loaded.base
    if name is None and ours.names_base:
        raise InvalidInput(
            f"The layout {layout!r} names its base model, but {source} names none: pass it with `model`."
        )
    return loaded, save_heads(loaded.heads, layout, folder, base=name or "", base_folder=base_folder, lm_head=lm_head)
