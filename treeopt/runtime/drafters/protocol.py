"""The interface of drafters: they propose the tokens of a tree, and count at which rank they have a given text's.

A state and a step are those of `treeopt.records.trace`: at state t of an answer y1...yN the last committed token is
y_t (the prompt's last for t = 0), the target's own head gives the root y_{t+1}, and the guess at depth k is for
y_{t+1+k}.

Candidates have one order: by (float32 logit descending, token id ascending). Half precision is full of ties, which a
library's ``topk`` breaks as it likes. The decoder takes its candidates from here and the trace counts its ranks here, so
that both mean the same.

b live rows · T nodes of the tree · D its depth · K guesses at most · d width of the target · V vocabulary
P tokens of a prompt · N states, or of an answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.records.drafters import DRAFTERS
from treeopt.records.trace import MISS, NO_TRIAL, End
from treeopt.trees.tree import Tree

FEW = 128  # logits
DRAFT_DEPTH = 5  # guesses in a row of drafters that could go on for ever, unless told otherwise


@dataclass(frozen=True, eq=False)
class GivenText:
    """A text to count ranks on.

    hidden : (N, d) the target's last hidden states (after the final norm) of all tokens of the answer but the last one, or
             (P - 1 + N, d) with the prompt's before them where the drafter `reads_prompt`; wider where it has the target
             read between its layers, see `Target.read_layers`
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
        beyond = MISS if self.end is End.EOS else NO_TRIAL
        padded = torch.tensor([*self.tokens, *[beyond] * num_heads])
        labels = padded[1:].unfold(0, num_heads, 1)[: len(self.tokens)].clone()
        labels[-1] = NO_TRIAL  # no step is taken at the last state
        return labels


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes of one depth whose children are drafted. Those of all depths are what a sequential drafter attends to.

    parent : (b, E) place of each one's parent in the frontier above; (b, 1) zeros for the root's own. b is 1 for a tree,
             whose nodes are the same in all rows
    """

    parent: Tensor
    above: Frontier | None = None

    @cached_property
    def depth(self) -> int:
        return self.above.depth + 1 if self.above else 0

    @property
    def nodes(self) -> int:
        return self.parent.shape[1]

    @cached_property
    def first(self) -> int:
        """Nodes of the frontiers above, the root among them."""
        return self.above.first + self.above.nodes if self.above else 0

    def inherit(self, above: Tensor) -> Tensor:
        """(b, E, ...) what the nodes' parents have, of (b, E', ...) of the frontier above."""
        return above[torch.arange(len(above), device=above.device)[:, None], self.parent]

    @cached_property
    def ancestors(self) -> Tensor:
        """(b, E, first + E - 1) bool: the rows that each may attend to, itself among them."""
        rows, nodes = self.parent.shape
        if self.above is None:
            return torch.ones((rows, 1, 0), dtype=torch.bool, device=self.parent.device)
        itself = torch.eye(nodes, dtype=torch.bool, device=self.parent.device).expand(rows, -1, -1)
        return torch.cat([self.inherit(self.above.ancestors), itself], 2)

    @cached_property
    def beyond(self) -> Tensor:
        """(first + E - 1,) places of the rows behind the root."""
        if self.above is None:
            return self.parent[0, :0]
        return torch.cat([self.above.beyond, self.parent.new_full((self.nodes,), self.depth - 1)])


@dataclass(frozen=True, eq=False, kw_only=True)
class Level(Frontier):
    """A frontier of a tree, and its children."""

    width: int  # candidates needed of each
    among: Tensor  # (E,) places among the children of the level above
    of: Tensor  # (C,) whose child each child is, as a place among the nodes
    ranks: Tensor  # (C,)

    def best(self, logits: Tensor) -> Tensor:
        """(b, C) tokens of the level's children, by (b, E, Vt) logits of the nodes."""
        return top_candidates(logits, self.width)[:, self.of, self.ranks]


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """The arrays of a tree that a step uses, on the device."""

    tree: Tree
    width: int  # candidates taken at each depth
    heads: Tensor  # (T-1,) of each guess, from 0
    ranks: Tensor  # (T-1,)
    depths: Tensor  # (T,)
    ancestors: Tensor  # (T, T) bool
    paths: list[list[int]]  # nodes from the root to each node
    levels: tuple[Level, ...]  # of the depths 0...D-1

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> TreeTensors:
        return cls(
            tree,
            tree.max_rank + 1,
            torch.tensor(tree.depths[1:] - 1, device=device),
            torch.tensor(tree.ranks[1:], device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.mask, device=device),
            [np.flatnonzero(seen).tolist() for seen in tree.mask],
            tuple(_levels(tree, device)),
        )


def _levels(tree: Tree, device: torch.device) -> list[Level]:
    found: list[Level] = []
    above = children = np.zeros(1, dtype=np.int64)  # expanding nodes of the depth above, and all nodes of this one
    for depth in range(tree.depth):
        nodes = np.unique(tree.parents[tree.depths == depth + 1])
        parents, among = np.searchsorted(above, tree.parents[nodes]), np.searchsorted(children, nodes)
        above, children = nodes, np.flatnonzero(tree.depths == depth + 1)
        found.append(
            Level(
                parent=torch.tensor(parents, device=device)[None],
                above=found[-1] if found else None,
                width=int(tree.ranks[children].max()) + 1,
                among=torch.tensor(among, device=device),
                of=torch.tensor(np.searchsorted(nodes, tree.parents[children]), device=device),
                ranks=torch.tensor(tree.ranks[children], device=device),
            )
        )
    return found


class DrafterState(Protocol):
    """A drafter's state for the live rows of a decoder, in their order."""

    def prefill(self, prompts: Sequence[Sequence[int]], hidden: Tensor) -> None:
        """Add rows behind those that are there. hidden : (rows, longest, d) of the prompts, padded on the right."""

    def extend(self, tokens: Sequence[Sequence[int]], hidden: Tensor, paths: Sequence[Sequence[int]]) -> None:
        """The tokens that a step has committed, of every live row, and their places among its (b, T, d) hidden states.

        Work that only a tree step needs is left to `propose`, so that a plain step costs nothing.
        """

    def propose(self, plan: TreeTensors, roots: Tensor) -> Tensor:
        """(b, T) token of every node, the (b,) roots first; -1 where the drafter has no such guess."""

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""

    def clear(self) -> None:
        """Forget all rows."""


class Drafter:
    """Heads, a model, or a rule that guesses what the target will say.

    kind         : medusa, hydra, draft-model, ...
    num_heads    : K, the deepest guess
    vocab_size   : V, the target's
    reads_prompt : whether `ranks` needs the states of the prompt too
    has_marginals : whether its guesses at all depths are there at once, so that its drafts are `MarginalDraft`s
    widest        : guesses of the widest block, where every guess depends on how many there are; else 0
    """

    kind: str
    num_heads: int
    vocab_size: int
    reads_prompt = has_marginals = False
    widest = 0

    @property
    def draft_vocab_size(self) -> int:
        """Vt tokens that it knows: logits per guess, and so the most ranks that it can tell apart."""
        raise NotImplementedError

    @property
    def has_probabilities(self) -> bool:
        """Whether dynamic trees can be grown from it: its drafts are `LevelDraft`s."""
        return DRAFTERS[self.kind].by_level

    def start(self, batch_size: int, capacity: int) -> DrafterState:
        """For a decoder of so many rows, each with room for ``capacity`` tokens and nodes."""
        raise NotImplementedError

    def ranks(self, answers: Sequence[GivenText], top_k: int) -> list[NDArray[np.int16]]:
        """(N, K) of each answer: the rank of the true token at every state and depth, along the true text.

        MISS from top_k on and for guesses past EOS, NO_TRIAL past any other end and at the last state.
        """
        raise NotImplementedError


def top_candidates(logits: Tensor, width: int) -> Tensor:
    """Ids of the ``width`` best tokens by the common order: (..., V) to (..., width).

    >>> top_candidates(torch.tensor([1.0, 3.0, 3.0, 2.0]), 3).tolist()
    [1, 2, 3]
    """
    logits = logits.float()
    if width == 1:
        return logits.argmax(-1, keepdim=True)  # the first of equal maxima
    values, ids = logits.topk(min(width + 1, logits.shape[-1]), dim=-1)
    if values.numel() <= FEW:  # so few are looked at faster here than by torch
        has_ties = any(len(set(row)) < len(row) for row in values.reshape(-1, values.shape[-1]).tolist())
    else:
        has_ties = bool((values[..., 1:] == values[..., :-1]).any())
    if has_ties:
        tied = (values[..., 1:] == values[..., :-1]).any(-1)
        ids[tied, :width] = _in_order(logits[tied], values[tied][:, :width])
    return ids[..., :width]


def _in_order(logits: Tensor, best: Tensor) -> Tensor:
    """(N, width) ids of the best of (N, V) logits with ties, whose values are known: only what reaches the least is sorted."""
    row, ids = (~(logits < best[:, -1:])).nonzero(as_tuple=True)
    order = logits[row, ids].sort(descending=True, stable=True).indices
    order = order[row[order].sort(stable=True).indices]
    counts = row.bincount(minlength=len(logits))
    return ids[order][(counts.cumsum(0) - counts)[:, None] + torch.arange(best.shape[1], device=ids.device)]


@torch.inference_mode()
def rank_of(logits: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """(N,) rank of each token among (N, V) logits: #(greater) + #(equal, smaller id), never sorted.

    MISS from top_k on.

    >>> rank_of(torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 4), torch.arange(4), 3).tolist()
    [-1, 0, 1, 2]
    """
    logits, label = logits.float(), tokens.to(logits.device)[:, None]
    true = logits.gather(1, label)
    rank = (logits > true).sum(1)
    ties = (logits == true).sum(1) > 1
    if ties.any():
        ids = torch.arange(logits.shape[1], device=logits.device)
        rank[ties] += ((logits[ties] == true[ties]) & (ids < label[ties])).sum(1)
    return torch.where(rank < top_k, rank, MISS)
