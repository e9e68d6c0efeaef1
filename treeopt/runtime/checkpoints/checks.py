"""Checks of every checkpoint, whatever its layout: types, numbers, shapes, and config.json beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.drafters.states import Heads

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ROUNDING = 2**-7  # of bfloat16, relative: tensors that differ by less are copies in another precision

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Base:
    """The model that heads belong to, as far as it is at hand.

    lm_head       : (V, d) weight, which heads without a projection of their own share
    embedding     : (V, d) input embeddings, which Hydra and EAGLE read; without it their own copy
    config        : for what a layer's tensors do not say (Hydra++; EAGLE without a config.json)
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
    """Heads, and where they came from."""

    heads: Heads
    layout: str
    files: tuple[Path, ...]  # the files of weights that were read
    notes: tuple[str, ...]  # a sentence for whatever was repaired or is worth knowing
    base: str | None  # the base model that config.json names


class Checkpoint(NamedTuple):
    """A checkpoint of heads that was recognised by its names; ``build`` reads its tensors and checks them.

    shares : whether the heads guess with the base's lm_head, which is not among them
    """

    stored: StoredTensors
    layout: str
    build: Callable[[Base], LoadedHeads]
    shares: bool = False


class Published(NamedTuple):
    """Heads as a reader of their layout wants them: a file of tensors, and config.json beside it unless None."""

    file: str
    tensors: dict[str, Tensor]
    config: dict[str, object] | None


def loaded_heads(
    heads: Heads, layout: str, stored: StoredTensors, names: Iterable[str], notes: list[str]
) -> LoadedHeads:
    files = tuple(sorted({file for name in names for file in stored.parts[name]}))
    base = stored.config.get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else None
    return LoadedHeads(heads.requires_grad_(False).eval(), layout, files, tuple(notes), named)


def check_names(
    stored: StoredTensors,
    expected: Iterable[str],
    what: str,
    *,
    known: Iterable[str],
    optional: Iterable[str] = (),
    among: Iterable[str] | None = None,
) -> list[str]:
    """The ``expected`` names, which must all be there and, but for ``optional`` ones, no others.

    known : names of the layout; where one is missing they are no strangers, since it is the count that may be wrong
    among : the names to look for strangers in, if not all
    """
    present: list[str] = []
    missing = None
    for name in expected:
        if name not in stored.parts:
            missing = name
            break
        present.append(name)
    allowed = {*present, *optional, *(known if missing else ())}
    strange = [name for name in (stored.parts if among is None else among) if name not in allowed]
    if missing or strange:
        faults = [f"{quoted(missing)} is missing"] if missing else []
        faults += [f"{quoted(strange[0])} is not one of them"] if strange else []
        raise InvalidInput(f"{stored.origin} must hold exactly the tensors of {what}, but {' and '.join(faults)}.")
    return present


def read_floats(
    stored: StoredTensors, names: Iterable[str], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], torch.dtype]:
    """The tensors of these names, all finite in ``dtype``, which is also returned; by default one that holds all of them."""
    tensors = {name: stored.read(name) for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise InvalidInput(
                f"Heads must be stored as float16, bfloat16, float32 or float64, but {quoted(name)} in "
                f"{stored.origin} is {str(tensor.dtype).removeprefix('torch.')}: export them unquantised."
            )
    dtype = dtype or reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidInput(f"Weights must be finite, but {quoted(name)} in {stored.origin} has NaN or infinities.")
        if tensor.dtype != dtype and not bool(torch.isfinite(tensor.to(dtype)).all()):
            raise InvalidInput(
                f"{quoted(name)} in {stored.origin} has weights that are too large for "
                f"{str(dtype).removeprefix('torch.')}: use another `dtype`."
            )
    return tensors, dtype


def check_shapes(stored: StoredTensors, tensors: dict[str, Tensor], shapes: Shapes, what: str) -> None:
    """Raise where one of ``shapes`` is not its tensor's; another tensor that has it right is named beside it.

    Names of no tensor count for nothing.
    """
    shapes = {name: shape for name, shape in shapes.items() if name in tensors}
    for name, expected in shapes.items():
        if tensors[name].shape != expected or not tensors[name].numel():
            alike = (n for n, shape in shapes.items() if shape == expected == tensors[n].shape)
            like = next((f" like {quoted(n)}" for n in alike if n != name), "")
            raise InvalidInput(
                f"{stored.origin} holds {what}, so {quoted(name)} must have the shape {expected}{like}, but it has "
                f"{tuple(tensors[name].shape)}."
            )


def targets_lm_head(stored: StoredTensors, lm_head: Tensor | None, width: int) -> Tensor:
    """The target's (V, d) projection, for a checkpoint without one of its own; InvalidInput where it does not fit."""
    if lm_head is None:
        raise InvalidInput(
            f"{stored.origin} holds no projection and guesses with the target's lm_head, so it needs the target: "
            "pass `model`."
        )
    if lm_head.ndim != 2 or lm_head.shape[1] != width:
        raise InvalidInput(
            f"{stored.origin} has width {width} and guesses with the target's lm_head, but that has the shape "
            f"{tuple(lm_head.shape)}: pass the `model` that it was trained for."
        )
    return lm_head.detach()


def most_common(sizes: Iterable[int]) -> int:
    return next((size for size, _ in Counter(sizes).most_common(1)), 0)


def size_of(tensors: dict[str, Tensor], ends: tuple[str, ...], dimension: int) -> int:
    """The commonest size in a dimension, of the tensors whose names end in one of ``ends``."""
    return most_common(
        t.shape[dimension] for name, t in tensors.items() if name.endswith(ends) and -t.ndim <= dimension < t.ndim
    )


def check_size(stored: StoredTensors, key: str, size: int, name: str, told: Mapping[str, Any] | None = None) -> None:
    """Raise where config.json, or ``told`` of it, says another width or vocabulary than tensor ``name`` has."""
    said = (stored.config if told is None else told).get(key)
    if said not in (None, size):
        raise InvalidInput(
            f"config.json must describe the heads beside it, but it says {key} {quoted(said)} where "
            f"{quoted(name)} of {stored.origin} has {size}: one of them is another model's."
        )


def count_notes(claims: tuple[object, object], num_heads: int, num_layers: int) -> list[str]:
    """Notes where config.json claims other numbers of heads and blocks than the file has."""
    counts = ("heads", num_heads), ("blocks per head", num_layers)
    return [
        f"config.json says {quoted(claim)} {what}, the file has {count}: {count} are used."
        for claim, (what, count) in zip(claims, counts, strict=True)
        if claim is not None and claim != count
    ]


def choose_embedding(
    stored: StoredTensors, name: str, own: Tensor | None, target: Tensor | None, dtype: torch.dtype, notes: list[str]
) -> Tensor:
    """The target's input embeddings where the checkpoint's ``own`` are a copy of them or are not there.

    Where they differ the heads were trained on their own, which are used.
    """
    if target is None:
        if own is None:
            raise InvalidInput(
                f"{quoted(name)} is missing in {stored.origin}: pass `model`, which has these embeddings."
            )
        return own
    if own is None:
        notes.append(f"The file has no {name}: the target's input embeddings are used.")
        return target
    kept = target.detach()
    if kept.shape == own.shape:
        mine, other = own.to(kept.device, torch.float32), kept.float()
        if torch.allclose(mine, other, rtol=ROUNDING, atol=ROUNDING * float(mine.abs().mean())):
            return kept.to(dtype)
    notes.append(
        f"{quoted(name)} is not a copy of the target's input embeddings: these heads were trained for another model or "
        "an older state of it. The file's own embeddings are used."
    )
    return own
