"""The texts that heads learn from: the model's own answers to seed prompts, or answers that are given.

Heads have to guess what this very model says, so its own answers are the better teacher (self-distillation,
Medusa, section 2.3.2). They are written block by block into a journal that is kept: the next kind of heads
learns from the same answers, and several processes share the work. An answer that runs into a loop is cut
there, as in calibration: in a loop every head looks brilliant and learns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from treeopt.errors import InvalidInput
from treeopt.files import npz, storage
from treeopt.files.journal import Journal
from treeopt.runtime.acceptance.greedy import Acceptance
from treeopt.runtime.decode import decode
from treeopt.runtime.memory import with_less_memory
from treeopt.runtime.prompts.chat import Tokens
from treeopt.runtime.prompts.sets import Conversation, PromptSet
from treeopt.runtime.stop import SequenceEnd, StopRule
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text

BLOCK_CONVERSATIONS = 64  # a killed run loses one block at most
DIGEST_NUMBERS = 64
FEWEST_ANSWER_TOKENS = 2  # fewer leave no head anything to guess
ALONE = SimpleNamespace(process_index=0, num_processes=1, wait_for_everyone=lambda: None)
Turn = tuple[int, Tokens, Tokens]  # place of the conversation, prompt, answer


@dataclass(frozen=True)
class Asking:
    """How the model answers: where answers end, the rule that chooses their tokens, and the longest text.

    most_tokens : longest text, prompt included; what is longer is cut
    """

    stop: StopRule
    acceptance: Acceptance
    most_tokens: int
    batch_size: int = 32


def own_texts(
    target: Target,
    prompts: PromptSet,
    folder: Path,
    asking: Asking,
    *,
    among: Any = ALONE,
    advance: Callable[[int], None] = lambda conversations: None,
    say: Callable[[str], None] = lambda message: None,
    elsewhere: Callable[[Path, dict[str, object], list[int]], None] | None = None,
) -> list[Text]:
    """The model's own answers to all conversations, kept in a folder of ``folder`` for the same question.

    among     : this process among those that train together, as accelerate says it
    elsewhere : finishes the blocks of a journal that are not, by its folder and key and the blocks' sizes in conversations;
                None where the target here answers
    """
    key: dict[str, object] = {
        "max_new_tokens": asking.stop.max_new_tokens,
        "eos_ids": sorted(asking.stop.eos_ids),
        "acceptance": asking.acceptance.record,
        "model": target.name,
        "revision": target.revision,
        "dtype": str(target.dtype),
        "weights": weights_digest(target.model),
        "conversations": hashlib.sha256(" ".join(c.sha256 for c in prompts.conversations).encode()).hexdigest(),
    }
    place = folder / f"answers-{hashlib.sha256(storage.to_json(key).encode()).hexdigest()[:12]}"
    first = among.process_index
    if first == 0:
        Journal(place, key, ".npz")
    among.wait_for_everyone()
    journal, answers = Journal(place, key, ".npz"), AnswerWriter(target, prompts, asking)
    blocks = answers.blocks
    if elsewhere is not None and first == 0:
        elsewhere(place, key, [len(block) for block in blocks])
    for number in range(first, len(blocks), among.num_processes) if elsewhere is None else ():
        if not journal.is_finished(number):
            answers.write(journal.block(number), number, say)
            journal.finish(number)
        advance(len(blocks[number]) * among.num_processes)
    among.wait_for_everyone()
    read = (_read_block(journal.block(n), block, asking.most_tokens) for n, block in enumerate(blocks))
    return [text for texts in read for text in texts]


class AnswerWriter:
    """Writes blocks of a target's answers, with as many rows at once as fit into memory."""

    def __init__(self, target: Target, prompts: PromptSet, asking: Asking) -> None:
        self.target, self.prompts, self.asking, self._rows = target, prompts, asking, asking.batch_size
        asked, size = prompts.conversations, BLOCK_CONVERSATIONS
        self.blocks = [asked[i : i + size] for i in range(0, len(asked), size)]

    def write(self, file: Path, number: int, say: Callable[[str], None]) -> None:
        attempt = partial(answer_block, self.target, self.prompts, self.blocks[number], self.asking)
        answered, self._rows = with_less_memory(attempt, self._rows, say)
        texts = [prompt + answer for _, prompt, answer in answered]
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.array([token for text in texts for token in text], dtype=np.int32),
            "starts": np.cumsum([0, *map(len, texts)], dtype=np.int64),
            "prompt_tokens": np.array([len(prompt) for _, prompt, _ in answered], dtype=np.int32),
            "conversation": np.array([i for i, _, _ in answered], dtype=np.int32),
        }
        npz.write(file, arrays)


def answer_block(
    target: Target, prompts: PromptSet, conversations: Sequence[Conversation], asking: Asking, batch_size: int
) -> list[Turn]:
    """Every turn of some conversations; one that cannot be asked ends its conversation."""
    said: list[list[Tokens]] = [[] for _ in conversations]
    found: list[Turn] = []
    going = list(range(len(conversations)))
    while going:
        asked: list[tuple[int, Tokens]] = []
        for i in going:
            try:
                tokens = prompts.next_prompt(conversations[i], said[i])
            except InvalidInput:  # the model's template refuses its own answer
                continue
            if len(tokens) < target.context:
                asked.append((i, tokens))
        asked.sort(key=lambda turn: len(turn[1]))  # a batch is prefilled together, as long as its longest prompt
        texts = [tokens for _, tokens in asked]
        rows = decode(target, None, texts, batch_size=batch_size, stop=asking.stop, acceptance=asking.acceptance)
        for (i, tokens), row in zip(asked, rows, strict=True):
            said[i].append(tuple(row.tokens))
            found.append((i, tokens, said[i][-1]))
        going = [i for i, _ in asked if len(said[i]) < conversations[i].num_turns]
    return sorted(found, key=lambda turn: turn[0])  # stable: turns stay in their order


def weights_digest(model: nn.Module) -> str:
    """sha256 over the first numbers of every tensor: enough to tell a model from its own next version."""
    digest = hashlib.sha256()
    for name, tensor in model.named_parameters():
        digest.update(name.encode())
        digest.update(tensor.detach().flatten()[:DIGEST_NUMBERS].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def given_texts(target: Target, prompts: PromptSet, asking: Asking) -> list[Text]:
    """The given answers, each after the prompt of its turn, cut where the model's own would be."""
    found = []
    for conversation in prompts.conversations:
        before: list[Tokens] = []
        for turn in range(conversation.num_turns):
            try:
                prompt = prompts.next_prompt(conversation, before)
                before.append(prompts.given_answer(conversation, turn))
            except InvalidInput:
                break
            if len(prompt) >= target.context:
                break
            n = len(SequenceEnd(asking.stop, target.context - len(prompt)).take(before[-1]))
            found += _texts(prompt + before[-1][:n], len(prompt), conversation, asking.most_tokens)
    return found


def _read_block(file: Path, block: Sequence[Conversation], most_tokens: int) -> Iterator[Text]:
    arrays = npz.read(file, ("tokens", "starts", "prompt_tokens", "conversation"))
    turns = zip(pairwise(arrays["starts"]), arrays["prompt_tokens"], arrays["conversation"], strict=True)
    for (begin, end), prompt_tokens, i in turns:
        yield from _texts(arrays["tokens"][begin:end], int(prompt_tokens), block[i], most_tokens)


def _texts(
    tokens: Sequence[int] | NDArray[np.int32], prompt_tokens: int, of: Conversation, most_tokens: int
) -> list[Text]:
    """A text of at most so many tokens; none where that leaves the heads nothing to guess."""
    kept = np.array(tokens[:most_tokens], dtype=np.int32)
    return [Text(kept, prompt_tokens, of.sha256)] if len(kept) >= prompt_tokens + FEWEST_ANSWER_TOKENS else []
