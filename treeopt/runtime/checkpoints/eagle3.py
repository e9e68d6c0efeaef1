"""Read and write EAGLE-3's drafter: SafeAILab's and SpecForge's layout, Model Optimizer's, speculators' and NeMo's.

They differ in prefixes (midlayer. or layers.0., with or without model. before all) and in where config.json says what.
Here a tensor has the name that most of them give it, without model. and with layers.0.; messages have the file's own.

d width of the layer · w of the target · L states that are fused · V vocabulary · Vt tokens that are guessed
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.runtime.checkpoints.eagle3_config import check_flags, eagle3_config, form_of, settings
from treeopt.runtime.checkpoints.files import MODEL_FILES, StoredTensors
from treeopt.runtime.checkpoints.layer import ATTENTION, LAYER, build_layer_config, described, layer_sizes
from treeopt.runtime.checkpoints.reading import Base, Checkpoint, LoadedHeads, Published, Reading, check_names, short
from treeopt.runtime.drafters.eagle3 import PROJECTIONS, Eagle3Heads, PairLayer
from treeopt.runtime.drafters.layer import OneLayer
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH

LAYOUT = "eagle-3"
FIRST = "layers.0."
EMBEDDING, HEAD, OFFSETS, KNOWN = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
NORMS = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
FUSE_NORM, FC_BIAS = "input_norm.weight", "fc.bias"
OPTIONAL = (FUSE_NORM, FC_BIAS, EMBEDDING, HEAD, OFFSETS, KNOWN)
# Sets of tensors that are there all or none.
SETS = (
    tuple(f"{ATTENTION}{name}.bias" for name in PROJECTIONS),
    tuple(f"{ATTENTION}{name}_norm.weight" for name in "qk"),
)
PREFIXES = {
    "midlayer.": FIRST,
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
STATE_NORM = re.compile(r"fc_norm\.(0|[1-9]\d{0,2})\.weight", re.ASCII)
WIDE = r"(o_proj|down_proj|layernorm|fc)\.weight$"  # tensors whose rows are as many as the layer is wide
OTHERS = (  # tensors of drafters that are not read, and what they are
    (r"self_attn\.(q_a|q_b|kv_a|kv_b)_", "latent attention (MLA)"),
    (r"(^|\.)layers\.[1-9]", "more than one layer"),
    (r"mlp\.(experts|shared_expert|gate\.)", "experts"),
    (r"mask_hidden|parallel_draft_heads", "heads that draft in parallel (P-EAGLE)"),
)


def common_name(name: str) -> str:
    """
    >>> common_name("model.layers.0.hidden_norm.weight"), common_name("midlayer.mlp.up_proj.weight")
    ('layers.0.hidden_norm.weight', 'layers.0.mlp.up_proj.weight')
    """
    name = name.removeprefix("model.")
    return next((new + name.removeprefix(old) for old, new in PREFIXES.items() if name.startswith(old)), name)


def recognise_eagle3(stored: StoredTensors) -> Checkpoint | None:
    """Recognise the drafter by its names, whatever their prefixes; None where it is another."""
    names: dict[str, str] = {}
    for name in stored.parts:
        names.setdefault(common_name(name), name)
    # EAGLE-1's has neither a norm before its attention nor a vocabulary of its own; DFlash's norm is of all layers.
    fused = "fc.weight" in names and bool({NORMS[1], OFFSETS} & names.keys())
    layer = NORMS[0] in names or any(name.startswith("midlayer.") for name in stored.parts)
    if not (fused or layer) or "hidden_norm.weight" in names:
        return None
    for name in stored.parts:
        for pattern, what in OTHERS:
            if re.search(pattern, name):
                raise Unsupported(
                    f"An EAGLE-3 drafter is read if it is one layer with plain attention, but {quoted(name)} in "
                    f"{stored.origin} is of {what}."
                )
    return Checkpoint(stored, LAYOUT, partial(_build, stored, _checked(stored, names)), shares=HEAD not in names)


def _checked(stored: StoredTensors, names: dict[str, str]) -> dict[str, str]:
    """The file's own name of every tensor, by the common one; also of those that a layer must have."""
    root = "model." if any(name.startswith("model.") for name in stored.parts) else ""
    first = "midlayer." if any(name.startswith(root + "midlayer.") for name in stored.parts) else FIRST
    norms = sorted(filter(STATE_NORM.fullmatch, names))
    common = ["fc.weight", *LAYER, *NORMS, *(f"fc_norm.{i}.weight" for i in range(len(norms)))]
    common += [name for those in SETS if not names.keys().isdisjoint(those) for name in those]
    common += [name for name in OPTIONAL if name in names]
    common += [needed for needed, by in ((OFFSETS, KNOWN), (HEAD, OFFSETS)) if by in names and needed not in names]

    def stored_name(name: str) -> str:
        outside = "" if name in (HEAD, OFFSETS, KNOWN) else root
        return names.get(name, outside + (first + name.removeprefix(FIRST) if name.startswith(FIRST) else name))

    expected = [stored_name(name) for name in common]
    check_names(stored, expected, f"a drafter in the layout {LAYOUT!r}", known=[*expected, *norms])
    return dict(zip(common, expected, strict=True))


def _build(stored: StoredTensors, names: dict[str, str], base: Base) -> LoadedHeads:
    told = settings(stored)
    check_flags(told)
    reading = Reading(stored, base, names, apart=(OFFSETS, KNOWN))
    reading.config, tensors = told, reading.tensors
    d = reading.most_common_size(WIDE)
    width = d if base.lm_head is None else base.lm_head.shape[1]
    vocab_size = told.number("vocab_size") if base.lm_head is None else len(base.lm_head)
    token_ids = _token_ids(reading, vocab_size)
    rows = vocab_size if token_ids is None else len(token_ids)
    fc = tensors["fc.weight"]
    columns = fc.shape[1] if fc.ndim == 2 else 0
    if columns % width or columns < 2 * width:
        raise InvalidInput(
            f"{reading.said('fc.weight')} must fuse two or more of the target's states of width {width}, but it reads "
            f"{columns} numbers: pass the `model` that it was trained for."
        )
    norms = {f"fc_norm.{i}.weight": (width,) for i in range(columns // width)}
    absent = [name for name in norms if name not in names]
    if 0 < len(absent) < len(norms):
        name = names["fc_norm.0.weight"].replace("fc_norm.0.weight", absent[0])
        raise InvalidInput(
            f"fc_norm must norm each of the {len(norms)} states, but {stored.origin} lacks {quoted(name)}."
        )
    vectors = dict.fromkeys((FC_BIAS, "norm.weight"), (d,))
    shapes = {"fc.weight": (d, columns), FUSE_NORM: (columns,), HEAD: (rows, d), EMBEDDING: (vocab_size, d)}
    what = f"a layer of width {d} for {rows} of the {vocab_size} tokens of a target of width {width}"
    reading.check_shapes(shapes | vectors | norms, what)
    embedding, own = _embedding(reading, d)
    form = form_of(reading, width, vocab_size, own=own)
    like = described(told, d)
    if like is None:
        raise told.wrong("num_attention_heads", "said")
    make = partial(OneLayer, normed=False, make=partial(PairLayer, form=form))
    layer = build_layer_config(reading, d, what, like=like, make=make)
    told.check_sizes(
        {
            "hidden_size": (d, names["fc.weight"]),
            "vocab_size": (vocab_size, names.get(KNOWN, "the target's lm_head")),
            "draft_vocab_size": (rows, names.get(HEAD, "the target's lm_head")),
            "target_hidden_size": (width, names["fc.weight"]),
            **layer_sizes(layer, names),
        }
    )
    tied = told.get("tie_word_embeddings") is True and own
    heads = Eagle3Heads(
        layer,
        form,
        embedding=embedding,
        lm_head=None if HEAD in names else embedding if tied else reading.lm_head(d),
        token_ids=token_ids,
        num_heads=base.num_heads or DRAFT_DEPTH,
        dtype=reading.dtype,
        device=base.device,
    )
    return reading.loaded(heads, LAYOUT, heads.weights.items())


def _token_ids(reading: Reading, vocab_size: int) -> Tensor | None:
    """(Vt,) the target's ids of the tokens that are guessed, ascending; None where they are all of V."""
    if OFFSETS not in reading.names:
        return None
    names, stored = reading.names, reading.stored
    offsets, said = stored.read(names[OFFSETS]), reading.said(OFFSETS)
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        kind = f"{short(offsets.dtype)} of shape {tuple(offsets.shape)}"
        raise InvalidInput(f"{said} must be a list of int64 offsets, one for each draft token, but it is {kind}.")
    ids = torch.arange(len(offsets)) + offsets
    outside = int(offsets.min()) < 0 or int(offsets.max()) >= vocab_size or int(ids.max()) >= vocab_size
    if outside or bool((ids.diff() <= 0).any()):
        raise InvalidInput(f"{said} must lead to ascending token ids below the target's {vocab_size}, but it does not.")
    if KNOWN in names:
        known = stored.read(names[KNOWN])
        wanted = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        if known.dtype != torch.bool or not torch.equal(known, wanted):
            raise InvalidInput(
                f"{reading.said(KNOWN)} must say of each of the target's {vocab_size} tokens whether "
                f"{quoted(names[OFFSETS])} leads to it, but it says otherwise."
            )
    if len(ids) == vocab_size:
        return None
    if not offsets.any():
        reading.notes.append(
            f"All of {quoted(names[OFFSETS])} is 0: the drafter guesses the first {len(ids)} of {vocab_size} tokens. "
            "That is also what a file looks like whose tokens were never written."
        )
    return ids


def _embedding(reading: Reading, d: int) -> tuple[Tensor | None, bool]:
    """The drafter's embeddings and whether they are its own; None where none are there, so that it cannot guess."""
    target = reading.base.embedding
    if own := EMBEDDING in reading.names:
        chosen = reading.embedding(EMBEDDING)
        return chosen, chosen is reading.tensors[EMBEDDING]
    if target is not None and target.shape[1] != d:
        raise InvalidInput(
            f"{reading.stored.origin} holds a layer of width {d} without {EMBEDDING}, so it needs a target of this width, "
            f"but that has {target.shape[1]}: pass the `model` that it was trained for."
        )
    return target, own


def publish_eagle3(heads: Eagle3Heads, layout: str, base: str, lm_head: Tensor | None = None) -> Published:
    return Published(MODEL_FILES[0], eagle3_tensors(heads), eagle3_config(heads, base))


def eagle3_tensors(heads: Eagle3Heads) -> dict[str, Tensor]:
    """All tensors under SafeAILab's names; the embeddings where they are not the target's."""
    tensors: dict[str, Tensor] = {HEAD: heads.lm_head}
    for name, weight in heads.weights.items():
        tensors["midlayer." + name.removeprefix(FIRST) if name.startswith(FIRST) else name] = weight
    if heads.form.own_embedding:
        tensors[EMBEDDING] = heads.embedding
    if heads.token_ids is not None:
        ids = heads.token_ids.cpu()
        tensors[OFFSETS] = ids - torch.arange(len(ids))
        tensors[KNOWN] = torch.zeros(heads.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors
