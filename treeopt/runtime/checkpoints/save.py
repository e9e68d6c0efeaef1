"""Write heads in any of the layouts, as the engine that reads it wants them.

Every file appears whole or not at all, config.json last. What a layout cannot hold is refused.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported, first_line
from treeopt.files.writing import atomic_writer, replacing, write_text
from treeopt.records.drafters import DRAFTERS, LAYOUTS, kind_of_layout
from treeopt.runtime.checkpoints.files import (
    HEAD_FILES,
    MODEL_FILES,
    SUFFIXES,
    StoredTensors,
    find_checkpoint,
    find_tensors,
    opened,
)
from treeopt.runtime.checkpoints.reading import Base, LoadedHeads, Published, open_checkpoint
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.states import Heads

WEIGHTS = (*SUFFIXES, ".index.json")  # how the names of a checkpoint's files end
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # a base's tokenizer and the like
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
    loaded = checkpoint.load(Base(lm_head))
    name = base or (str(base_folder) if base_folder else None) or loaded.base
    if name is None and ours.names_base:
        raise InvalidInput(f"{layout!r} names its base model, but {source} names none: pass it with `model`.")
    return loaded, save_heads(loaded.heads, layout, folder, base=name or "", base_folder=base_folder, lm_head=lm_head)


def save_heads(
    heads: Heads,
    layout: str,
    folder: Path,
    *,
    base: str,
    base_folder: Path | None = None,
    lm_head: Tensor | None = None,
) -> list[Path]:
    """Write ``heads`` to ``folder`` in one of `LAYOUTS`; the files written.

    base is the base model's name, for config.json. base_folder has its weights, which the layouts "merged"
    and "modelopt" contain. lm_head (V, d), or base_folder's, proves for "medusa-shared" that the heads'
    projections are copies of it. Raises Unsupported where the layout cannot hold these heads.
    """
    check_kind(heads.kind, layout)
    about = LAYOUTS[layout]
    if about.shares and lm_head is None and base_folder is not None:
        lm_head = read_lm_head(base_folder)
    made: Published = part_of(heads.kind, "writes")(heads, layout, base, lm_head)
    made = made._replace(tensors={name: stored(tensor) for name, tensor in made.tensors.items()})
    if about.has_base:
        if base_folder is None:
            raise InvalidInput(f"The layout {layout!r} contains the base model, so pass its folder with `model`.")
        return _save_with_base(heads, made, folder, base_folder)
    # Heads without a config.json of their own lie in the base's folder, beside its weights.
    check_folder(folder, {made.file}, HEAD_FILES if made.config is None else WEIGHTS)
    written = [write_tensors(folder / made.file, made.tensors)]
    return written if made.config is None else [*written, _write_json(folder / CONFIG, made.config)]


def check_kind(kind: str, layout: str) -> None:
    """Raise where ``layout`` is none, or one of heads of another kind."""
    if layout not in LAYOUTS:
        raise InvalidInput(f"`layout` must be one of {', '.join(LAYOUTS)}, but got {layout!r}.")
    if kind_of_layout(layout) != kind:
        raise Unsupported(
            f"The layout {layout!r} cannot hold these heads: these are {kind!r} heads, whose layouts are "
            f"{', '.join(DRAFTERS[kind].layouts)}."
        )


def stored(tensor: Tensor) -> Tensor:
    """On the CPU, with a storage of its own."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def read_lm_head(folder: Path) -> Tensor:
    """The (V, d) lm_head of the model in ``folder``, or its embedding, which is the same where it has none."""
    tensors = _base_tensors(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight"):
        if name in tensors.parts:
            return tensors.read(name)
    raise InvalidInput(f"`model` must be a causal LM with an lm_head.weight, but {folder} has none.")


def _base_tensors(folder: Path) -> StoredTensors:
    """The tensors of the base model in ``folder``, whatever heads lie beside them."""
    for name in MODEL_FILES:
        if (folder / name).is_file():
            return find_tensors(folder / name)
    raise InvalidInput(f"`model` must be a folder with {' or '.join(MODEL_FILES)}, but {folder} has none of them.")


def _save_with_base(heads: Heads, made: Published, folder: Path, base_folder: Path) -> list[Path]:
    """The base's shards, then one with the heads, an index of all, what lies beside them, and config.json."""
    base = _base_tensors(base_folder)
    for key, size in (("hidden_size", heads.width), ("vocab_size", heads.vocab_size)):
        if base.config.get(key) != size:
            raise base.config.wrong(key, f"that of the heads, {size}")
    shards = sorted({file for parts in base.parts.values() for file in parts})
    if any(shard.suffix != ".safetensors" for shard in shards):
        raise Unsupported(
            f"The base's weights must be safetensors, but {base_folder} has {shards[0].name}: save them with "
            "transformers' save_pretrained."
        )
    if folder.exists() and folder.samefile(base_folder):
        raise InvalidInput(f"`output` must be another folder than the base's, but both are {folder}.")
    names = [f"model-{i + 1:05}-of-{len(shards) + 1:05}.safetensors" for i in range(len(shards) + 1)]
    index = MODEL_FILES[1]
    check_folder(folder, {*names, index})

    where: dict[str, str] = {}
    for shard, name in zip(shards, names, strict=False):
        where |= dict.fromkeys(_copy_shard(shard, folder / name), name)
    write_tensors(folder / names[-1], made.tensors)
    where |= dict.fromkeys(made.tensors, names[-1])
    total = sum(_data_bytes(folder / name) for name in names)
    _write_json(folder / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})

    files = [file for file in sorted(base_folder.iterdir()) if file.is_file() and file.suffix in BESIDE]
    beside = [file for file in files if file.name != CONFIG and not file.name.endswith(".index.json")]
    for file in beside:
        _replace(folder / file.name, partial(shutil.copyfile, file))
    earlier = ("medusa", "medusa_num_heads", "medusa_num_layers")
    config = {key: value for key, value in base.config.items() if key not in earlier} | (made.config or {})
    others = [*names, index, *(file.name for file in beside)]
    return [*(folder / name for name in others), _write_json(folder / CONFIG, config)]


def _copy_shard(shard: Path, to: Path) -> list[str]:
    """Copy the base's tensors in ``shard``, without heads that it may hold; their names."""
    with opened(shard) as tensors:
        names = sorted(tensors.keys())
        kept = [name for name in names if not name.startswith(("medusa_head.", "medusa_heads."))]
        if kept == names:
            _replace(to, partial(shutil.copyfile, shard))
        else:
            write_tensors(to, {name: tensors.get_tensor(name) for name in kept})
    return kept


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> Path:
    """Write safetensors, or a pickled state dict where the name ends in .pt; whole or not at all."""
    if file.suffix == ".pt":
        with atomic_writer(file) as stream:
            torch.save(tensors, stream)
    else:
        from safetensors.torch import save_file

        _replace(file, lambda made: save_file(tensors, made, metadata={"format": "pt"}))
    return file


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make a file, and give it its name when it is complete."""
    with replacing(file) as made, by_libraries(file):
        made.touch()
        usual = made.stat().st_mode
        write(made)
        made.chmod(usual)  # safetensors makes files for their owner alone


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


def _write_json(file: Path, document: Mapping[str, object]) -> Path:
    write_text(file, json.dumps(document, indent=2) + "\n")
    return file


def check_folder(folder: Path, names: Iterable[str] = (), clashing: tuple[str, ...] = WEIGHTS) -> None:
    """Raise where another checkpoint lies in ``folder``: a reader could not tell which is meant."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"`output` must be a folder, but {folder} is a file.")
    present = sorted(file.name for file in folder.iterdir()) if folder.exists() else []
    if strange := [name for name in present if name.endswith(clashing) and name not in names]:
        raise InvalidInput(
            f"`output` must be a folder without other weights, but {folder} has {strange[0]}: pass a new one."
        )


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file: what follows its length and header."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
