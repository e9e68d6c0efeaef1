"""Read and write the published layouts of Medusa's heads.

A layout is recognised by the tensors' names; config.json is only asked where names say nothing. Counts come from the
tensors: another count in config.json is told in a note, another width or vocabulary is refused.

d width · V the target's vocabulary · Vt tokens that the heads know · K heads · L blocks · k head · l block of it
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported
from treeopt.runtime.checkpoints.files import HEAD_FILES, StoredTensors
from treeopt.runtime.checkpoints.reading import Checkpoint, Published, Reading, check_names, most_common
from treeopt.runtime.drafters.medusa import MedusaHeads

COUNTS = {  # config.json's keys of heads and blocks
    "vllm": ("num_heads", "num_hidden_layers"),
    "modelopt": ("num_medusa_heads", "num_medusa_layers"),
}
OWN_COUNTS = ("medusa_num_heads", "medusa_num_layers")
WITH_BASE = ("merged", "modelopt")  # whose files hold the base's tensors too

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
    Scheme("vllm", "", *VLLM),
    Scheme("vllm", "medusa_heads.", *VLLM),
)


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


def recognise_medusa(stored: StoredTensors) -> Checkpoint | None:
    """Recognise heads by their names, in any layout, whose tensors all must be there; None where they are another's."""
    matches = {scheme: {n: place for n in stored.parts if (place := scheme.place(n))} for scheme in SCHEMES}
    scheme = max(SCHEMES, key=lambda scheme: len(matches[scheme]))
    found, config = matches[scheme], stored.config
    if not found:
        return None
    layout = scheme.layout
    if layout in WITH_BASE and (stored.origin.name in HEAD_FILES or len(found) == len(stored.parts)):
        layout = "medusa"  # the heads alone, saved with their prefix

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
    heads = RecognisedHeads(layout, scheme, num_heads, num_layers, names, present, shares, mapped)
    apart = [mapped] if mapped else []
    all_names = {name: name for name in (*names, *apart)}
    return Checkpoint(stored, layout, all_names, partial(_build, heads), apart, shares=layout == "medusa-shared")


def named_weights(heads: MedusaHeads, scheme: Scheme) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the heads, as a view of the shape that files have, with its name."""
    for k in range(heads.num_heads):
        for layer in range(heads.num_layers):
            yield scheme.block_name(k, layer, "weight"), heads.blocks[layer, k].T
            yield scheme.block_name(k, layer, "bias"), heads.biases[layer, k, 0]
        yield scheme.projection_name(k, heads.num_layers), heads.projection[0 if heads.shares_projection else k].T


def _build(found: RecognisedHeads, reading: Reading) -> tuple[MedusaHeads, Iterator[tuple[str, Tensor]]]:
    layout, config, notes, tensors = found.layout, reading.config, reading.notes, reading.tensors
    counts, nested = COUNTS.get(layout, OWN_COUNTS), config.get("medusa")
    claims = nested if layout == "modelopt" and isinstance(nested, dict) else config
    reading.count_notes(map(claims.get, counts), found.num_heads, found.num_layers)
    width = reading.most_common_size("", -1)
    length = most_common(tensors[name].shape[0] for name in found.projections if tensors[name].ndim)
    kinds = {"weight": (width, width), "bias": (width,)}
    shapes = {name: kinds[name.rpartition(".")[2]] for name in found.names}
    shapes |= dict.fromkeys(found.projections, (length, width))
    reading.check_shapes(shapes, f"{found.num_heads} heads of width {width}")
    config.check_sizes({"hidden_size": (width, found.names[0])})

    rows = [tensors[name] for name in found.projections]
    rows = [rows[0].clone()] if found.shares and rows else rows  # it is kept, and the file may change
    token_ids, vocab_size = None, length
    if layout == "medusa-shared":
        rows = [reading.lm_head(width)]
        vocab_size = len(rows[0])
        notes.append("The heads share the target's lm_head.")
    elif layout in WITH_BASE:
        notes.append("The files also hold the base that the heads belong to: pass them as `model` too.")
    if found.token_map:
        rows, token_ids, vocab_size = _truncated(reading, rows, reading.integers(found.token_map))
    elif layout == "vllm" and config.get("truncated_vocab_size") not in (None, config.get("vocab_size") or length):
        raise config.wrong("truncated_vocab_size", "vocab_size where there is no token_map")
    else:
        config.check_sizes({"vocab_size": (vocab_size, (*found.projections, "lm_head.weight")[0])})

    heads = MedusaHeads(
        found.num_heads,
        found.num_layers,
        width,
        vocab_size,
        shared=rows[0] if found.shares else None,
        token_ids=token_ids,
        dtype=reading.dtype,
        device=reading.base.device,
    )
    tensors |= zip(found.projections, rows, strict=False)
    return heads, named_weights(heads, found.scheme)


def _truncated(
    reading: Reading, projections: list[Tensor], token_map: Tensor
) -> tuple[list[Tensor], Tensor | None, int]:
    """vLLM's projections in the order of target ids, these ids, and the target's vocabulary.

    token_map says the target id of every draft token; the rows of the projections are draft tokens, or all
    of the vocabulary's tokens, of which token_map takes some. As in vLLM it counts only where
    truncated_vocab_size is below vocab_size.
    """
    config, notes, lm_head = reading.config, reading.notes, reading.base.lm_head
    rows, claimed, origin = len(projections[0]), config.get("truncated_vocab_size"), reading.stored.origin
    vocab_size = config.get("vocab_size") or (None if lm_head is None else len(lm_head))
    if rows == vocab_size and claimed in (None, rows):
        notes.append("token_map is ignored, as in vLLM, since config.json says no smaller truncated_vocab_size.")
        return projections, None, rows
    if vocab_size is None:
        vocab_size = max(rows, int(token_map.max()) + 1)
        notes.append(f"config.json lacks vocab_size: {vocab_size} is taken, from token_map and the projections.")
    elif config.get("vocab_size"):
        config.number("vocab_size")
    if rows not in (len(token_map), vocab_size):
        raise InvalidInput(
            f"The projections must have a row for each of the {len(token_map)} tokens of token_map or of the "
            f"{vocab_size} of the vocabulary, but in {origin} they have {rows}."
        )
    if claimed is None:
        notes.append(f"config.json lacks truncated_vocab_size, which vLLM needs: {len(token_map)} is used.")
    elif claimed != len(token_map):
        raise config.wrong("truncated_vocab_size", f"that of token_map, {len(token_map)}")
    token_ids, order = token_map.sort()
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size or bool((token_ids.diff() == 0).any()):
        raise InvalidInput(f"token_map in {origin} must have distinct token ids below the vocabulary's {vocab_size}.")
    picked = order if rows == len(token_map) else token_ids
    return [tensor[picked] for tensor in projections], token_ids, vocab_size


FILES = {
    "medusa": "medusa_lm_head.safetensors",
    "medusa-pt": "medusa_lm_head.pt",
    "medusa-shared": "medusa_lm_head.safetensors",
    "neuron": "medusa_heads.pt",
}


def publish_medusa(heads: MedusaHeads, layout: str, base: str, lm_head: Tensor | None) -> Published:
    """The files of a layout; Unsupported where it would lose something of the heads."""
    _check_layout(heads, layout, lm_head)
    scheme = next(scheme for scheme in SCHEMES if scheme.layout == ("neuron" if layout == "neuron" else "medusa"))
    tensors = dict(named_weights(heads, scheme))
    config: dict[str, object] = dict(zip(OWN_COUNTS, (heads.num_heads, heads.num_layers), strict=True))
    config["base_model_name_or_path"] = base
    if layout == "medusa-shared":
        config["version"] = "2"
        for k in range(heads.num_heads):
            del tensors[scheme.projection_name(k, heads.num_layers)]
    return Published(FILES[layout], tensors, None if layout == "neuron" else config)


def _check_layout(heads: MedusaHeads, layout: str, lm_head: Tensor | None) -> None:
    """Raise Unsupported where ``layout`` would lose something of ``heads``."""
    fault = None
    if heads.token_ids is not None:
        fault = f"these know {heads.draft_vocab_size} of {heads.vocab_size} tokens, and it has no token map"
    elif heads.num_layers != 1 and layout in ("medusa-shared", "neuron"):
        fault = f"these have {heads.num_layers} residual blocks where it has one"
    elif layout == "medusa-shared":
        projections = heads.projection.transpose(1, 2)
        if lm_head is None and not heads.shares_projection:
            fault = "these have projections of their own: pass `model` if they are copies of the base's lm_head"
        elif lm_head is not None and not all(torch.equal(p, lm_head.to(p.device, p.dtype)) for p in projections):
            fault = "these have projections other than the base's lm_head, which is all that it has"
    if fault:
        raise Unsupported(f"The layout {layout!r} cannot hold these heads: {fault}.")
