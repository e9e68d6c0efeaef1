"""Prompts: conversations from a file or a dataset, or cut from the standard library for the demo.

A conversation is known by a hash of what it asks, so that bench never decodes one that calibration saw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.runtime.prompts.encoder import Encoder, Tokens
from treeopt.runtime.prompts.messages import COLUMNS, Said, read_conversation, read_group
from treeopt.runtime.prompts.order import Draw, Order, spread
from treeopt.runtime.prompts.rows import Rows, Skipped, listed, read_rows

if TYPE_CHECKING:
    from treeopt.runtime.target import Target

MOST_GROUPS = 64
AS_THEY_STAND = Order()
SLOT_CHARS = 1000  # the demo cuts one prompt per so many characters of a module
DEMO_TOKENS = (48, 128)  # shortest and longest demo prompt


@dataclass(frozen=True)
class Conversation:
    """The prompts of one row: one turn of the user's, or several, each after the answer to the one before.

    first    tokens of the first prompt
    messages (role, text): the system text if there is one, then the user's turns
    answers  given answers, one per turn; empty where the target is to answer
    row      of the source, counted from 1
    """

    first: Tokens
    messages: tuple[Said, ...]
    answers: tuple[str, ...] = ()
    group: str = ""
    row: int = 0

    @property
    def turns(self) -> tuple[str, ...]:
        return tuple(text for role, text in self.messages if role == "user")

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @cached_property
    def sha256(self) -> str:
        """16 hex digits over the first prompt's tokens and, where there are any, the later turns."""
        digest = hashlib.sha256(np.array(self.first, dtype="<i4").tobytes())
        if self.num_turns > 1:
            digest.update(json.dumps(self.turns[1:]).encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class PromptSet:
    """Distinct conversations in a fixed order, and where they come from.

    fingerprint : sha256 of the data
    skipped     : rows that give no prompt, the first ones; n_skipped of all
    n_repeated  : rows that ask what an earlier one asks, and are left out
    seed        : that the order was drawn by (`treeopt.runtime.prompts.order`); None: as in the source
    """

    conversations: tuple[Conversation, ...]
    name: str
    fingerprint: str
    encoder: Encoder = field(repr=False)
    skipped: tuple[Skipped, ...] = ()
    n_skipped: int = 0
    n_repeated: int = 0
    seed: int | None = None

    def without(self, hashes: Iterable[str]) -> PromptSet:
        seen = set(hashes)
        kept = tuple(c for c in self.conversations if c.sha256 not in seen)
        return replace(self, conversations=kept)

    def next_prompt(self, conversation: Conversation, answers: Sequence[Sequence[int]]) -> Tokens:
        """Tokens to answer next, after the emitted tokens of the answers to the turns before.

        They may be too many for the context: the answers decide that. Raises InvalidInput where the
        model's chat template refuses the messages.
        """
        assert len(answers) < conversation.num_turns, "every turn is answered"
        said = [tuple(map(int, answer)) for answer in answers]
        return self.encoder.next_prompt(conversation.messages, conversation.first, said)

    def given_answer(self, conversation: Conversation, turn: int) -> Tokens:
        """Tokens of the given answer to a turn (0 is the first), ended by EOS where the target has one."""
        return self.encoder.given_answer(conversation.messages, conversation.answers, turn)


def load_prompts(
    target: Target,
    source: str,
    *,
    column: str | None = None,
    group_by: str | None = None,
    responses: str | None = None,
    chat_template: bool = True,
    split: str | None = None,
    order: Order = AS_THEY_STAND,
) -> PromptSet:
    """Conversations of a file, folder or hub dataset (`read_rows`), each row being one.

    column    : texts, lists of the user's turns, or lists of messages; None: the first of `COLUMNS` that
                the row has, an instruction with its input
    group_by  : column whose values name the groups, at most 64
    responses : column of given answers: a text, a list of one per turn, or messages
    order     : which are taken; with a seed they are shuffled, and groups spread evenly

    Rows that cannot be asked are skipped, with their reasons. Raises InvalidInput where none is left.
    """
    if len(target.tokenizer) > target.vocab_size:  # there would be ids without an embedding
        raise InvalidInput(f"The tokenizer must belong to the model, but has more tokens, {len(target.tokenizer)}.")
    rows, drawn = read_conversations(source, column, group_by, responses, split=split, order=order)
    encoder = Encoder.of_target(target, chat_template=chat_template)
    found: list[Conversation] = []
    for draft in drawn.things():
        try:
            first = encoder.first_prompt(draft.messages)
            if not 1 <= len(first) < target.context:
                raise InvalidInput(f"it must have 1 to {target.context - 1} tokens, but has {len(first)}")
            found.append(replace(draft, first=first))
        except InvalidInput as error:
            rows.skip(draft.row, str(error))
    if not found:
        raise InvalidInput(
            f"`prompts` must hold at least one usable prompt, but none of the {rows.n_skipped} in {rows.name} "
            f"is ({rows.reasons('row')})."
        )
    check_groups({conversation.group for conversation in found}, group_by)
    kept, fingerprint = _distinct(found, order.seed), rows.fingerprint()
    repeated = drawn.repeated + len(found) - len(kept)
    return PromptSet(kept, rows.name, fingerprint, encoder, tuple(rows.skipped), rows.n_skipped, repeated, order.seed)


def read_conversations(
    source: str,
    column: str | None = None,
    group_by: str | None = None,
    responses: str | None = None,
    *,
    split: str | None = None,
    order: Order = AS_THEY_STAND,
) -> tuple[Rows, Draw[Conversation]]:
    """The rows of a source, and the conversations drawn of them, without tokens. Options are those of `load_prompts`."""
    rows, drawn = read_rows(source, split=split), Draw[Conversation](order)
    for number, conversation in rows.each(
        lambda record: Conversation((), *read_conversation(record, column, responses), read_group(record, group_by))
    ):
        drawn.add(json.dumps(conversation.messages), replace(conversation, row=number))
    rows.check_columns({"`column`": column, "`group_by`": group_by, "`responses`": responses})
    if rows.columns and column is None and not any(name in rows.columns for name in COLUMNS):
        raise InvalidInput(
            f"A prompt must stand under {listed(COLUMNS)}, but {rows.name} has {listed(rows.columns)}: name one with `column`."
        )
    return rows, drawn


def demo_prompts(
    target: Target, *, group_by: str | None = None, held_out: bool = True, most: int | None = None, seed: int | None = 0
) -> PromptSet:
    """Beginnings cut from the held-out modules of this interpreter's standard library, or from the others.

    At most one prompt, of 48 to 128 tokens, starts in every stretch of 1,000 characters, at a line.
    Their order is shuffled by the seed. ``group_by="module"`` groups them by the module or package that ``import``
    names. ``most`` keeps the first ones only, and a few less where some are alike.
    """
    from treeopt.demo.corpus import fingerprint, standard_library

    if group_by not in (None, "module"):
        raise InvalidInput(f"The demo's prompts can be grouped by module only, but `group_by` is {group_by}.")
    modules = standard_library(held_out=held_out)
    texts: list[tuple[str, str]] = []
    for module in modules:
        package = module.name.split("/")[0].removesuffix(".py") if group_by else ""
        for start in range(0, len(module.text) - SLOT_CHARS, SLOT_CHARS):
            slot = module.text[start : start + SLOT_CHARS]
            texts.append((slot[slot.find("\n") + 1 :], package))
    rng = np.random.default_rng((seed or 0) % 2**64)
    order = rng.permutation(len(texts))
    lengths = rng.integers(DEMO_TOKENS[0], DEMO_TOKENS[1] + 1, len(texts))
    chosen = (np.sort(order) if seed is None else order)[:most].tolist()
    all_ids = target.tokenizer([texts[i][0] for i in chosen])["input_ids"]
    found = []
    for row, (i, ids) in enumerate(zip(chosen, all_ids, strict=True), 1):
        if first := tuple(ids[: lengths[i]]):
            message = ("user", str(target.tokenizer.decode(first)))
            found.append(Conversation(first, (message,), group=texts[i][1], row=row))
    encoder = Encoder.of_target(target, chat_template=False)
    name = f"{'held-out' if held_out else 'training'} modules of the Python standard library"
    return PromptSet(_distinct(found, seed), name, fingerprint(modules), encoder, seed=seed)


def check_groups(groups: Collection[str], group_by: str | None) -> None:
    """Raise InvalidInput for too many groups."""
    if len(groups) > MOST_GROUPS:
        raise InvalidInput(f"`group_by` may have {MOST_GROUPS} different values, but {group_by} has more.")


def _distinct(found: Sequence[Conversation], seed: int | None) -> tuple[Conversation, ...]:
    """The conversations, groups spread; of several with the same prompts the first stays."""
    unique: dict[str, Conversation] = {}
    for conversation in found:
        unique.setdefault(conversation.sha256, conversation)
    kept = tuple(unique.values())
    return tuple(kept[i] for i in spread([conversation.group for conversation in kept], seed))
