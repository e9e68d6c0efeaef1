"""How the published layouts of Medusa heads name their tensors.

A layout is recognised by the tensors' names; config.json is only asked where names say nothing.

k head · l residual block of it · L blocks (the place of the projection in Medusa's own names)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from torch import Tensor

from treeopt.errors import InvalidInput, quoted
from treeopt.runtime.checkpoints.files import StoredTensors
from treeopt.runtime.checkpoints.reading import check_names, most_common
from treeopt.runtime.drafters.medusa import MedusaHeads

WITH_BASE = ("merged", "modelopt", "tensorrt-llm")  # whose files hold the base's tensors too

Place = tuple[int, int, str]  # of a tensor: its head, its block, and weight, bias or projection


@dataclass(frozen=True)
class Scheme:
    """The names of one layout: ``block`` and ``projection`` come behind ``prefix``."""

    layout: str
    prefix: str
    block: str = "{k}.{l}.linear"
    projection: str = "{k}.{L}.weight"

    def block_name(self, head: int, layer: int, kind: str) -> str:
        return f"{self.prefix}{self.block.format(k=head, l=layer)}.{kind}"

    def projection_name(self, head: int, num_layers: int) -> str:
        return self.prefix + self.projection.format(k=head, L=num_layers)

    def place(self, name: str) -> Place | None:
        """The place of a tensor; the block of a projection is the number of blocks, 0 where its name does not tell."""
        if match := _pattern(self.prefix + self.block, r"\.(weight|bias)").fullmatch(name):
            return int(match[1]), int(match[2]), match[3]
        match = _pattern(self.prefix + self.projection).fullmatch(name)
        return match and (int(match[1]), int(match[match.lastindex or 1]) * (match.lastindex == 2), "projection")


@cache
def _pattern(template: str, end: str = "") -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{[klL]\\}", "(0|[1-9][0-9]{0,3})", re.escape(template)) + end)


VLLM = "blocks.{k}.layers.{l}", "lm_heads.{k}.weight"
SCHEMES = (
    Scheme("medusa", ""),
    Scheme("merged", "medusa_head."),
    Scheme("modelopt", "medusa_heads."),
    Scheme("neuron", "medusa_head_"),
    Scheme("tensorrt-llm", "medusa_heads.", "{k}.medusa_layers.{l}.linear", "{k}.lm_head.weight"),
    Scheme("vllm", "", *VLLM),
    Scheme("vllm", "medusa_heads.", *VLLM),
)


def scheme_of(layout: str) -> Scheme:
    """The names that are written in ``layout``."""
    base = "medusa" if layout in ("medusa-pt", "medusa-shared") else layout
    return next(scheme for scheme in SCHEMES if scheme.layout == base)


@dataclass(frozen=True)
class RecognisedHeads:
    """A checkpoint of heads whose tensors are all accounted for, by name."""

    layout: str
    scheme: Scheme
    num_heads: int
    num_layers: int
    names: list[str]  # of all tensors of the heads but the token map
    projections: list[str]  # one per head; one that all share; none: they share the target's lm_head
    shares: bool
    token_map: str | None


def recognise(stored: StoredTensors) -> RecognisedHeads | None:
    """The layout, heads and blocks that the names tell; None where no name is of Medusa heads.

    Where something is missing or left over it is refused by name.
    """
    matches = {scheme: {n: place for n in stored.parts if (place := scheme.place(n))} for scheme in SCHEMES}
    scheme = max(SCHEMES, key=lambda scheme: len(matches[scheme]))
    found, config = matches[scheme], stored.config
    if not found:
        return None
    layout = scheme.layout
    if layout in ("merged", "modelopt") and (stored.own or len(found) == len(stored.parts)):
        layout = "medusa"  # the heads alone, saved with their prefix
    if stored.ranks and layout != "tensorrt-llm":
        name = quoted(next(iter(found)))
        raise InvalidInput(
            f"Rank files must hold TensorRT-LLM's tensors, but {stored.origin} has names such as {name}."
        )

    # A projection's own number of blocks counts most, where names tell it.
    kinds = {kind for _, _, kind in found.values()}
    told = most_common(layer for _, layer, kind in found.values() if kind == "projection" and layer)
    num_heads = 1 + max(head for head, _, _ in found.values())
    num_layers = told or 1 + max((layer for _, layer, kind in found.values() if kind != "projection"), default=0)
    if layout == "medusa" and "projection" not in kinds:
        layout = "medusa-shared"
    biased = layout != "vllm" or "bias" in kinds or bool(config.get("medusa_fc_bias"))
    shares = layout == "medusa-shared" or (layout == "vllm" and bool(config.get("original_lm_head")))
    projections: Iterator[str] = (scheme.projection_name(k, num_layers) for k in range(0 if shares else num_heads))
    if shares and layout == "vllm":
        one = scheme.prefix + "lm_head.weight"  # vLLM takes this name, and head 0's
        projections = iter([one if one in stored.parts else scheme.projection_name(0, num_layers)])
    token_map = scheme.prefix + "token_map" if layout == "vllm" else ""
    blocks = product(range(num_heads), range(num_layers), ("weight", "bias") if biased else ("weight",))
    names = check_names(
        stored,
        chain((scheme.block_name(*block) for block in blocks), projections),
        f"{num_heads} heads of {num_layers} blocks in the layout {layout!r}",
        known=found,
        optional=[token_map],
        among=[name for name in stored.parts if layout not in WITH_BASE or "medusa" in name.lower()],
    )
    present = names[num_heads * num_layers * (1 + biased) :]
    mapped = token_map if token_map in stored.parts else None
    return RecognisedHeads(layout, scheme, num_heads, num_layers, names, present, shares, mapped)


def named_weights(heads: MedusaHeads, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the heads, as a view of the shape that files have, with its name."""
    for k in range(heads.num_heads):
        for layer in range(heads.num_layers):
            yield scheme.block_name(k, layer, "weight"), heads.blocks[layer, k].T
            yield scheme.block_name(k, layer, "bias"), heads.biases[layer, k, 0]
        yield scheme.projection_name(k, heads.num_layers), heads.projection[0 if heads.shares_projection else k].T
