"""What a training run begins with, the base, the texts to learn from and heads, and the files that it ends with.

Heads have to guess what this very model says, so its own answers are the better teacher (self-distillation,
Medusa, section 2.3.2). They are written block by block into a journal that is kept: the next kind of heads
learns from the same answers. An answer that runs into a loop is cut
there, as in calibration: in a loop every head looks brilliant and learns nothing.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from treeopt.errors import InvalidInput, TreeoptError
from treeopt.files import npz, storage
from treeopt.files.journal import Advance, Journal, Make, Say
from treeopt.records.drafters import DRAFTERS
from treeopt.records.options import Source
from treeopt.runtime.acceptance.rules import Greedy
from treeopt.runtime.checkpoints import save_heads
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.measure.ranks import Turns
from treeopt.runtime.memory import with_less_memory
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.session import open_prompts
from treeopt.runtime.setup import AnswerRow, Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text
from treeopt.runtime.training.recipe import PRECISIONS, Recipe

ANSWERS = {
    "tokens": npz.Form(np.int32, "tokens"),
    "starts": npz.Form(np.int64, "answers+1"),
    "prompt_tokens": npz.Form(np.int32, "answers"),
    "conversation": npz.Form(np.int32, "answers"),
}


def wanted_precision(given: str | None, target: Target) -> str:
    """The precision that is given; else bf16 for a target in half precision on a CUDA device."""
    if given:
        return given
    is_half = target.device.type == "cuda" and target.dtype.itemsize == 2
    return PRECISIONS[is_half and torch.cuda.is_bf16_supported()]


def open_seeds(source: Source, target: Target, most: int) -> PromptSet:
    """The first ``most`` prompts to answer, in the seed's order; the demo's are none of calibration's and bench's."""
    found = open_prompts(source, target, held_out=False, most=most, drawn=most)
    return replace(found, conversations=found.conversations[:most])


def make_heads(target: Target, recipe: Recipe, texts: Sequence[Text] = ()) -> Any:
    """Heads to train, in float32 or more: they guess what the target itself says next.

    texts : by which the tokens are chosen that EAGLE-3 guesses

    From now on the target hands out the states that the heads read.
    """
    torch.manual_seed(recipe.seed)
    lm_head = target.lm_head.weight.detach().to(torch.promote_types(target.dtype, torch.float32))
    kind = next(name for name, row in DRAFTERS.items() if recipe.kind in row.recipes)
    heads = part_of(kind, "begins")(target, recipe, lm_head, texts)
    if recipe.start is not None:
        heads = _started(target, recipe, kind, heads)
    heads = heads.requires_grad_(True)
    if heads.shares_projection and (weight := getattr(heads, "projection", None)) is not None:
        weight.requires_grad_(False)  # it is the target's
    target.read_layers(heads.layers_of(target.num_layers))
    return heads


def _started(target: Target, recipe: Recipe, kind: str, new: Any) -> Any:
    """The heads that a recipe goes on from, in the number format of new ones; what their layers are like is theirs to say."""
    depth = recipe.num_heads if recipe.defaults.own_vocab else None  # an unrolled layer has no number of its own
    try:
        found: Any = open_drafter(recipe.start, target, depth=depth).drafter
    except TreeoptError as error:
        raise type(error)(error.args[0].replace("`drafter`", "`start`")) from None
    if (found.kind, found.num_heads, found.num_layers) != (kind, recipe.num_heads, recipe.layers):
        raise InvalidInput(
            f"`start` must be heads of the kind {recipe.kind} with {recipe.num_heads} heads of {recipe.layers} layers, but "
            f"{recipe.start} has others: say what they are by `kind`, `num_heads` and `num_layers`."
        )
    return found.to(next(new.parameters()).dtype).train()


def save_result(heads: Any, target: Target, recipe: Recipe, folder: Path) -> list[Path]:
    """Write the heads, in the target's dtype: the files written."""
    heads = heads.eval().requires_grad_(False).to(target.dtype)
    lm_head = target.lm_head.weight if heads.shares_projection else None
    return save_heads(heads, recipe.defaults.layout, folder, base=target.name, lm_head=lm_head)


BLOCK_CONVERSATIONS = 64  # a killed run loses one block at most
DIGEST_NUMBERS = 64
FEWEST_ANSWER_TOKENS = 2  # fewer leave no head anything to guess


@dataclass(frozen=True)
class Asking:
    """How the model answers: where answers end, the rule that chooses their tokens, and the longest text.

    most_tokens : longest text, prompt included; what is longer is cut
    """

    stop: StopRule
    acceptance: Greedy
    most_tokens: int
    batch_size: int = 32


def own_texts(
    target: Target,
    prompts: PromptSet,
    folder: Path,
    asking: Asking,
    *,
    advance: Advance = lambda conversations: None,
    say: Say = lambda message: None,
    elsewhere: Make | None = None,
) -> list[Text]:
    """The model's own answers to all conversations, kept in a folder of ``folder`` for the same question.

    elsewhere : makes the blocks; None where the target here answers
    """
    key = answers_key(target, prompts, asking)
    place = folder / f"answers-{hashlib.sha256(storage.to_json(key).encode()).hexdigest()[:12]}"
    journal, answers = Journal(place, key, ".npz"), AnswerWriter(target, prompts, asking)
    sizes = {n: len(block) for n, block in enumerate(answers.blocks)}
    journal.fill(sizes, elsewhere or (lambda numbers: ((n, answers.block(n, say)) for n in numbers)), advance, say)
    read = (_read_block(journal.block(n), block, asking.most_tokens) for n, block in enumerate(answers.blocks))
    return [text for texts in read for text in texts]


def answers_key(target: Target, prompts: PromptSet, asking: Asking) -> dict[str, object]:
    return {
        "max_new_tokens": asking.stop.max_new_tokens,
        "eos_ids": sorted(asking.stop.eos_ids),
        "acceptance": asking.acceptance.record,
        "model": target.name,
        "revision": target.revision,
        "dtype": str(target.dtype),
        "weights": weights_digest(target.model),
        "conversations": hashlib.sha256(" ".join(c.sha256 for c in prompts.conversations).encode()).hexdigest(),
    }


class AnswerWriter:
    """Writes blocks of a target's answers, with as many rows at once as fit into memory."""

    def __init__(self, target: Target, prompts: PromptSet, asking: Asking) -> None:
        self.target, self.prompts, self.asking, self._rows = target, prompts, asking, asking.batch_size
        asked, size = prompts.conversations, BLOCK_CONVERSATIONS
        self.blocks = [asked[i : i + size] for i in range(0, len(asked), size)]

    def block(self, number: int, say: Say) -> bytes:
        attempt = partial(answer_block, self.target, self.prompts, self.blocks[number], self.asking)
        answered, self._rows = with_less_memory(attempt, self._rows, say)
        rows = [row for of_one in answered for row in of_one]
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.array([token for row in rows for token in (*row.prompt, *row.tokens)], dtype=np.int32),
            "starts": np.cumsum([0, *(len(row.prompt) + len(row.tokens) for row in rows)], dtype=np.int64),
            "prompt_tokens": np.array([len(row.prompt) for row in rows], dtype=np.int32),
            "conversation": np.repeat(np.arange(len(answered), dtype=np.int32), list(map(len, answered))),
        }
        return npz.packed(lambda stream: npz.write(stream, arrays))


def answer_block(
    target: Target, prompts: PromptSet, conversations: Sequence[Conversation], asking: Asking, batch_size: int
) -> list[list[AnswerRow]]:
    """The answers to every turn of some conversations; a turn that cannot be asked ends its conversation."""
    turns = Turns(target, replace(prompts, conversations=tuple(conversations)))
    for asked, _ in turns.rounds():
        order = sorted(range(len(asked)), key=lambda i: len(asked[i]))  # prefills are as long as their longest prompt
        texts = [asked[i] for i in order]
        rows = decode(target, None, texts, batch_size=batch_size, stop=asking.stop, acceptance=asking.acceptance)
        for i, row in zip(order, rows, strict=True):
            turns.end(replace(row, id=i))
    return turns.answered


def weights_digest(model: nn.Module) -> str:
    """sha256 over the first numbers of every tensor: enough to tell a model from its own next version."""
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        digest.update(tensor.detach().flatten()[:DIGEST_NUMBERS].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def given_texts(target: Target, prompts: PromptSet, asking: Asking) -> list[Text]:
    """The given answers, each after the prompt of its turn, cut where the model's own would be."""
    setup, turns = Setup(target, None, asking.stop), Turns(target, prompts, given=True)
    for asked, answers in turns.rounds():
        for i, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            turns.end(setup.row(i, prompt, answer))
    found: list[Text] = []
    for conversation, rows in zip(prompts.conversations, turns.answered, strict=True):
        for row in rows:
            found += _texts([*row.prompt, *row.tokens], len(row.prompt), conversation, asking.most_tokens)
    return found


def _read_block(file: Path, block: Sequence[Conversation], most_tokens: int) -> Iterator[Text]:
    arrays = npz.fitting(npz.read(file, tuple(ANSWERS)), ANSWERS)
    turns = zip(pairwise(arrays["starts"]), arrays["prompt_tokens"], arrays["conversation"], strict=True)
    for (begin, end), prompt_tokens, i in turns:
        yield from _texts(arrays["tokens"][begin:end], int(prompt_tokens), block[i], most_tokens)


def _texts(
    tokens: Sequence[int] | NDArray[np.int32], prompt_tokens: int, of: Conversation, most_tokens: int
) -> list[Text]:
    """A text of at most so many tokens; none where that leaves the heads nothing to guess."""
    kept = np.array(tokens[:most_tokens], dtype=np.int32)
    return [Text(kept, prompt_tokens, of.sha256)] if len(kept) >= prompt_tokens + FEWEST_ANSWER_TOKENS else []
