"""A recognised checkpoint while heads are made of it: names, types, numbers and shapes of its tensors, and config.json.

A tensor goes by the name of its layout here; messages have the file's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.records.drafters import DRAFTERS, LAYOUTS
from treeopt.runtime.checkpoints.files import StoredTensors, find_checkpoint, find_tensors
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.states import Heads
from treeopt.runtime.folder import loadable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DESCRIBES = "config.json must describe the heads beside it"
ROUNDING = 2**-7  # of bfloat16, relative: tensors that differ by less are copies in another precision

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Base:
    """The model that heads belong to, as far as it is at hand.

    lm_head       : (V, d) weight, which heads without a projection of their own share
    embedding     : (V, d) input embeddings, which Hydra and EAGLE read; without it their own copy
    config        : for what a layer's tensors do not say (EAGLE without a config.json)
    dtype, device : that the heads take too; None is the dtype that they are stored in
    num_heads     : how many guesses in a row EAGLE makes; the heads of other drafters are counted
    """

    lm_head: Tensor | None = None
    embedding: Tensor | None = None
    config: Any = None
    dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"
    num_heads: int | None = None


@dataclass(frozen=True)
class LoadedHeads:
    heads: Heads
    layout: str
    files: tuple[Path, ...]  # the files of weights that were read
    notes: tuple[str, ...]  # a sentence for whatever was repaired or is worth knowing
    base: str | None  # the base model that config.json names


class Checkpoint(NamedTuple):
    """A checkpoint of heads that was recognised by its names.

    names  : the file's name of every tensor, by that of its layout
    build  : checks the tensors that were read; a function of dtype and device that makes the heads, whose `weights` have the
             names of the layout
    apart  : names of tensors that are no weights
    shares : whether the heads guess with the base's lm_head, which is not among them
    others : tensors that may lie beside the heads' `weights`; None where the names were checked already
    prefix : of a name of the layout in this file, where the tensor is missing
    """

    stored: StoredTensors
    layout: str
    names: Mapping[str, str]
    build: Callable[[Reading], Callable[..., Heads]]
    apart: Container[str] = ()
    shares: bool = False
    others: Collection[str] | None = None
    prefix: Callable[[str], str] = lambda name: name

    def load(self, base: Base) -> LoadedHeads:
        reading = Reading(self, base)
        made = partial(self.build(reading), dtype=reading.dtype)
        with loadable(DESCRIBES, str(self.stored.origin)):
            described = made(device="meta")
        if self.others is not None:
            expected = map(reading.stored_name, described.weights)
            beside = [self.names.get(name, name) for name in self.others]
            check_names(self.stored, expected, reading.what, optional=beside)
        reading.check_shapes({name: tuple(weight.shape) for name, weight in described.weights.items()})
        heads = made(device=base.device)
        with torch.no_grad():
            for name, weight in heads.weights.items():
                if name in reading.tensors:
                    weight.copy_(reading.tensors[name])
        files = sorted({self.stored.parts[name] for name in self.names.values()})
        said = reading.config.get("base_model_name_or_path")
        named = said if isinstance(said, str) and said else None
        return LoadedHeads(heads.requires_grad_(False).eval(), self.layout, tuple(files), tuple(reading.notes), named)


class Published(NamedTuple):
    """Heads as a reader of their layout wants them: a file of tensors, and config.json beside it unless None."""

    file: str
    tensors: dict[str, Tensor]
    config: dict[str, object] | None


def check_names(
    stored: StoredTensors,
    expected: Iterable[str],
    what: str,
    *,
    known: Iterable[str] = (),
    optional: Iterable[str] = (),
    among: Iterable[str] = (),
) -> list[str]:
    """The ``expected`` names, which must all be there and, but for ``optional`` ones, no others.

    known : names of the layout; where one is missing they are no strangers, since it is the count that may be wrong
    among : the names to look for strangers in, if not all
    """
    names = list(islice(expected, len(stored.parts) + 1))  # damaged names may count to millions
    missing = [name for name in names if name not in stored.parts]
    allowed = {*names, *optional, *(known if missing else ())}
    strange = [name for name in among or stored.parts if name not in allowed]
    if missing or strange:
        faults = [f"{quoted(missing[0])} is missing"] if missing else []
        faults += [f"{quoted(strange[0])} is not one of them"] if strange else []
        raise InvalidInput(f"{stored.origin} must hold exactly the tensors of {what}, but {' and '.join(faults)}.")
    return names


def most_common(sizes: Iterable[int]) -> int:
    return next((size for size, _ in Counter(sizes).most_common(1)), 0)


class Reading:
    """The tensors of a recognised checkpoint, all finite.

    names   : the file's name of every tensor, by that of its layout
    tensors : those with weights, by the names of their layout
    dtype   : the base's, or one that holds all of them
    notes   : a sentence for whatever is odd
    """

    def __init__(self, checkpoint: Checkpoint, base: Base) -> None:
        self.stored, self.names, self._prefix = checkpoint.stored, checkpoint.names, checkpoint.prefix
        self.base, self.config, self.notes = base, self.stored.config, list(self.stored.notes)
        self.what = f"a drafter in the layout {checkpoint.layout!r}"
        self.tensors = self.floats([name for name in self.names if name not in checkpoint.apart], base.dtype)
        stored_as = (tensor.dtype for tensor in self.tensors.values())
        self.dtype = base.dtype or reduce(torch.promote_types, stored_as)

    def stored_name(self, name: str) -> str:
        return self.names.get(name, self._prefix(name))

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name; InvalidInput where it is missing."""
        self.check_there(name)
        return self.tensors[name]

    def check_there(self, name: str) -> None:
        if name not in self.names:
            check_names(self.stored, [*self.names.values(), self.stored_name(name)], self.what)

    def said(self, name: str) -> str:
        return f"{quoted(self.names[name])} in {self.stored.origin}"

    def floats(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors of these names, which must be finite, and so in ``dtype`` too."""
        tensors = {name: self.stored.read(self.names[name]) for name in names}
        for name, tensor in tensors.items():
            if tensor.dtype not in FLOATS:
                raise InvalidInput(f"Heads must be stored as floats, but {self.said(name)} is {short(tensor.dtype)}.")
            if not bool(torch.isfinite(tensor.to(dtype or tensor.dtype)).all()):
                raise InvalidInput(
                    f"Weights must be finite, but {self.said(name)} has NaN, infinities, or numbers that are too large "
                    f"for {short(dtype or tensor.dtype)}."
                )
        return tensors

    def integers(self, name: str) -> Tensor:
        """A list of whole numbers, such as ids of tokens; InvalidInput where it is missing."""
        self.check_there(name)
        found = self.stored.read(self.names[name])
        if found.ndim != 1 or found.dtype != torch.int64 or not len(found):
            kind = f"{short(found.dtype)} of shape {tuple(found.shape)}"
            raise InvalidInput(f"{self.said(name)} must be a list of int64 numbers, but it is {kind}.")
        return found

    def most_common_size(self, pattern: str, dimension: int = 0) -> int:
        """The commonest size in a dimension, of the tensors whose names have the pattern in them."""
        tensors = [tensor for name, tensor in self.tensors.items() if re.search(pattern, name)]
        return most_common(tensor.shape[dimension] for tensor in tensors if -tensor.ndim <= dimension < tensor.ndim)

    def check_shapes(self, shapes: Shapes) -> None:
        """Raise where the shape of a tensor is another, and name one beside it that has it right.

        Names of no tensor count for nothing.
        """
        tensors = self.tensors
        shapes = {name: shape for name, shape in shapes.items() if name in tensors}
        for name, expected in shapes.items():
            if tensors[name].shape != expected or not tensors[name].numel():
                alike = (n for n, shape in shapes.items() if n != name and shape == expected == tensors[n].shape)
                like = next((f" like {quoted(self.names[n])}" for n in alike), "")
                raise InvalidInput(
                    f"{quoted(self.names[name])} must have the shape {expected}{like}, but in {self.stored.origin} it has "
                    f"{tuple(tensors[name].shape)}."
                )

    def count_notes(self, claims: Iterable[object], num_heads: int, num_layers: int) -> None:
        """Note where config.json claims other numbers of heads and blocks than the file has."""
        for claim, what, count in zip(claims, ("heads", "blocks per head"), (num_heads, num_layers), strict=True):
            if claim not in (None, count):
                self.notes.append(f"config.json says {quoted(claim)} {what}, the file has {count}: {count} are used.")

    def lm_head(self, width: int) -> Tensor:
        """The target's (V, d) projection, for a checkpoint without one of its own; InvalidInput where it does not fit."""
        lm_head = self.base.lm_head
        if lm_head is None or lm_head.ndim != 2 or lm_head.shape[1] != width:
            lacks = "it needs the target" if lm_head is None else f"that has the shape {tuple(lm_head.shape)}"
            raise InvalidInput(
                f"{self.stored.origin} has width {width} and guesses with the target's lm_head, but {lacks}: pass "
                "`model`, which it was trained for."
            )
        return lm_head.detach()

    def embedding(self, name: str, vocab_size: int, width: int) -> Tensor:
        """The target's (V, d) input embeddings where the checkpoint's own are a copy of them or are not there.

        Where they differ the heads were trained on their own, which are used.
        """
        self.check_shapes({name: (vocab_size, width)})
        own, target = self.tensors.get(name), self.base.embedding
        if own is None:
            if target is None:
                raise InvalidInput(f"{quoted(name)} is missing in {self.stored.origin}: pass `model`, which has it.")
            self.notes.append(f"The file has no {name}: the target's input embeddings are used.")
            return target
        if target is None:
            return own
        if is_copy(own, target):
            return target.detach().to(self.dtype)
        self.notes.append(
            f"{quoted(self.names[name])} is not a copy of the target's input embeddings: these heads were trained for "
            "another model or an older state of it. The file's own embeddings are used."
        )
        return own


def is_copy(own: Tensor, target: Tensor) -> bool:
    """Whether a tensor of a checkpoint is the target's but for rounding."""
    if own.shape != target.shape:
        return False
    mine, other = own.to(target.device, torch.float32), target.detach().float()
    return torch.allclose(mine, other, rtol=ROUNDING, atol=ROUNDING * float(mine.abs().mean()))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_heads(path_or_id: str, base: Base, revision: str | None = None) -> LoadedHeads:
    """The heads in a file, a folder or a hub repository, in any published layout.

    Raises Unsupported, by name, for other drafters and InvalidInput for everything that does not fit together.
    """
    return open_checkpoint(path_or_id, revision).load(base)


class NoHeads(InvalidInput):
    """A file or folder without heads in a layout that is read."""


def open_checkpoint(path_or_id: str, revision: str | None = None) -> Checkpoint:
    """Find and recognise a checkpoint by its names; no tensor of safetensors is read."""
    stored = find_tensors(find_checkpoint(path_or_id, revision))
    for kind, row in DRAFTERS.items():
        found: Checkpoint | None = part_of(kind, "recognises")(stored) if row.recognises else None
        if found is not None:
            return found
    names = sorted(stored.parts)
    shown = ", ".join(map(quoted, names[:3])) + " ..." * (len(names) > 3)
    layouts = ", ".join(LAYOUTS)
    raise NoHeads(f"{stored.origin} must hold heads in a layout ({layouts}), but its tensors are: {shown or 'none'}.")
