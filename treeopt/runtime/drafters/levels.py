"""The nodes of a step: drafted level by level, for a given tree or for a pool of a dynamic one, and which guesses are accepted.

`drafting_of` says for each kind of draft how that is done. A new kind registers its own function, in its drafter's file.

b live rows · T nodes of the tree · E nodes of a level that are expanded · k children of each · M nodes of the pool
V vocabulary of the drafter, or of the target
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatch
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.rules import SAME_TEXT
from treeopt.runtime.acceptance.rules import Greedy, Nodes, follow_each
from treeopt.runtime.drafters.protocol import Drafter, DrafterState, Frontier, GivenText, TreeTensors, top_candidates
from treeopt.trees.draft import Draft, DynamicTree
from treeopt.trees.tree import Tree


@dataclass(frozen=True, eq=False)
class Pool:
    """The nodes that a tree is chosen from: of a dynamic one level by level, of one over marginals its own, best first.

    tokens  : (b, M), -1 where the drafter has no such guess
    parents : (b, M) place of each one's parent in the pool, -1 for the root; always before its children
    scores  : (b, M) log-probability of the path, never above that of the parent's
    depths  : (M,) or (b, M) from 1
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    depths: Tensor

    def best(self, count: int) -> Tensor:
        """(b, count) places of the best nodes, best first; of equal scores those that come first in the pool."""
        return self.scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


class GrowingPool:
    """The pool of one topk while it grows, level by level."""

    def __init__(self, topk: int, roots: Tensor) -> None:
        self.topk, self.rows = topk, torch.arange(len(roots), device=roots.device)[:, None]
        self.places = torch.full_like(self.rows, -1)  # (b, E) of the expanded nodes in the pool
        self.scores = torch.zeros(self.rows.shape, device=roots.device)  # (b, E) theirs
        self.levels: list[tuple[Tensor, ...]] = []  # tokens, parents, scores and depths of each

    def add(self, children: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Take the (b, E, k or more) children of the expanded nodes and their log-probabilities.

        Returns (b, k) of the nodes to expand next, best first: places of their parents among the E, and tokens.
        """
        topk, size = self.topk, sum(tokens.shape[1] for tokens, *_ in self.levels)
        tokens = children[..., :topk].flatten(1)  # (b, E k)
        scores = (self.scores[..., None] + own[..., :topk]).flatten(1).masked_fill(tokens < 0, -torch.inf)
        depths = self.rows.new_full((tokens.shape[1],), len(self.levels) + 1)
        self.levels.append((tokens, self.places.repeat_interleave(topk, 1), scores, depths))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        self.places, self.scores = size + best, scores[self.rows, best]
        return best // topk, tokens[self.rows, best]

    def whole(self) -> Pool:
        return Pool(*(torch.cat(part, -1) for part in zip(*self.levels, strict=True)))


class LevelDraft:
    """The base of drafts that go level by level. A subclass says what `begin` and `logits` compute."""

    drafter: Any

    def begin(self, roots: Tensor, depth: int) -> None:
        """Start to draft behind the (b,) roots, as deep as ``depth``."""
        raise NotImplementedError

    def logits(self, level: Frontier, tokens: Tensor) -> Tensor:
        """(b, E, V) for the children of a level's nodes, by the nodes' (b, E) tokens; (b, 1, V) where all have the same."""
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """(..., V) logits as the drafter itself gives them, for probabilities."""
        return logits

    def children(self, level: Frontier, tokens: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """(b, E, k) likeliest children of a level's nodes, by its own ids, and their log-probabilities; E may be 1 as above."""
        return self.likeliest(self.logits(level, tokens), topk)

    def likeliest(self, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """(..., k) of (..., V) logits, and their log-probabilities."""
        guesses = top_candidates(logits, topk)
        logits = self.scores(logits if logits.dtype == torch.float64 else logits.float())
        return guesses, (logits.gather(-1, guesses) - logits.logsumexp(-1, keepdim=True)).clamp_max(0)

    def named(self, guesses: Tensor, depth: int | Tensor) -> Tensor:
        """The target's tokens for (b, ...) guesses behind nodes of a depth, or (...,) depths; -1 for those that are none."""
        ids = getattr(self.drafter, "token_ids", None)
        return guesses if ids is None else ids[guesses]

    def propose(self, plan: TreeTensors, roots: Tensor) -> Tensor:
        """(b, T) token of every node: see `DrafterState`."""
        tokens = [roots[:, None]]
        self.begin(roots, plan.tree.depth)
        for level in plan.levels:
            logits = self.logits(level, tokens[-1][:, level.among])
            tokens.append(self.named(level.best(logits), level.depth))
        return torch.cat(tokens, 1)

    def grow(self, levels: int, topks: Sequence[int], roots: Tensor) -> list[Pool]:
        """The pool of a dynamic tree for each topk, behind the (b,) roots: of each level the topk best nodes are expanded.

        The nodes of a level are drafted together, one topk's beside the other's.
        """
        level, tokens = Frontier(torch.zeros_like(roots)[:, None]), roots[:, None]
        pools = [GrowingPool(topk, roots) for topk in topks]
        among = [slice(0, 1)] * len(topks)  # each topk's nodes in the level: the root is all of theirs
        below_root = [slice(*ends) for ends in pairwise(accumulate(topks, initial=0))]
        self.begin(roots, levels)
        for depth in range(levels):
            guesses, own = self.children(level, tokens, max(topks))
            children = self.named(guesses, depth).expand(-1, level.nodes, -1)
            own = own.expand_as(children)
            grown = [pool.add(children[:, part], own[:, part]) for pool, part in zip(pools, among, strict=True)]
            parents = [part.start + parent for part, (parent, _) in zip(among, grown, strict=True)]
            level, tokens = Frontier(torch.cat(parents, 1), level), torch.cat([token for _, token in grown], 1)
            among = below_root
        return [pool.whole() for pool in pools]

    def read(self, answer: GivenText) -> None:
        """Take a whole text, so that `seek` can go to its states; rows that were there are forgotten."""
        raise NotImplementedError

    def seek(self, states: Sequence[int]) -> None:
        """Have a row at each of some neighbouring states of the text that was read, as if decoding had come there.

        The states of one call are those of the last one again, or come before them.
        """
        raise NotImplementedError


def chosen_tree(pool: Pool, roots: Tensor, rows_each: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best nodes of a pool and the roots as trees of so many rows, ordered as in the pool.

    Returns (b, T) tokens, (b, T) places of the parents (0 for the root's own), (b, T) depths and (b, T, T) ancestors.
    """
    count = rows_each - 1
    (b, size), device = pool.scores.shape, pool.scores.device
    rows = torch.arange(b, device=device)[:, None]
    nodes = pool.best(count).sort(dim=1).values  # (b, T-1)
    place = torch.zeros((b, size + 1), dtype=torch.long, device=device)  # in the tree; the last is the root's
    place[rows, nodes] = torch.arange(1, count + 1, device=device).expand(b, -1)
    parents = torch.cat([torch.zeros_like(rows), place[rows, pool.parents[rows, nodes]]], 1)
    tokens = torch.cat([roots[:, None], pool.tokens[rows, nodes]], 1)
    depths = torch.cat([torch.zeros_like(rows), pool.depths.expand(b, -1).gather(1, nodes)], 1)
    ancestors = torch.eye(count + 1, dtype=torch.bool, device=device).repeat(b, 1, 1)
    above = parents
    for _ in range(int(pool.depths.max())):
        ancestors.scatter_(2, above[..., None], True)
        above = parents.gather(1, above)
    return tokens, parents, depths, ancestors


@dataclass(frozen=True, eq=False)
class Drafted:
    """The nodes that a step verifies.

    tokens    : (b, T) of every node, the roots first; -1 for no guess
    depths    : ([b,] T)
    ancestors : ([b,] T, T) which nodes are above each, itself among them
    accepted  : of (b, T) tokens that the target chose behind each node and their (b, T, V) logits: the tokens of the nodes,
                those chosen, and of each row the accepted path, root first
    """

    tokens: Tensor
    depths: Tensor
    ancestors: Tensor
    accepted: Callable[[Tensor, Tensor], tuple[Nodes, Nodes, Nodes]]


Drafting = Callable[[Tensor], Drafted]  # of the (b,) roots


@singledispatch
def drafting_of(
    draft: Draft, drafter: Drafter, state: DrafterState, acceptance: Greedy, device: torch.device
) -> Drafting:
    """The function that drafts such a tree at every step; InvalidInput where drafter or rule cannot."""
    raise InvalidInput(f"{drafter.kind} does not draft such a tree as {draft.name}.")


@drafting_of.register
def _(tree: Tree, drafter: Drafter, state: DrafterState, acceptance: Greedy, device: torch.device) -> Drafting:
    check_fits(drafter, tree.depth, tree.max_rank)
    plan = TreeTensors.of(tree, device)

    def drafted(roots: Tensor) -> Drafted:
        tokens = state.propose(plan, roots)

        def accepted(choices: Tensor, logits: Tensor) -> tuple[Nodes, Nodes, Nodes]:
            known, chosen = torch.stack([tokens, choices]).tolist()
            return known, chosen, [plan.paths[node] for node in acceptance.accept(tree, known, chosen, logits)]

        return Drafted(tokens, plan.depths, plan.ancestors, accepted)

    return drafted


@drafting_of.register
def _(tree: DynamicTree, drafter: Drafter, state: object, acceptance: Greedy, device: torch.device) -> Drafting:
    if not isinstance(state, LevelDraft):
        raise InvalidInput(f"A dynamic tree needs a drafter with probabilities, but {drafter.kind} has none.")
    check_fits(drafter, tree.levels, tree.topk - 1)
    return drafting_by(lambda roots: state.grow(tree.levels, [tree.topk], roots)[0], tree, acceptance)


def drafting_by(grow: Callable[[Tensor], Pool], draft: Draft, acceptance: Greedy) -> Drafting:
    """What drafts the best nodes of a pool that is grown anew at every step, behind the (b,) roots.

    Raises InvalidInput for a rule that depends on how guesses were drafted.
    """
    if (rule := acceptance.record["rule"]) not in SAME_TEXT:
        raise InvalidInput(
            f"A draft built anew at every step needs greedy decoding or sampling, but the rule is {rule}."
        )

    def drafted(roots: Tensor) -> Drafted:
        tokens, parents, depths, ancestors = chosen_tree(grow(roots), roots, len(draft))

        def accepted(choices: Tensor, logits: Tensor) -> tuple[Nodes, Nodes, Nodes]:
            known, chosen, above = torch.stack([tokens, choices, parents]).tolist()
            return known, chosen, follow_each(above, known, chosen)

        return Drafted(tokens, depths, ancestors, accepted)

    return drafted


def check_fits(drafter: Drafter, depth: int, max_rank: int) -> None:
    """Raise InvalidInput for a draft that is deeper or wider than the drafter guesses."""
    deepest, known = drafter.num_heads, drafter.draft_vocab_size
    if depth > deepest:
        raise InvalidInput(f"A tree may be as deep as the drafter guesses, {deepest}, but its depth is {depth}.")
    if max_rank >= known:
        raise InvalidInput(
            f"A rank must be below the tokens that the drafter knows, {known}, but the tree has {max_rank}."
        )
