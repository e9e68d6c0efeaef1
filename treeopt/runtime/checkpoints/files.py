"""Where a checkpoint lies and how its tensors are read: a folder, a file or a hub id.

Names are listed first and only the tensors that are asked for are read, so that heads beside a base
model of many shards cost no more than the heads. Nothing is executed: safetensors, or pickles read
weights-only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treeopt.errors import InvalidInput, TreeoptError, first_line, quoted
from treeopt.files.bounds import check_stored
from treeopt.files.places import find_local
from treeopt.records.drafters import ASKED
from treeopt.runtime.folder import check_header, read_object

# In the order in which a folder's files are looked for.
HEAD_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "medusa_heads.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SUFFIXES = (".safetensors", ".bin", ".pt")
RANK_FILE = re.compile(r"rank(0|[1-9][0-9]{0,3})\.safetensors")
MUST = f"`drafter` must be a folder, a file of weights, a hub id, {ASKED}"


@dataclass(frozen=True)
class StoredTensors:
    """The names of the tensors in some files; their values when asked for.

    A name may have a part in each of several files, concatenated along dimension 0 (tensor-parallel
    ranks). ``own`` says that by their names the files hold heads and nothing else.
    """

    origin: Path
    parts: dict[str, tuple[Path, ...]]
    ranks: int = 0
    own: bool = False
    notes: tuple[str, ...] = ()
    pickled: dict[Path, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> Path:
        return self.origin if self.origin.is_dir() else self.origin.parent

    @cached_property
    def config(self) -> dict[str, object]:
        """config.json beside the files; empty where there is none."""
        file = self.folder / "config.json"
        return read_object(file) if file.is_file() else {}

    def read(self, name: str) -> Tensor:
        parts = [self._read_part(file, name) for file in self.parts[name]]
        if len(parts) == 1:
            return parts[0]
        try:
            return torch.cat(parts)
        except RuntimeError:
            shapes = " and ".join(str(tuple(part.shape)) for part in parts[:3])
            raise InvalidInput(
                f"The parts of a tensor must fit together along dimension 0, but {quoted(name)} in "
                f"{self.origin} has parts of {shapes}."
            ) from None

    def _read_part(self, file: Path, name: str) -> Tensor:
        if file.suffix == ".safetensors":
            with readable(file), open_safetensors(file) as opened:
                if name in opened.keys():  # noqa: SIM118 - the handle is no mapping
                    return opened.get_tensor(name)
        else:
            if file not in self.pickled:
                self.pickled[file] = read_pickle(file)
            if name in self.pickled[file]:
                return self.pickled[file][name]
        raise InvalidInput(f"{self.origin} says that {file.name} holds {quoted(name)}, but it does not.")


def find_checkpoint(path_or_id: str, revision: str | None = None) -> Path:
    """The file or folder ``path_or_id``, or the folder that a hub id was downloaded to."""
    if (path := find_local(path_or_id, MUST)) is not None:
        return path
    if path_or_id.endswith((*SUFFIXES, ".json")):
        raise InvalidInput(f"{MUST}, but {Path(path_or_id).absolute()} does not exist.")
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "tokenizer_config.json", "*.index.json", *(f"*{suffix}" for suffix in SUFFIXES)]
    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises errors of several libraries, none of them its own
        raise InvalidInput(
            f"{MUST}, but {path_or_id} is none of these here, and as a hub id it cannot be downloaded: {first_line(error)}."
        ) from None


def find_tensors(path: Path) -> StoredTensors:
    """The tensors of a file, of an index's files, or of the files in a folder that hold the heads."""
    if not path.is_file() and not path.is_dir():
        raise InvalidInput(f"`drafter` must be a folder or a file of weights, but {path} does not exist.")
    place = path if path.is_dir() else path.parent
    folder = {file.name: file for file in sorted(place.iterdir()) if file.is_file()}
    if path.is_file():
        if RANK_FILE.fullmatch(path.name):
            return _ranked(path.parent, folder)
        if path.name.endswith(".index.json"):
            return _indexed(path, folder)
        return _listed(path, [path], own=path.name in HEAD_FILES)
    found = [name for name in HEAD_FILES if name in folder]
    if found:
        notes = tuple(f"{path} also has {name}: {found[0]} is read" for name in found[1:2])
        return _listed(folder[found[0]], [folder[found[0]]], own=True, notes=notes)
    if any(RANK_FILE.fullmatch(name) for name in folder):
        return _ranked(path, folder)
    for name in MODEL_FILES:
        if name in folder:
            file = folder[name]
            return _indexed(file, folder) if name.endswith(".json") else _listed(file, [file])
    for suffix in SUFFIXES:
        files = [file for name, file in folder.items() if name.endswith(suffix)]
        if files:
            return _listed(path if len(files) > 1 else files[0], files)
    raise InvalidInput(
        f"`drafter` must be a folder with {', '.join(HEAD_FILES[:3])} or a model's files, but {path} has no weights."
    )


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Turn whatever a parser raises on damaged bytes into InvalidInput."""
    try:
        yield
    except TreeoptError:
        raise
    except Exception:  # a flipped byte makes the parsers raise anything, from KeyError to MemoryError
        raise InvalidInput(
            f"{file} must be safetensors or a pickled state dict of tensors, but it is not readable as one: "
            "it may be cut off, a Git LFS pointer, or hold code. Download it again."
        ) from None


def open_safetensors(file: Path) -> Any:
    """A handle with ``keys()`` and ``get_tensor(name)``; the header is checked against the file's size."""
    from safetensors import safe_open

    check_header(file)
    return safe_open(file, framework="pt")


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict; nothing is executed."""
    with readable(file):
        check_stored(file)
        document = torch.load(file, weights_only=True, map_location="cpu")
        if not isinstance(document, dict) or not all(
            isinstance(name, str) and type(value) in (Tensor, nn.Parameter) for name, value in document.items()
        ):
            raise InvalidInput(f"{file} must hold a state dict of tensors, but it holds something else.")
        for name, tensor in document.items():
            # A pickle may describe a huge tensor over few bytes, or one that has no bytes at all.
            plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
            if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
                raise InvalidInput(f"{file} must hold plain tensors, but {quoted(name)} is none.")
        return {name: tensor.detach() for name, tensor in document.items()}


def _listed(origin: Path, files: Iterable[Path], *, own: bool = False, notes: tuple[str, ...] = ()) -> StoredTensors:
    parts: dict[str, tuple[Path, ...]] = {}
    pickled: dict[Path, dict[str, Tensor]] = {}
    for file in files:
        for name in _names(file, pickled):
            if name in parts:
                raise InvalidInput(
                    f"A tensor must be in one file, but {quoted(name)} is in {parts[name][0]} and {file}."
                )
            parts[name] = (file,)
    return StoredTensors(origin, parts, own=own, notes=notes, pickled=pickled)


def _ranked(path: Path, folder: dict[str, Path]) -> StoredTensors:
    ranks = sorted(int(match[1]) for name in folder if (match := RANK_FILE.fullmatch(name)))
    if ranks != list(range(len(ranks))):
        missing = min(set(range(len(ranks))) - set(ranks))
        raise InvalidInput(f"{path} must have a file for every rank, but rank{missing}.safetensors is missing.")
    files = [folder[f"rank{rank}.safetensors"] for rank in ranks]
    names = [set(_names(file, {})) for file in files]
    for file, there in zip(files, names, strict=True):
        odd = sorted(name for name in there ^ names[0] if "medusa" in name)
        if odd:
            raise InvalidInput(
                f"Every rank must hold a part of each head's tensors, but {quoted(odd[0])} is in only one of "
                f"{files[0].name} and {file.name} in {path}."
            )
    return StoredTensors(path, {name: tuple(files) for name in sorted(names[0])}, ranks=len(ranks))


def _indexed(index: Path, folder: dict[str, Path]) -> StoredTensors:
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise InvalidInput(f"{index} must have a weight_map of tensor names to files, but it has none.")
    for name, file in where.items():
        if not isinstance(file, str) or file not in folder or not file.endswith(SUFFIXES):
            raise InvalidInput(
                f"{index} must name weight files in its folder, but {quoted(name)} is said to be in "
                f"{quoted(file)}, which is not there."
            )
    return StoredTensors(index, {name: (folder[file],) for name, file in where.items()})


def _names(file: Path, pickled: dict[Path, dict[str, Tensor]]) -> list[str]:
    if file.suffix == ".safetensors":
        with readable(file), open_safetensors(file) as opened:
            return sorted(opened.keys())
    if file.suffix not in SUFFIXES:
        raise InvalidInput(f"A file of weights must end in {', '.join(SUFFIXES)}, but got {file}.")
    pickled[file] = read_pickle(file)
    return list(pickled[file])
