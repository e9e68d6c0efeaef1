"""Read and write the published layouts of Medusa's heads.

A layout is recognised by the tensors' names. Counts come from the tensors: another count in config.json is told in a note,
another width or vocabulary is refused.

d width · V vocabulary · K heads · L blocks · k head · l block of it
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from treeopt.errors import Unsupported
from treeopt.runtime.checkpoints.files import HEAD_FILES, StoredTensors
from treeopt.runtime.checkpoints.reading import Checkpoint, Published, Reading, check_names, most_common
from treeopt.runtime.drafters.medusa import MedusaHeads

PREFIXES = {"medusa": "", "merged": "medusa_head.", "modelopt": "medusa_heads.", "neuron": "medusa_head_"}
PLACE = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.(linear\.(?:weight|bias)|weight)", re.ASCII)
WITH_BASE = ("merged", "modelopt")  # whose files hold the base's tensors too
COUNTS = ("medusa_num_heads", "medusa_num_layers")  # config.json's keys of heads and blocks
NESTED_COUNTS = ("num_medusa_heads", "num_medusa_layers")  # Model Optimizer's, under the key medusa
FILES = {
    "medusa": "medusa_lm_head.safetensors",
    "medusa-pt": "medusa_lm_head.pt",
    "medusa-shared": "medusa_lm_head.safetensors",
    "neuron": "medusa_heads.pt",
}


def places(stored: StoredTensors, prefix: str) -> dict[str, re.Match[str]]:
    """The tensors that have this prefix and are of a head: their names, and the match of the rest with `PLACE`."""
    rests = {name: name.removeprefix(prefix) for name in stored.parts if name.startswith(prefix)}
    return {name: place for name, rest in rests.items() if (place := PLACE.fullmatch(rest))}


def weight_names(num_heads: int, num_layers: int, *, projections: bool = True) -> Iterator[str]:
    """The names of `MedusaHeads.weights`."""
    for k, layer, kind in product(range(num_heads), range(num_layers), ("weight", "bias")):
        yield f"{k}.{layer}.linear.{kind}"
    for k in range(num_heads if projections else 0):
        yield f"{k}.{num_layers}.weight"


def recognise_medusa(stored: StoredTensors) -> Checkpoint | None:
    """Recognise heads by their names, in any layout, whose tensors all must be there; None where they are another's."""
    by_layout = {layout: places(stored, prefix) for layout, prefix in PREFIXES.items()}
    layout = max(by_layout, key=lambda layout: len(by_layout[layout]))
    found, prefix = by_layout[layout], PREFIXES[layout]
    if not found:
        return None
    if layout in WITH_BASE and (stored.origin.name in HEAD_FILES or len(found) == len(stored.parts)):
        layout = "medusa"  # the heads alone, saved with their prefix
    of_projections = [int(place[2]) for place in found.values() if place[3] == "weight"]
    of_blocks = [int(place[2]) for place in found.values() if place[3] != "weight"]
    num_heads = 1 + max(int(place[1]) for place in found.values())
    num_layers = most_common(of_projections) or 1 + max(of_blocks, default=0)
    if layout == "medusa" and not of_projections:
        layout = "medusa-shared"
    expected = weight_names(num_heads, num_layers, projections=layout != "medusa-shared")
    names = check_names(
        stored,
        (prefix + name for name in expected),
        f"{num_heads} heads of {num_layers} blocks in the layout {layout!r}",
        known=found,
        among=[name for name in stored.parts if layout not in WITH_BASE or "medusa" in name.lower()],
    )
    by_name, build = {name.removeprefix(prefix): name for name in names}, partial(_build, layout, num_heads, num_layers)
    return Checkpoint(stored, layout, by_name, build, shares=layout == "medusa-shared")


def _build(layout: str, num_heads: int, num_layers: int, reading: Reading) -> Callable[..., MedusaHeads]:
    config, tensors, nested = reading.config, reading.tensors, reading.config.get("medusa")
    claims = map(nested.get, NESTED_COUNTS) if isinstance(nested, dict) else map(config.get, COUNTS)
    reading.count_notes(claims, num_heads, num_layers)
    width, shared = reading.most_common_size("", -1), None
    projections = [name for k in range(num_heads) if (name := f"{k}.{num_layers}.weight") in tensors]
    vocab_size = most_common(tensors[name].shape[0] for name in projections if tensors[name].ndim)
    reading.check_shapes(dict.fromkeys(projections, (vocab_size, width)))
    if layout == "medusa-shared":
        shared = reading.lm_head(width)
        vocab_size = len(shared)
        reading.notes.append("The heads share the target's lm_head.")
    elif layout in WITH_BASE:
        reading.notes.append("The files also hold the base that the heads belong to: pass them as `model` too.")
    of_vocabulary = reading.names[projections[0]] if projections else "lm_head.weight"
    config.check_sizes(
        {"hidden_size": (width, next(iter(reading.names.values()))), "vocab_size": (vocab_size, of_vocabulary)}
    )
    return partial(MedusaHeads, num_heads, num_layers, width, vocab_size, shared=shared)


def publish_medusa(heads: MedusaHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    """The files of a layout; Unsupported where it would lose something of the heads."""
    _check_layout(heads, layout, lm_head)
    tensors = heads.weights
    config: dict[str, object] = dict(zip(COUNTS, (heads.num_heads, heads.num_layers), strict=True))
    config["base_model_name_or_path"] = base
    if layout == "medusa-shared":
        config["version"] = "2"
        for k in range(heads.num_heads):
            del tensors[f"{k}.{heads.num_layers}.weight"]
    if layout == "neuron":
        return Published(FILES[layout], {PREFIXES[layout] + name: tensor for name, tensor in tensors.items()}, None)
    return Published(FILES[layout], tensors, config)


def _check_layout(heads: MedusaHeads, layout: str, lm_head: Tensor | None) -> None:
    """Raise Unsupported where ``layout`` would lose something of ``heads``."""
    fault = None
    if heads.num_layers != 1 and layout in ("medusa-shared", "neuron"):
        fault = f"these have {heads.num_layers} residual blocks where it has one"
    elif layout == "medusa-shared":
        projections = heads.projection.transpose(1, 2)
        if lm_head is None and not heads.shares_projection:
            fault = "these have projections of their own: pass `model` if they are copies of the base's lm_head"
        elif lm_head is not None and not all(torch.equal(p, lm_head.to(p.device, p.dtype)) for p in projections):
            fault = "these have projections other than the base's lm_head, which is all that it has"
    if fault:
        raise Unsupported(f"The layout {layout!r} cannot hold these heads: {fault}.")
