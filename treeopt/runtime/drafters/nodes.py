"""The nodes of a step: a draft of any kind, drafted behind the roots of a batch, and which of its guesses are accepted.

`drafting_of` says for each kind of draft how that is done. A new kind registers its own function, in its drafter's file.

b live rows · T nodes of the draft · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from treeopt.errors import InvalidInput
from treeopt.records.rules import SAME_TEXT
from treeopt.runtime.acceptance.greedy import Acceptance, Nodes, follow_each
from treeopt.runtime.drafters.levels import LevelDraft, chosen_tree
from treeopt.runtime.drafters.protocol import Drafter, DrafterState, Mark, TreeTensors
from treeopt.trees.draft import Draft, DynamicTree
from treeopt.trees.tree import Tree


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


Drafting = Callable[[Tensor, Mark], Drafted]  # of the (b,) roots


@singledispatch
def drafting_of(
    draft: Draft, drafter: Drafter, state: DrafterState, acceptance: Acceptance, device: torch.device
) -> Drafting:
    """The function that drafts such a tree at every step; InvalidInput where drafter or rule cannot."""
    raise InvalidInput(f"A drafter needs a tree, but got {draft.name}.")


@drafting_of.register
def _(tree: Tree, drafter: Drafter, state: DrafterState, acceptance: Acceptance, device: torch.device) -> Drafting:
    check_fits(drafter, tree.depth, tree.max_rank)
    plan = TreeTensors.of(tree, device)

    def drafted(roots: Tensor, mark: Mark) -> Drafted:
        tokens = state.propose(plan, roots, mark)

        def accepted(choices: Tensor, logits: Tensor) -> tuple[Nodes, Nodes, Nodes]:
            known, chosen = torch.stack([tokens, choices]).tolist()
            return known, chosen, [plan.paths[node] for node in acceptance.accept(tree, known, chosen, logits)]

        return Drafted(tokens, plan.depths, plan.ancestors, accepted)

    return drafted


@drafting_of.register
def _(tree: DynamicTree, drafter: Drafter, state: object, acceptance: Acceptance, device: torch.device) -> Drafting:
    if not isinstance(state, LevelDraft):
        raise InvalidInput(f"A dynamic tree needs a drafter with probabilities, but {drafter.kind} has none.")
    if acceptance.record["rule"] not in SAME_TEXT:
        raise InvalidInput(
            f"A dynamic tree needs greedy decoding or sampling, but the rule is {acceptance.record['rule']}."
        )
    check_fits(drafter, tree.levels, tree.topk - 1)

    def drafted(roots: Tensor, mark: Mark) -> Drafted:
        (pool,) = state.grow(tree.levels, (tree.topk,), roots, mark)
        tokens, parents, depths, ancestors = chosen_tree(pool, roots, tree.rows)
        mark("choose")

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
