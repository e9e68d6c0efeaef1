"""Which drafts a method of a serving engine decodes, and why it refuses others."""

from dataclasses import dataclass
from typing import Literal

from treeopt.trees.draft import MOST_LEVELS, CopiedText, DDTree, Draft, DynamicLimits, DynamicTree
from treeopt.trees.shapes import SHAPES
from treeopt.trees.tree import Tree

SHAPE_WORDS = {  # by shape
    "sibling-closed": "trees whose siblings have ranks without a gap",
    "low-rank-expands": "trees in which the likeliest siblings have the children, without a gap",
    "chain": "chains",
}


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of the drafts that a method decodes. Every method takes a lone root, which is plain decoding.

    shape         shape of fixed trees, one of `SHAPES`
    max_rank, max_depth   of fixed trees; None for no limit
    dynamic       limits of dynamic trees and chains; None for a method without dynamic trees
    fills_levels  the dynamic trees that need a row for each level
    marginals     most ranks at a depth of trees over marginals; 0 for a method without them
    copies        whether the method takes copied text, and nothing else
    """

    shape: Literal["any", "sibling-closed", "low-rank-expands", "chain"] = "chain"
    max_rank: int | None = None
    max_depth: int | None = None
    dynamic: DynamicLimits | None = None
    fills_levels: Literal["all", "chains", "none"] = "chains"
    marginals: int = 0
    copies: bool = False

    @property
    def only_chains(self) -> bool:
        """Whether the method takes chains and nothing else, as those of most engines do."""
        return self.shape == "chain" and self.dynamic is None and not self.copies

    @property
    def anew(self) -> DynamicLimits | None:
        """Limits of dynamic trees or trees over marginals; None for a method without either."""
        return DynamicLimits(levels=0, marginals=True, width=self.marginals) if self.marginals else self.dynamic

    def takes(self, draft: Draft, num_heads: int | None) -> bool:
        """Whether the method takes drafts of this kind.

        num_heads : guesses of the drafter; a tree over marginals must be as deep

        >>> EngineLimits().takes(Tree.chain(3), 4), EngineLimits().takes(Tree.dense([2]), 4)
        (True, False)
        """
        if isinstance(draft, CopiedText) or self.copies:
            return isinstance(draft, CopiedText) and self.copies
        if isinstance(draft, DDTree):
            return draft.ranks <= self.marginals and draft.depth == num_heads
        if isinstance(draft, DynamicTree):
            return self.dynamic is not None
        is_chain = isinstance(draft, Tree) and SHAPES["chain"](draft)
        if self.dynamic is not None:
            return is_chain and draft.depth <= MOST_LEVELS
        return is_chain or self.shape != "chain"

    def fault(self, draft: Draft) -> str | None:
        """Why an engine would refuse a draft, or decode another one; None for a draft that it takes.

        >>> EngineLimits(max_depth=2).fault(Tree.chain(3))
        'takes drafts up to depth 2, but this one has 3'
        """
        if len(draft) == 1:
            return None
        if isinstance(draft, Tree) and not self.copies:
            if not SHAPES[self.shape](draft):
                return f"takes {SHAPE_WORDS[self.shape]} only, but this tree of {len(draft)} rows, {draft.depth} deep, is none"
        elif not self.takes(draft, draft.depth):
            return f"does not take drafts such as {draft.name}"
        if self.dynamic is not None:
            return self._unbuilt(draft, self.dynamic)
        if self.max_depth is not None and draft.depth > self.max_depth:
            return f"takes drafts up to depth {self.max_depth}, but this one has {draft.depth}"
        if isinstance(draft, Tree) and self.max_rank is not None and draft.max_rank > self.max_rank:
            return (
                f"takes ranks up to {self.max_rank}, but the tree has {draft.max_rank}, which it would read as another "
                "candidate"
            )
        return None

    def _unbuilt(self, draft: Draft, limits: DynamicLimits) -> str | None:
        """Why a draft is beyond the limits of dynamic trees. A chain is a dynamic tree of topk 1."""
        topk = draft.topk or 1
        most = limits.most_rows(draft.depth, topk)
        if draft.depth > limits.levels or draft.rows > most:
            return (
                f"takes up to {limits.levels} levels, and {most} rows of {draft.depth} levels with topk {topk}, "
                f"but this draft is {draft.name}"
            )
        is_filled = self.fills_levels == "all" or (self.fills_levels == "chains" and topk == 1)
        if is_filled and draft.rows <= draft.depth:
            return f"needs a row for each of {draft.depth} levels and one more, but this dynamic tree has {draft.rows}"
        return None
