"""Open the drafter that a user names: heads or a draft model by folder, file or hub id, or one without weights."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported, quoted
from treeopt.files.shell import command_line
from treeopt.files.storage import sha256_of
from treeopt.records.drafters import DRAFTERS
from treeopt.records.origins import DrafterRecord
from treeopt.runtime.checkpoints import Base, LoadedHeads, load_heads
from treeopt.runtime.checkpoints.files import Settings, find_checkpoint
from treeopt.runtime.checkpoints.reading import NoHeads
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.draft_model import DraftModel, load_draft_model
from treeopt.runtime.drafters.medusa import check_bias
from treeopt.runtime.drafters.parallel import PardModel
from treeopt.runtime.drafters.protocol import DRAFT_DEPTH, Drafter
from treeopt.runtime.folder import GGUF, find_model, read_object
from treeopt.runtime.target import Target

# In keys that only the config.json of heads has; a tokenizer may lie beside them.
HEADS = ("medusa", "hydra", "draft_vocab_size", "eagle_config", "speculators_model_type")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class OpenDrafter:
    """A drafter, its record for provenance (kind, id, sha256, num_heads, ...), and notes for the user."""

    drafter: Drafter
    record: DrafterRecord
    notes: tuple[str, ...] = ()


def open_drafter(
    name: str | None,
    target: Target,
    *,
    depth: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> OpenDrafter:
    """The drafter that ``name`` stands for; None is the heads in the target's own checkpoint (Medusa-2).

    name  : a folder, file or hub id of heads or of a causal LM, a GGUF file of the latter; what a row of the table is
            ``asked`` by; with the demo model and SmolLM2 also one of `demo.DRAFTERS`
    depth : deepest guess of a drafter that has no number of heads (default 5)

    Raises InvalidInput where drafter and target do not belong together.
    """
    if depth is not None and depth < 1:
        raise InvalidInput(f"`draft_depth` must be at least 1, but got {depth}.")
    where = name or target.name
    for kind, row in DRAFTERS.items():
        if name is not None and row.argument and name.partition(":")[0] == row.argument:
            if name != row.argument:
                raise InvalidInput(f"`drafter` must be {row.argument} alone, but got {quoted(name)}.")
            drafter = part_of(kind, "opens")(name, target, depth or DRAFT_DEPTH)
            return OpenDrafter(drafter, _record(drafter, name))
    if shipped := _shipped(name, target):
        name, where = shipped
    if name is not None and where.endswith(GGUF):
        where = str(find_model(where, "`drafter`"))
    if where != target.name and is_causal_lm(folder := find_checkpoint(where)):
        model = load_draft_model(where, target, num_heads=depth or DRAFT_DEPTH, trust_remote_code=trust_remote_code)
        model = _guessing_by_masks(model, Settings(folder, read_object(folder / "config.json")), target)
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        return OpenDrafter(model, _record(model, name or where, weights))
    embedding = target.model.get_input_embeddings().weight
    base = Base(target.lm_head.weight, embedding, target.config, target.dtype, target.device, num_heads=depth)
    own = revision if where == target.name else None
    loaded = _own_heads(target, base, own) if name is None else load_heads(where, base, own)
    heads: Any = loaded.heads
    if depth is not None and heads.num_heads != depth:
        raise InvalidInput(
            f"`draft_depth` is for drafters without a fixed number of guesses, but {where} has {heads.num_heads} heads: "
            "leave it out."
        )
    if heads.shares_projection:
        check_bias(target)
    if heads.width != target.width or heads.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"The heads must fit the model (width {target.width}, vocabulary {target.vocab_size}), but "
            f"{where} has width {heads.width} and vocabulary {heads.vocab_size}."
        )
    target.read_layers(heads.layers_of(target.num_layers))
    record: DrafterRecord = {**_record(heads, name or where, loaded.files), "layout": loaded.layout}
    return OpenDrafter(heads, record, () if shipped else tuple(loaded.notes))


def _own_heads(target: Target, base: Base, revision: str | None) -> LoadedHeads:
    """The heads in the target's own checkpoint."""
    try:
        return load_heads(target.name, base, revision)
    except NoHeads:
        train = command_line("treeopt", "train", "--model", target.name, "--prompts", "PROMPTS", "-o", "HEADS")
        raise NoHeads(
            f"{target.name} has no heads of its own: name heads, a draft model or ngram as `drafter`, or train heads: {train}"
        ) from None


def _shipped(name: str | None, target: Target) -> tuple[str, str] | None:
    """The name in records and the folder of a drafter that is shipped for this target; None for any other."""
    model = demo.NAME if target.name == demo.TITLE else target.name
    folders = demo.DRAFTERS.get(model, {})
    name = next(iter(folders), None) if name in (None, demo.NAME) else name
    return (f"treeopt {model} {name}", str(folders[name])) if name in folders else None


def _guessing_by_masks(model: DraftModel, told: Settings, target: Target) -> DraftModel:
    """PARD's drafter, where config.json says that the model is one; else the model as it is."""
    if told.get("spd_type") == "pard2" or told.get("pard2"):
        raise Unsupported(
            f"{told.origin} is a PARD-2 drafter, which adds projections of the target's states to its embeddings, and that is not "
            "read: take a PARD drafter (spd_type pard)."
        )
    if not {"pard_token", "spd_type"} & told.keys():
        return model
    if told.get("spd_type", "pard") != "pard":
        raise told.wrong("spd_type", "pard, for a language model to guess by masks")
    mask_id = told.mask_id("pard_token", model.model.vocab_size)
    return PardModel(model.model, target.vocab_size, mask_id=mask_id, num_heads=model.num_heads)


def _record(drafter: Any, id_: str, files: Sequence[Path] = ()) -> DrafterRecord:
    """sha256 is over the weights in the files; None where there are none."""
    digest = hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest() if files else None
    found: DrafterRecord = {"kind": drafter.kind, "id": id_, "sha256": digest, "num_heads": drafter.num_heads}
    if hasattr(drafter, "num_layers"):
        found["num_layers"] = drafter.num_layers
    if drafter.widest:
        found["widest"] = drafter.widest
    return found


def is_causal_lm(folder: Path) -> bool:
    """Whether a folder holds a whole model with a tokenizer, and no heads beside it."""
    try:
        document = read_object(folder / "config.json")
    except InvalidInput:
        return False
    has_tokenizer = any((folder / name).exists() for name in TOKENIZER_FILES)
    if not has_tokenizer or any(mark in key for key in document for mark in HEADS):
        return False
    names = document.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)
