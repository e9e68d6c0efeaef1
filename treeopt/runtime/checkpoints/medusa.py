"""Read and write the published layouts of Medusa's heads.

A layout is recognised by the tensors' names; config.json is only asked where names say nothing. Counts come from the
tensors: another count in config.json is told in a note, another width or vocabulary is refused.

d width · V the target's vocabulary · Vt tokens that the heads know · K heads · L blocks · k head · l block of it
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

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
    projection: str = "{k}.{l}.weight"

    def name(self, head: int, layer: int, kind: str) -> str:
        """The name of the tensor at a place; the block of a projection is the number of blocks."""
        if kind == "projection":
            return self.prefix + self.projection.format(k=head, l=layer)
        return f"{self.prefix}{self.block.format(k=head, l=layer)}.{kind}"

    def place(self, name: str) -> Place | None:
        """The place of a tensor; the block of a projection is 0 where its name does not tell."""
        if match := _pattern(self.prefix + self.block, r"\.(weight|bias)").fullmatch(name):
            return int(match[1]), int(match[2]), match[3]
        match = _pattern(self.prefix + self.projection).fullmatch(name)
        return match and (int(match[1]), int(match[match.lastindex or 1]) * (match.lastindex == 2), "projection")


@cache
def _pattern(template: str, end: str = "") -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{[kl]\\}", "(0|[1-9][0-9]{0,3})", re.escape(template)) + end)


VLLM = "blocks.{k}.layers.{l}", "lm_heads.{k}.weight"
SCHEMES = (
    Scheme("medusa", ""),
    Scheme("merged", "medusa_head."),
    Scheme("modelopt", "medusa_heads."),
    Scheme("neuron", "medusa_head_"),
    Scheme("vllm", "", *VLLM),
    Scheme("vllm", "medusa_heads.", *VLLM),
)
TOKEN_MAP = "token_map"


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
    shares_own = layout == "vllm" and bool(config.get("original_lm_head"))  # one projection of all heads, in the file
    projections = 0 if layout == "medusa-shared" else 1 if shares_own else num_heads
    shared_name = scheme.prefix + "lm_head.weight"  # vLLM takes this name, and head 0's

    def places() -> Iterator[Place]:
        yield from product(range(num_heads), range(num_layers), ("weight", "bias") if biased else ("weight",))
        yield from ((k, num_layers, "projection") for k in range(projections))

    def stored_name(place: Place) -> str:
        is_shared = shares_own and place[2] == "projection" and shared_name in stored.parts
        return shared_name if is_shared else scheme.name(*place)

    token_map = scheme.prefix + TOKEN_MAP if layout == "vllm" else ""
    check_names(
        stored,
        map(stored_name, places()),
        f"{num_heads} heads of {num_layers} blocks in the layout {layout!r}",
        known=found,
        optional=[token_map],
        among=[name for name in stored.parts if layout not in WITH_BASE or "medusa" in name.lower()],
    )
    names = {SCHEMES[0].name(*place): stored_name(place) for place in places()}
    if token_map in stored.parts:
        names[TOKEN_MAP] = token_map
    build = partial(_build, layout, num_heads, num_layers, shares_own)
    return Checkpoint(stored, layout, names, build, (TOKEN_MAP,), shares=layout == "medusa-shared")


def _build(
    layout: str, num_heads: int, num_layers: int, shares_own: bool, reading: Reading
) -> Callable[..., MedusaHeads]:
    config, notes, tensors = reading.config, reading.notes, reading.tensors
    counts, nested = COUNTS.get(layout, OWN_COUNTS), config.get("medusa")
    claims = nested if layout == "modelopt" and isinstance(nested, dict) else config
    reading.count_notes(map(claims.get, counts), num_heads, num_layers)
    width = reading.most_common_size("", -1)
    projections = [name for k in range(num_heads) if (name := f"{k}.{num_layers}.weight") in tensors]
    length = most_common(tensors[name].shape[0] for name in projections if tensors[name].ndim)
    reading.check_shapes(dict.fromkeys(projections, (length, width)))
    config.check_sizes({"hidden_size": (width, next(iter(reading.names.values())))})

    rows, shared = [tensors[name] for name in projections], None
    token_ids, vocab_size = None, length
    if layout == "medusa-shared":
        shared = reading.lm_head(width)
        vocab_size = len(shared)
        notes.append("The heads share the target's lm_head.")
    elif layout in WITH_BASE:
        notes.append("The files also hold the base that the heads belong to: pass them as `model` too.")
    if TOKEN_MAP in reading.names:
        rows, token_ids, vocab_size = _truncated(reading, rows, reading.integers(TOKEN_MAP))
    elif layout == "vllm" and config.get("truncated_vocab_size") not in (None, config.get("vocab_size") or length):
        raise config.wrong("truncated_vocab_size", "vocab_size where there is no token_map")
    else:
        name = reading.names[projections[0]] if projections else "lm_head.weight"
        config.check_sizes({"vocab_size": (vocab_size, name)})
    if shares_own:
        shared = rows[0].clone()  # it is kept, and the file may change
    tensors |= zip(projections, rows, strict=True)
    sizes = num_heads, num_layers, width, vocab_size
    return partial(MedusaHeads, *sizes, shared=shared, token_ids=token_ids)


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
    tensors = heads.weights
    config: dict[str, object] = dict(zip(OWN_COUNTS, (heads.num_heads, heads.num_layers), strict=True))
    config["base_model_name_or_path"] = base
    if layout == "medusa-shared":
        config["version"] = "2"
        for k in range(heads.num_heads):
            del tensors[f"{k}.{heads.num_layers}.weight"]
    if layout == "neuron":
        tensors = {f"medusa_head_{name}": tensor for name, tensor in tensors.items()}
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
