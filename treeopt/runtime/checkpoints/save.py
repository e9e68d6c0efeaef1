"""Write heads in any of the layouts, as the engine that reads it wants them.

Every file appears whole or not at all, config.json last. What a layout cannot hold is refused.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from treeopt.errors import InvalidInput, Unsupported, first_line
from treeopt.files.writing import atomic_writer, replacing, write_text
from treeopt.records.drafters import DRAFTERS, LAYOUTS, WRITTEN, kind_of_layout
from treeopt.runtime.checkpoints.files import HEAD_FILES, MODEL_FILES, SUFFIXES, find_checkpoint, find_tensors
from treeopt.runtime.checkpoints.reading import Base, LoadedHeads, Published, open_checkpoint
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.states import Heads
from treeopt.runtime.folder import loadable

WEIGHTS = (*SUFFIXES, ".index.json")  # how the names of a checkpoint's files end
CONFIG = "config.json"


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
    and for a source that contains its base the source itself. Its lm_head, where that is not given, is looked for, and
    downloaded, only where the source or the layout needs it. revision is the source's.
    """
    checkpoint = open_checkpoint(source, revision)
    check_kind(kind_of_layout(checkpoint.layout), layout)
    ours, base_folder = LAYOUTS[layout], None
    needs_lm_head = lm_head is None and (ours.shares or checkpoint.shares)
    if base is None and LAYOUTS[checkpoint.layout].has_base:
        base_folder = checkpoint.stored.folder
    elif base is not None and needs_lm_head:
        base_folder = find_checkpoint(base)
    if needs_lm_head:
        if base_folder is None:
            raise InvalidInput(
                f"{source} is {checkpoint.layout!r}, and heads of the layouts "
                f"{' and '.join(repr(name) for name in LAYOUTS if LAYOUTS[name].shares)} share the base's lm_head: pass it "
                "with `model`."
            )
        lm_head = read_lm_head(base_folder)
    config, config_folder = None, base_folder or (Path(base) if base else None)
    if config_folder and (config_folder / CONFIG).is_file() and config_folder != checkpoint.stored.folder:
        with loadable("`model` must have a config.json of a model", str(config_folder)):
            config = AutoConfig.from_pretrained(config_folder).get_text_config()
    loaded = checkpoint.load(Base(lm_head, config=config))
    name = base or (str(base_folder) if base_folder else None) or loaded.base
    if name is None and ours.names_base:
        raise InvalidInput(f"{layout!r} names its base model, but {source} names none: pass it with `model`.")
    return loaded, save_heads(loaded.heads, layout, folder, base=name or "", lm_head=lm_head)


def save_heads(heads: Heads, layout: str, folder: Path, *, base: str, lm_head: Tensor | None = None) -> list[Path]:
    """Write ``heads`` to ``folder`` in one of the layouts that are `WRITTEN`; the files written.

    base is the base model's name, for config.json. lm_head (V, d) proves for "medusa-shared" that the heads' projections
    are copies of it. Raises Unsupported where the layout cannot hold these heads.
    """
    check_kind(heads.kind, layout)
    made: Published = part_of(heads.kind, "writes")(heads, layout, base, lm_head)
    made = made._replace(tensors={name: stored(tensor) for name, tensor in made.tensors.items()})
    # Heads without a config.json of their own lie in the base's folder, beside its weights.
    check_folder(folder, {made.file}, HEAD_FILES if made.config is None else WEIGHTS)
    written = [write_tensors(folder / made.file, made.tensors)]
    if made.config is None:
        return written
    write_text(folder / CONFIG, json.dumps(made.config, indent=2) + "\n")
    return [*written, folder / CONFIG]


def check_kind(kind: str, layout: str) -> None:
    """Raise where ``layout`` is none that is written, or one of heads of another kind."""
    if layout not in WRITTEN:
        raise InvalidInput(f"`layout` must be one of {', '.join(WRITTEN)}, but got {layout!r}.")
    if kind_of_layout(layout) != kind:
        raise Unsupported(
            f"The layout {layout!r} cannot hold these heads: these are {kind!r} heads, whose layouts are "
            f"{', '.join(name for name in DRAFTERS[kind].layouts if name in WRITTEN)}."
        )


def stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def read_lm_head(folder: Path) -> Tensor:
    """The (V, d) lm_head of the model in ``folder``, or its embedding, which is the same where it has none.

    Heads may lie beside the model's own files.
    """
    file = next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)
    if file is None:
        raise InvalidInput(f"`model` must be a folder with {' or '.join(MODEL_FILES)}, but {folder} has none of them.")
    tensors = find_tensors(file)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if name in tensors.parts:
            return tensors.read(name)
    raise InvalidInput(f"`model` must be a causal LM with an lm_head.weight, but {folder} has none.")


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> Path:
    """Write safetensors, or a pickled state dict where the name ends in .pt; whole or not at all."""
    if file.suffix == ".pt":
        with atomic_writer(file) as stream:
            torch.save(tensors, stream)
    else:
        from safetensors.torch import save_file

        with replacing(file) as made, by_libraries(file):
            made.touch()
            usual = made.stat().st_mode
            save_file(tensors, made, metadata={"format": "pt"})
            made.chmod(usual)  # safetensors makes files for their owner alone
    return file


@contextmanager
def by_libraries(file: Path) -> Iterator[None]:
    """Turn what libraries raise where they cannot write into InvalidInput."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # a sentence names it later
            raise
        raise InvalidInput(f"{file} cannot be written: {error.strerror or error}.") from None
    except Exception as error:
        if "os error" not in str(error):  # as Rust calls the system's
            raise
        raise InvalidInput(f"{file} cannot be written: {first_line(error)}.") from None


def check_folder(folder: Path, names: Iterable[str] = (), clashing: tuple[str, ...] = WEIGHTS) -> None:
    """Raise where another checkpoint lies in ``folder``: a reader could not tell which is meant."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"`output` must be a folder, but {folder} is a file.")
    present = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if strange := [name for name in present if name.endswith(clashing) and name not in names]:
        raise InvalidInput(
            f"`output` must be a folder without other weights, but {folder} has {strange[0]}: pass a new one."
        )
