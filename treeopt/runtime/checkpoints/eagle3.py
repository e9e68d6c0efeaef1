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
from treeopt.runtime.checkpoints.checks import (
    Base,
    Checkpoint,
    LoadedHeads,
    Published,
    check_names,
    check_shapes,
    check_size,
    choose_embedding,
    loaded_heads,
    read_floats,
    size_of,
    targets_lm_head,
)
from treeopt.runtime.checkpoints.eagle3_config import check_flags, eagle3_config, form_of, settings
from treeopt.runtime.checkpoints.files import MODEL_FILES, StoredTensors
from treeopt.runtime.checkpoints.layer import ATTENTION, LAYER, build_layer_config, described
from treeopt.runtime.drafters.eagle3 import PROJECTIONS, Eagle3Heads, PairLayer
from treeopt.runtime.drafters.layer import OneLayer
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH

LAYOUT = "eagle-3"
FIRST = "layers.0."
EMBEDDING, HEAD, OFFSETS, KNOWN = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
NORMS = ("layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "norm.weight")
FUSE_NORM, FC_BIAS = "input_norm.weight", "fc.bias"
HEAD_NORMS = tuple(f"{ATTENTION}{name}_norm.weight" for name in "qk")
BIASES = tuple(f"{ATTENTION}{name}.bias" for name in PROJECTIONS)
OLDER = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
STATE_NORM = re.compile(r"fc_norm\.(0|[1-9]\d{0,2})\.weight", re.ASCII)
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
    for old, new in {"midlayer.": FIRST, **OLDER}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


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
    norms = sorted(name for name in names if STATE_NORM.fullmatch(name))
    state_norms = [f"fc_norm.{i}.weight" for i in range(len(norms))]
    biases = BIASES if any(name in names for name in BIASES) else ()
    head_norms = HEAD_NORMS if any(name in names for name in HEAD_NORMS) else ()
    optional = [name for name in (FUSE_NORM, FC_BIAS, EMBEDDING, HEAD, OFFSETS, KNOWN) if name in names]
    common = ["fc.weight", *LAYER, *NORMS, *biases, *head_norms, *state_norms, *optional]
    if KNOWN in names and OFFSETS not in names:
        common.append(OFFSETS)
    if OFFSETS in names and HEAD not in names:
        common.append(HEAD)

    def stored_name(name: str) -> str:
        outside = "" if name in (HEAD, OFFSETS, KNOWN) else root
        return names.get(name, outside + (first + name.removeprefix(FIRST) if name.startswith(FIRST) else name))

    expected = [stored_name(name) for name in common]
    check_names(stored, expected, f"a drafter in the layout {LAYOUT!r}", known=[*expected, *norms])
    return dict(zip(common, expected, strict=True))


def _build(stored: StoredTensors, names: dict[str, str], base: Base) -> LoadedHeads:
    told, notes = settings(stored), list(stored.notes)
    check_flags(stored, told)
    found, dtype = read_floats(stored, [names[name] for name in names if name not in (OFFSETS, KNOWN)], base.dtype)
    tensors = {name: found[names[name]] for name in names if names[name] in found}
    d = size_of(tensors, ("o_proj.weight", "down_proj.weight", "layernorm.weight", "fc.weight"), 0)
    width, vocab_size = d if base.lm_head is None else base.lm_head.shape[1], _vocab_size(stored, told, base)
    token_ids = _token_ids(stored, names, vocab_size, notes)
    rows = vocab_size if token_ids is None else len(token_ids)
    fc = tensors["fc.weight"]
    columns = fc.shape[1] if fc.ndim == 2 else 0
    embedding, own = _embedding(stored, names, tensors.get(EMBEDDING), base, (vocab_size, d), dtype, notes)
    form, more = form_of(stored, told, names, (columns, width, vocab_size), own=own)
    what = f"a layer of width {d} for {rows} of the {vocab_size} tokens of a target of width {width}"
    shapes = {
        "fc.weight": (d, columns),
        FC_BIAS: (d,),
        FUSE_NORM: (columns,),
        "norm.weight": (d,),
        HEAD: (rows, d),
        **{f"fc_norm.{i}.weight": (width,) for i in range(form.states)},
    }
    check_shapes(stored, found, {names[name]: shape for name, shape in shapes.items() if name in names}, what)
    like = described(stored, told, d)
    if like is None:
        raise InvalidInput(f"config.json of {stored.origin} must say num_attention_heads, but it does not.")
    make = partial(OneLayer, normed=False, make=partial(PairLayer, form=form))
    layer = build_layer_config(stored, found, names.__getitem__, d, what, like=like, make=make)
    for key, size, name in (
        ("hidden_size", d, "fc.weight"),
        ("vocab_size", vocab_size, KNOWN),
        ("draft_vocab_size", rows, HEAD),
        ("target_hidden_size", width, "fc.weight"),
        ("num_attention_heads", layer.num_attention_heads, LAYER[0]),
        ("num_key_value_heads", layer.num_key_value_heads, LAYER[1]),
        ("intermediate_size", layer.intermediate_size, LAYER[4]),
    ):
        check_size(stored, key, size, names.get(name, "the target's lm_head"), told)
    tied = told.get("tie_word_embeddings") is True and own
    heads = Eagle3Heads(
        layer,
        form,
        embedding=embedding,
        lm_head=None if HEAD in names else embedding if tied else targets_lm_head(stored, base.lm_head, d),
        token_ids=token_ids,
        num_heads=base.num_heads or DRAFT_DEPTH,
        dtype=dtype,
        device=base.device,
    )
    with torch.no_grad():
        for name, weight in heads.weights.items():
            weight.copy_(tensors[name])
    return loaded_heads(heads, LAYOUT, stored, names.values(), [*notes, *more])


def _vocab_size(stored: StoredTensors, told: dict[str, object], base: Base) -> int:
    """V: the target's where it is at hand, else what the file says."""
    if base.lm_head is not None:
        return len(base.lm_head)
    size = told.get("vocab_size")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= 2**31:
        raise InvalidInput(
            f"config.json of {stored.origin} must say vocab_size, the number of the target's tokens, but it says "
            f"{quoted(size)}: mend it, or pass `model`."
        )
    return size


def _token_ids(stored: StoredTensors, names: dict[str, str], vocab_size: int, notes: list[str]) -> Tensor | None:
    """(Vt,) the target's ids of the tokens that are guessed, ascending; None where they are all of V."""
    if OFFSETS not in names:
        return None
    offsets, name = stored.read(names[OFFSETS]), quoted(names[OFFSETS])
    if offsets.ndim != 1 or offsets.dtype != torch.int64 or not len(offsets):
        raise InvalidInput(
            f"{name} must be a list of int64 offsets, from a draft token's id to the target's, but in {stored.origin} it "
            f"is {str(offsets.dtype).removeprefix('torch.')} of shape {tuple(offsets.shape)}."
        )
    ids = torch.arange(len(offsets)) + offsets
    outside = int(offsets.min()) < 0 or int(offsets.max()) >= vocab_size or int(ids.max()) >= vocab_size
    if outside or bool((ids.diff() <= 0).any()):
        raise InvalidInput(
            f"{name} must lead to ascending token ids below the target's {vocab_size}, but in {stored.origin} it does not."
        )
    if KNOWN in names:
        known = stored.read(names[KNOWN])
        wanted = torch.zeros(vocab_size, dtype=torch.bool)
        wanted[ids] = True
        if known.dtype != torch.bool or known.shape != wanted.shape or not torch.equal(known, wanted):
            raise InvalidInput(
                f"{quoted(names[KNOWN])} must say of each of the target's {vocab_size} tokens whether {name} leads to it, "
                f"but in {stored.origin} it says otherwise."
            )
    if len(ids) == vocab_size:
        return None
    if not offsets.any():
        notes.append(
            f"All of {name} is 0: the drafter guesses the first {len(ids)} of {vocab_size} tokens. That is also what a "
            "file looks like whose tokens were never written."
        )
    return ids


def _embedding(
    stored: StoredTensors,
    names: dict[str, str],
    own: Tensor | None,
    base: Base,
    shape: tuple[int, int],
    dtype: torch.dtype,
    notes: list[str],
) -> tuple[Tensor | None, bool]:
    """The drafter's embeddings and whether they are its own; None where none are there, so that it cannot guess."""
    if own is not None:
        what = f"a layer of width {shape[1]} for a target of {shape[0]} tokens"
        check_shapes(stored, {names[EMBEDDING]: own}, {names[EMBEDDING]: shape}, what)
        chosen = choose_embedding(stored, names[EMBEDDING], own, base.embedding, dtype, notes)
        return chosen, chosen is own
    if base.embedding is not None and base.embedding.shape[1] != shape[1]:
        raise InvalidInput(
            f"{stored.origin} holds a layer of width {shape[1]} without {EMBEDDING}, so it needs a target of this width, "
            f"but that has {base.embedding.shape[1]}: pass the `model` that it was trained for."
        )
    return base.embedding, False


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
