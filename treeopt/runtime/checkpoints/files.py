"""Where a checkpoint lies and how its tensors are read: a folder, a file or a hub id.

Names are listed first and only the tensors that are asked for are read, so that heads beside a base
model of many shards cost no more than the heads. Nothing is executed: safetensors, or pickles read
weights-only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
MUST = f"`drafter` must be a folder, a file of weights, a hub id, {ASKED}"
MOST_TOKENS = 2**31  # of a vocabulary
MASK_IDS = ("ptd_token_id", "mask_token_id", "pard_token")  # keys of the token that masks are
Pickled = dict[Path, dict[str, Tensor]]


class Settings(dict[str, Any]):
    """What config.json says beside the tensors of ``origin``."""

    def __init__(self, origin: Path, said: Mapping[str, object]) -> None:
        super().__init__(said)
        self.origin = origin

    def wrong(self, key: str, rule: str, error: type[TreeoptError] = InvalidInput) -> TreeoptError:
        return error(f"{key} must be {rule}, but config.json of {self.origin} says {quoted(self.get(key))}.")

    def number(self, key: str, least: float = 1, most: float = MOST_TOKENS, kind: Any = int) -> Any:
        """The number under a key; InvalidInput where it is none of the range."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise self.wrong(key, f"a {'whole ' * (kind is int)}number from {least} to {most}")
        return value

    def mask_id(self, key: str, vocab_size: int) -> int:
        """The token that masks are, under a key or another that readers look under, each in an order of its own."""
        first, *others = [one for one in dict.fromkeys((key, *MASK_IDS)) if one in self] or [key]
        mask_id: int = self.number(first, 0, vocab_size - 1)
        for other in others:
            if self[other] != mask_id:
                raise self.wrong(other, f"{mask_id}, as {first} is")
        return mask_id

    def check_sizes(self, sizes: Mapping[str, tuple[int, str]]) -> None:
        """Raise where another width or vocabulary is said than the named tensor has."""
        for key, (size, name) in sizes.items():
            if self.get(key) not in (None, size):
                raise InvalidInput(
                    f"config.json must describe the heads beside it, but it says {key} {quoted(self[key])} where "
                    f"{quoted(name)} of {self.origin} has {size}: one of them is another model's."
                )


@dataclass(frozen=True)
class StoredTensors:
    """The names of the tensors in some files, each with its file; their values when asked for."""

    origin: Path
    parts: dict[str, Path]  # file of each tensor
    notes: tuple[str, ...] = ()
    pickled: Pickled = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> Path:
        return self.origin if self.origin.is_dir() else self.origin.parent

    @cached_property
    def config(self) -> Settings:
        file = self.folder / "config.json"
        return Settings(self.origin, read_object(file) if file.is_file() else {})

    def read(self, name: str) -> Tensor:
        file = self.parts[name]
        if file.suffix == ".safetensors":
            with opened(file) as stored:
                if name in stored.keys():  # noqa: SIM118 - the handle is no mapping
                    return stored.get_tensor(name)
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
    if path.is_file():
        return _indexed(path) if path.name.endswith(".index.json") else _listed(path, [path])
    names = sorted(file.name for file in path.iterdir() if file.is_file())
    heads = [name for name in HEAD_FILES if name in names]
    if found := [*heads, *(name for name in MODEL_FILES if name in names)]:
        notes = tuple(f"{path} also has {name}: {heads[0]} is read" for name in heads[1:2])
        return replace(find_tensors(path / found[0]), notes=notes)
    for suffix in SUFFIXES:
        if files := [path / name for name in names if name.endswith(suffix)]:
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


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A handle of safetensors with ``keys()`` and ``get_tensor(name)``; the header is checked against the file's size."""
    from safetensors import safe_open

    with readable(file):
        check_header(file)
        with safe_open(file, framework="pt") as stored:
            yield stored


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


def _listed(origin: Path, files: list[Path]) -> StoredTensors:
    where: dict[str, Path] = {}
    pickled: Pickled = {}
    for file in files:
        for name in _names(file, pickled):
            if name in where:
                raise InvalidInput(f"{quoted(name)} is in two files, {where[name]} and {file}.")
            where[name] = file
    return StoredTensors(origin, where, pickled=pickled)


def _indexed(index: Path) -> StoredTensors:
    where = read_object(index).get("weight_map")
    beside = {file.name for file in index.parent.iterdir() if file.is_file()}
    if not isinstance(where, dict) or not where:
        raise InvalidInput(f"{index} must have a weight_map of tensor names to files, but it has none.")
    for name, file in where.items():
        if not isinstance(file, str) or file not in beside or not file.endswith(SUFFIXES):
            raise InvalidInput(f"{index} says that {quoted(name)} is in {quoted(file)}, which is not there.")
    return StoredTensors(index, {name: index.parent / file for name, file in where.items()})


def _names(file: Path, pickled: Pickled) -> list[str]:
    if file.suffix == ".safetensors":
        with opened(file) as stored:
            return sorted(stored.keys())
    if file.suffix not in SUFFIXES:
        raise InvalidInput(f"A file of weights must end in {', '.join(SUFFIXES)}, but got {file}.")
    pickled[file] = read_pickle(file)
    return list(pickled[file])
