"""The kinds of drafters, in one table: a row says all that treeopt knows of a kind.

Functions are named as ``module:function`` below ``treeopt.runtime``. They are imported where they are used, so that the table
needs neither torch nor transformers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A published layout of checkpoints.

    about      : for `treeopt list layouts` and the documentation
    names_base : config.json names the base model
    has_base   : the files hold the base's weights too; such a layout is read, but not written
    shares     : the heads guess with the base's lm_head, which is not in the files
    """

    about: str
    names_base: bool = False
    has_base: bool = False
    shares: bool = False


@dataclass(frozen=True)
class RecipeDefaults:
    """Defaults of one kind of `treeopt train`.

    layout    : of the files that are written
    decay     : the loss of head k has the weight decay**k: 0.8 in Medusa, section 2.2.1, and in EAGLE-3's code, where head
                k is step k of the layer; 1 in Hydra's code
    teacher   : learn the base's distribution instead of the text's tokens (EAGLE-3)
    every     : a training step uses one of so many states of a text, because neighbours teach much the same and each
                state costs a block (DFlash)
    muon      : the matrices learn by Muon, which needs fewer steps than AdamW (docs/log.md)
    own_vocab : the drafter may know a part of the vocabulary only (EAGLE-3)
    """

    layout: str
    num_layers: int
    learning_rate: float
    decay: float
    teacher: bool = False
    every: int = 1
    muon: bool = False
    own_vocab: bool = False


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter. An empty field is something that the kind does not have.

    about       : text of `treeopt list drafters`
    argument    : value of --drafter for a kind without files
    is_heads    : it has one head for every depth
    by_level    : it guesses level by level, with probabilities, so dynamic trees can be built of its guesses
    opens       : function of (name, target, number of guesses) that returns a `Drafter` for ``argument``
    recognises  : function of `StoredTensors` that returns a `Checkpoint`, or None for files of another kind
    writes      : function of (heads, layout, base, lm_head) that returns `Published` files
    layouts     : its checkpoint layouts, by name
    begins      : function of (target, recipe, lm_head, texts) that returns untrained heads
    recipes     : its training, by the name that `treeopt train --kind` takes
    note        : caveat on an engine's counts of its drafts
    ends_itself : it ends a draft where it is unsure or finds no more, so the user does not choose the length
    """

    about: str = ""
    argument: str = ""
    is_heads: bool = False
    by_level: bool = True
    opens: str = ""
    recognises: str = ""
    writes: str = ""
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    begins: str = ""
    recipes: Mapping[str, RecipeDefaults] = field(default_factory=dict)
    note: str = ""
    ends_itself: bool = False


ENDS = (
    "Drafts of {} end where it finds no more or is unsure, and an end counts as a miss. So survival is right for the limit "
    "that was served, and an estimate for others. A plan counts all rows up to the limit, and fewer are verified."
)
ONE_PASS = "{} in one pass: its time hardly depends on the length, which a profile of another drafter does not show."
LOOKED_UP = 3  # tokens of the longest n-gram that is looked up, here and in engines that are told
OF_YOUR_OWN = "their folder, file or hub id"

DRAFTERS = {
    "medusa": DrafterKind(
        about=f"Medusa's heads: {OF_YOUR_OWN}; those of the demo model and of SmolLM2 are medusa", is_heads=True,
        recognises="checkpoints.medusa:recognise_medusa", writes="checkpoints.medusa:publish_medusa", layouts={
            "medusa": Layout("medusa_lm_head.safetensors, a projection per head: Medusa v0.1, TGI", names_base=True),
            "medusa-pt": Layout("the same tensors in medusa_lm_head.pt: Medusa v0.1, TensorRT-LLM's converter", names_base=True),
            "medusa-shared": Layout("medusa_lm_head.safetensors, residual blocks only, on the base's lm_head: Medusa, TGI",
                                    names_base=True, shares=True),
            "merged": Layout("one model with the heads under medusa_head., read only: Medusa-2", has_base=True),
            "modelopt": Layout("one model with the heads under medusa_heads., read only: NVIDIA Model Optimizer", has_base=True),
            "neuron": Layout("medusa_heads.pt, to lie beside the base's files: AWS Neuron"),
        }, begins="drafters.medusa:untrained", recipes={
            "medusa-1": RecipeDefaults("medusa", 1, 1e-3, 0.8),
            "medusa-shared": RecipeDefaults("medusa-shared", 1, 1e-3, 0.8),
        }),
    "hydra": DrafterKind(
        about="heads that read the guesses before theirs: as above; the demo model's are hydra", is_heads=True,
        recognises="drafters.hydra:recognise_hydra", writes="drafters.hydra:publish_hydra", layouts={
            "hydra": Layout("the tensors of hydra-pt in hydra_lm_head.safetensors", names_base=True),
            "hydra-pt": Layout("hydra_lm_head.pt, heads that read the guesses before them: Hydra", names_base=True),
        }, begins="drafters.hydra:untrained", recipes={"hydra": RecipeDefaults("hydra", 1, 1e-3, 1.0)}),
    "dflash": DrafterKind(
        about=f"DFlash's layers, which guess a block in one pass: {OF_YOUR_OWN}",
        recognises="checkpoints.dflash:recognise_block", writes="checkpoints.dflash:publish_block", layouts={
            "dflash": Layout("model.safetensors with fc, hidden_norm and layers on the target's lm_head: z-lab, SpecForge, vLLM, SGLang",
                             shares=True),
        }, begins="drafters.dflash:untrained", recipes={"dflash": RecipeDefaults("dflash", 2, 5e-4, 0.8, every=4, muon=True)},
        note=ONE_PASS.format("DFlash drafts a block") + " A block of another length is drafted otherwise."),
    "dflash2": DrafterKind(
        about="DFlash2's layers, whose guesses depend on the one before: as above",
        recognises="checkpoints.dflash:recognise_block", layouts={
            "dflash2": Layout("dflash's tensors with candidate_selector and convolutions: read only: z-lab, NeMo, vLLM", shares=True),
        }),
    "dspark": DrafterKind(
        about="DSpark's layers, DFlash's with a Markov head: as above",
        recognises="checkpoints.dflash:recognise_block", layouts={
            "dspark": Layout("dflash's tensors with markov_head and perhaps confidence_head, read only: DeepSpec, SpecForge, speculators",
                             shares=True),
        }, ends_itself=True,
        note="DSpark's engines verify fewer guesses where it is unsure or the server is busy, and those left out count as "
        "misses: survival holds for the load that was measured. Turn adaptive verification off to measure the guesses "
        "themselves."),
    "eagle3": DrafterKind(
        about="EAGLE-3's layer: as above; those of the demo model and of SmolLM2 are eagle3",
        recognises="checkpoints.eagle3:recognise_eagle3", writes="checkpoints.eagle3:publish_eagle3", layouts={
            "eagle-3": Layout("model.safetensors with fc, midlayer and a vocabulary of its own: EAGLE-3, SGLang, vLLM"),
        }, begins="drafters.eagle3:untrained",
        recipes={"eagle3": RecipeDefaults("eagle-3", 1, 5e-4, 0.8, teacher=True, own_vocab=True)}),
    "p-eagle": DrafterKind(
        about="P-EAGLE's layers, EAGLE-3's which guess all depths in one pass: as above",
        recognises="checkpoints.eagle3:recognise_eagle3", writes="checkpoints.eagle3:publish_eagle3", layouts={
            "p-eagle": Layout("eagle-3's tensors with mask_hidden and perhaps more layers: NeMo, speculators, vLLM"),
        },
        note=ONE_PASS.format("P-EAGLE drafts all depths")),
    "eagle": DrafterKind(
        about="the layer of EAGLE-1 and EAGLE-2: as above",
        recognises="checkpoints.layer:recognise_eagle", writes="checkpoints.layer:publish_eagle", layouts={
            "eagle-1": Layout("model.safetensors with fc and one layer: EAGLE-1 and EAGLE-2", shares=True),
        }),
    "draft-model": DrafterKind(
        about="a small causal LM with the same tokenizer: its folder, GGUF file or hub id; the demo model's is draft"),
    "pard": DrafterKind(about="PARD, a causal LM that guesses all depths in one pass: its folder, GGUF file or hub id",
                        note=ONE_PASS.format("PARD drafts all depths")),
    "mtp": DrafterKind(
        about="the target's own MTP layer, of DeepSeek-V3 and GLM-4.5 alike",
        argument="mtp", opens="drafters.mtp:load_mtp"),
    "ngram": DrafterKind(
        about="the tokens that followed where the last tokens stood first in the text",
        argument="ngram", by_level=False, opens="drafters.lookup:open_lookup", note=ENDS.format("n-gram look-up"), ends_itself=True),
}  # fmt: skip
# Kinds that only engines run. treeopt plans for them by the engines' counts.
ELSEWHERE = {
    "redrafter": DrafterKind(),
    "suffix": DrafterKind(note=ENDS.format("suffix decoding"), ends_itself=True),
    "copied-text": DrafterKind(note=ENDS.format("a drafter that copies text"), ends_itself=True),
}
COUNTED = DRAFTERS | ELSEWHERE  # kinds whose drafts an engine may have counted
LAYOUTS = {name: layout for kind in DRAFTERS.values() for name, layout in kind.layouts.items()}
WRITTEN = tuple(
    name for kind in DRAFTERS.values() if kind.writes for name, layout in kind.layouts.items() if not layout.has_base
)
RECIPES = {name: recipe for kind in DRAFTERS.values() for name, recipe in kind.recipes.items()}
ASKED = ", ".join(kind.argument for kind in DRAFTERS.values() if kind.argument)  # as --drafter takes them


def kind_of_layout(layout: str) -> str:
    """The kind of drafter that a layout holds.

    >>> kind_of_layout("merged"), kind_of_layout("eagle-1")
    ('medusa', 'eagle')
    """
    return next(name for name, kind in DRAFTERS.items() if layout in kind.layouts)


BLOCKS = ("dflash", "dflash2", "dspark")  # drafters that guess a block at once, no longer than in their training
COPIES = ("ngram", "suffix", "copied-text")  # drafters that copy text


def depth_noun(drafter: Mapping[str, Any] | None) -> str:
    """The word for a guess's place in a draft: "head" where the drafter has a head for each depth, else "depth".

    >>> depth_noun({"kind": "hydra"}), depth_noun({"kind": "ngram"}), depth_noun(None)
    ('head', 'depth', 'depth')
    """
    kind = DRAFTERS.get((drafter or {}).get("kind", ""))
    return "head" if kind is not None and kind.is_heads else "depth"


ALIASES = {"nextn": "mtp", "lookup": "ngram", "draftmodel": "draft-model"}  # in names that people give


def kind_of_name(name: str) -> str | None:
    """The kind of drafter that a name in a table says; None where it says none.

    >>> kind_of_name("EAGLE-3.1 chain"), kind_of_name("n-gram"), kind_of_name("draft")
    ('eagle3', 'ngram', None)
    """
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    known = {kind.replace("-", ""): kind for kind in COUNTED} | ALIASES
    found = [word for word in known if word in letters]
    return known[max(found, key=len)] if found else None
