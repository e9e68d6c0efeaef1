"""The interface of drafters: they propose the tokens of a tree, and count at which rank they have a given text's.

A state and a step are those of `treeopt.records.trace`: at state t of an answer y1...yN the last committed token is
y_t (the prompt's last for t = 0), the target's own head gives the root y_{t+1}, and the guess at depth k is for
y_{t+1+k}.

b live rows · T nodes of the tree · D its depth · K guesses at most · d width of the target · V vocabulary
P tokens of a prompt · N of an answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.records.trace import MISS, NO_TRIAL, End
from treeopt.runtime.ranking import top_candidates
from treeopt.trees.tree import IntArray, Tree

DRAFT_DEPTH = 5  # guesses in a row of drafters that could go on for ever, unless told otherwise

Mark = Callable[[str], None]  # called with the name of a part of the step when it ends


@dataclass(frozen=True, eq=False)
class Answer:
    """A text to count ranks on.

    hidden : (N, d) states of the answer, or (P - 1 + N, d) of prompt and answer where the drafter `reads_prompt`:
             the target's last hidden states (after the final norm) of all tokens but the last one
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    end: End
    hidden: Tensor

    @property
    def state_hidden(self) -> Tensor:
        """(N, d)"""
        return self.hidden[len(self.hidden) - len(self.tokens) :]

    def labels(self, num_heads: int) -> Tensor:
        """(N, K) the token that has to be guessed at each state and depth; MISS or NO_TRIAL past the end."""
        n = len(self.tokens)
        beyond = MISS if self.end is End.EOS else NO_TRIAL
        padded = torch.tensor([*self.tokens, *[beyond] * num_heads])
        labels = torch.stack([padded[k : n + k] for k in range(1, num_heads + 1)], dim=1)
        labels[-1] = NO_TRIAL  # no step is taken at the last state
        return labels


@dataclass(frozen=True, eq=False)
class Level:
    """The nodes of one depth that have children: those whose children a sequential drafter has to draft.

    Rows are the expanding nodes of all depths in the order in which they are drafted; ``first`` of them are above.
    """

    first: int
    width: int  # candidates needed of each
    nodes: Tensor  # (E,) places in the tree
    paths: Tensor  # (E, depth + 1) nodes from the root to each
    parent: Tensor  # (E,) place of each one's parent among the nodes of the level above
    ancestors: Tensor  # (E, first + E) bool: the rows that each may attend to, itself among them
    row_depths: Tensor  # (first + E,) depths of these rows
    children: Tensor  # (C,) places of their children in the tree
    of: Tensor  # (C,) whose child each is, as a place in ``nodes``
    ranks: Tensor  # (C,)


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """The arrays of a tree that a step uses, on the device."""

    tree: Tree
    width: int  # candidates taken at each depth
    token_index: Tensor  # (T,) place of each node's token among the root and D x width candidates
    depths: Tensor  # (T,)
    ancestors: Tensor  # (T, T) bool
    paths: IntArray  # (T, D+1) nodes from the root to each node; column j holds j beyond it
    levels: tuple[Level, ...]  # of the depths 0...D-1

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeTensors:
        width = tree.max_rank + 1
        token_index = np.where(tree.depths == 0, 0, 1 + (tree.depths - 1) * width + tree.ranks)
        paths = np.tile(np.arange(tree.depth + 1), (len(tree), 1))
        for node in range(1, len(tree)):
            depth = tree.depths[node]
            paths[node, :depth] = paths[tree.parents[node], :depth]
            paths[node, depth] = node
        return cls(
            tree,
            width,
            torch.tensor(token_index, device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.mask, device=device),
            paths,
            tuple(_levels(tree, paths, device)),
        )


def _levels(tree: Tree, paths: IntArray, device: torch.device) -> list[Level]:
    found: list[Level] = []
    rows = np.zeros(0, dtype=np.int64)  # expanding nodes so far
    above = rows
    for depth in range(tree.depth):
        nodes = np.unique(tree.parents[tree.depths == depth + 1])
        children = np.flatnonzero(tree.depths == depth + 1)
        first, rows = len(rows), np.concatenate([rows, nodes])
        parent = np.searchsorted(above, tree.parents[nodes]) if depth else np.zeros(1, dtype=np.int64)
        arrays = (
            nodes,
            paths[nodes, : depth + 1],
            parent,
            tree.mask[np.ix_(nodes, rows)],
            tree.depths[rows],
            children,
            np.searchsorted(nodes, tree.parents[children]),
            tree.ranks[children],
        )
        width = int(tree.ranks[children].max()) + 1
        found.append(Level(first, width, *(torch.tensor(array, device=device) for array in arrays)))
        above = nodes
    return found


def blank_tokens(plan: TreeTensors, roots: Tensor) -> Tensor:
    """(b, T) tokens of a tree whose (b,) roots are known, -1 for the guesses to come."""
    tokens = roots.new_full((len(roots), len(plan.tree)), -1)
    tokens[:, 0] = roots
    return tokens


def take_candidates(tokens: Tensor, level: Level, logits: Tensor) -> None:
    """Write the tokens of a level's children into (b, T) ``tokens``: the best of (b, E, Vt) ``logits``."""
    best = top_candidates(logits, level.width)  # (b, E, width)
    tokens[:, level.children] = best[:, level.of, level.ranks]


class Draft(Protocol):
    """A drafter's state for the live rows of a decoder, in their order."""

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Add rows behind those that are there. hidden : (rows, longest, d) of the prompts, padded on the right."""

    def extend(self, tokens: Tensor, hidden: Tensor, counts: Sequence[int]) -> None:
        """Tokens that a step has committed, of every live row: ``counts`` of (b, n), and their hidden states (b, n, d).

        Work that only a tree step needs is left to `propose`, so that a plain step costs nothing.
        """

    def propose(self, plan: TreeTensors, roots: Tensor, mark: Mark) -> Tensor:
        """(b, T) token of every node, the (b,) roots first; -1 where the drafter has no such guess.

        Every call to ``mark`` ends a part of the step: "draft 0", "draft 1", ... for drafting the children of the
        expanding nodes of that depth.
        """

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""

    def clear(self) -> None:
        """Forget all rows."""


class Drafter(Protocol):
    """Heads, a model, or a rule that guesses what the target will say."""

    @property
    def kind(self) -> str: ...  # medusa, hydra, draft-model, ...

    @property
    def num_heads(self) -> int: ...  # K, the deepest guess

    @property
    def vocab_size(self) -> int: ...  # V, the target's

    @property
    def draft_vocab_size(self) -> int: ...  # Vt tokens that it knows, and so the most ranks it can tell apart

    @property
    def reads_prompt(self) -> bool: ...  # whether `ranks` needs the states of the prompt too

    def start(self, batch_size: int, capacity: int) -> Draft:
        """For a decoder of so many rows, each with room for ``capacity`` tokens and nodes."""

    def ranks(self, answers: Sequence[Answer], top_k: int) -> list[NDArray[np.int16]]:
        """(N, K) of each answer: the rank of the true token at every state and depth, along the true text.

        MISS from top_k on and for guesses past EOS, NO_TRIAL past any other end and at the last state.
        """
