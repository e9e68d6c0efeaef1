"""Speculation trees, and the terms for them.

target   the base model that verifies
drafter  whatever proposes; its head k (1...K) guesses the token at offset k + 1
node     a row of the verification pass
root     node 0, depth 0: the token that the target itself chose, never a guess
depth    a node's distance from the root; head d proposes the candidates of depth d
rank     0-based place of a token among its head's candidates, ordered by (logit descending, id ascending)
choice   a node's path of ranks from the root, e.g. (0, 2); ``medusa_choices`` lists all but the root's
size     ``len(tree)``: rows verified per sequence and step, *root included*; 64 rows are 63 choices
gain     tokens per step that a node adds; the root's own gain is 1
step     one pass of the target over root and tree: commits the root and the accepted guesses

n nodes of a tree · N nodes of a family
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput, quoted

if TYPE_CHECKING:
    import networkx

MOST_RANK = 2**15 - 1  # ranks are kept in 16 bits
MOST_NODES, MOST_DEPTH = 2**12, 2**8  # of a tree, the root left out; chains of engines are far shorter
MAX_RANK = 9  # Medusa, Hydra, EAGLE and Neuron look at ten candidates per head

Choice = tuple[int, ...]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FIXED = "fixed"  # family of the trees whose nodes are the same at every step


class Cost(NamedTuple):
    """What the latency of a step depends on. Drafts of one family, with equal rows and depths, cost the same."""

    family: str
    rows: int
    depth: int


def size_words(rows: int, depth: int) -> str:
    """A fixed tree of that size, in a few words.

    >>> size_words(3, 2), size_words(5, 2), size_words(1, 0)
    ('chain of 2', '5 rows, 2 deep', 'do not speculate')
    """
    if rows == 1:
        return "do not speculate"
    return f"chain of {depth}" if rows == depth + 1 else f"{rows} rows, {depth} deep"


@dataclass(frozen=True)
class Tree:
    """A speculation tree: every node's path of ranks in canonical order, by depth and then by path; the root's is ().

    Build one with `from_choices`, `chain` or `dense`, which check what they are given.

    >>> tree = Tree.from_choices([[0], [1], [0, 0]])
    >>> len(tree), tree.depth, tree.parents.tolist()
    (4, 2, [-1, 0, 0, 1])
    """

    paths: tuple[Choice, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> Tree:
        """The tree of a list of paths, in any order; an empty list is the lone root.

        >>> Tree.from_choices([[0, 0]])
        Traceback (most recent call last):
        treeopt.errors.InvalidInput: Every choice needs its parent in the list, but (0, 0) lacks (0,).
        """
        paths = [_as_choice(choice) for choice in islice(choices, MOST_NODES + 1)]
        check_size(len(paths))
        nodes = {(), *paths}
        if len(nodes) <= len(paths):
            path = next(path for path, times in Counter(paths).items() if times > 1)
            raise InvalidInput(f"Every choice may be listed once, but {quoted(path)} comes twice.")
        for path in paths:
            if path[:-1] not in nodes:
                raise InvalidInput(
                    f"Every choice needs its parent in the list, but {quoted(path)} lacks {quoted(path[:-1])}."
                )
        return cls(((), *sorted(paths, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, depth: int) -> Tree:
        """The top-1 guess of each of the first ``depth`` heads: size depth + 1.

        >>> Tree.chain(2).choices
        [[0], [0, 0]]
        """
        check_size(depth, depth)
        return cls.dense([1] * depth)

    @classmethod
    def dense(cls, widths: Sequence[int]) -> Tree:
        """Every combination of the best ``widths[d]`` candidates per depth (Medusa, section 2.1.2).

        >>> len(Tree.dense([2, 3]))
        9
        """
        level: list[Choice] = [()]
        choices: list[Choice] = []
        check_size(len(widths), len(widths))
        for width in widths:
            check_size(len(choices) + len(level) * width)
            level = [(*path, rank) for path in level for rank in range(width)]
            choices += level
        return cls.from_choices(choices)

    def __len__(self) -> int:
        """Rows verified per sequence and step, root included."""
        return len(self.paths)

    rows = property(__len__)
    topk = None  # the nodes are the same at every step
    drafter, options = "", property(lambda self: {})  # of no engine's own

    @property
    def cost(self) -> Cost:
        return Cost(FIXED, len(self), self.depth)

    @property
    def kind(self) -> str:
        """ "plain" for a lone root, "chain" for a chain of the likeliest guesses, else "tree"."""
        is_chain = len(self) == self.depth + 1 and self.max_rank <= 0
        return "plain" if len(self) == 1 else "chain" if is_chain else "tree"

    @property
    def name(self) -> str:
        """Kind and size, as tables have it.

        >>> Tree.chain(3).name, Tree.dense([2]).name, Tree.chain(0).name
        ('chain of 3', 'tree of 3 rows', 'no guesses')
        """
        if len(self) == 1:
            return "no guesses"
        return f"chain of {self.depth}" if self.kind == "chain" else f"tree of {len(self)} rows"

    @property
    def words(self) -> str:
        return size_words(len(self), self.depth)

    @property
    def record(self) -> dict[str, object]:
        """The object that files have for it."""
        return {"rows": len(self), "depth": self.depth, "medusa_choices": self.choices}

    @property
    def choices(self) -> list[list[int]]:
        """``medusa_choices``: all paths but the root's, by (depth, path)."""
        return [list(path) for path in self.paths[1:]]

    medusa_choices = choices

    @cached_property
    def parents(self) -> IntArray:
        """(n,) index of each node's parent; -1 for the root."""
        index = {path: i for i, path in enumerate(self.paths)}
        return read_only([-1, *(index[path[:-1]] for path in self.paths[1:])], np.int64)

    @cached_property
    def ranks(self) -> IntArray:
        """(n,) rank of each node among its head's candidates; -1 for the root."""
        return read_only([-1, *(path[-1] for path in self.paths[1:])], np.int64)

    @cached_property
    def depths(self) -> IntArray:
        """(n,) each node's distance from the root; the row's position is length + depth."""
        return read_only([len(path) for path in self.paths], np.int64)

    @property
    def depth(self) -> int:
        """Depth of the deepest node: how many heads the tree needs."""
        return len(self.paths[-1])

    @cached_property
    def max_rank(self) -> int:
        """Largest rank of a node, -1 for a lone root. The tree needs one candidate more of a head.

        >>> Tree.from_choices([[0], [4]]).max_rank
        4
        """
        return int(self.ranks.max())

    @cached_property
    def mask(self) -> BoolArray:
        """(n, n) whether node i may attend to node j: j is i or an ancestor of i."""
        mask = np.eye(len(self), dtype=bool)
        for i in range(1, len(self)):
            mask[i] |= mask[self.parents[i]]
        return read_only(mask, np.bool_)

    def widths(self) -> list[int]:
        """Number of nodes at depths 1, 2, ...

        >>> Tree.from_choices([[0], [1], [0, 0]]).widths()
        [2, 1]
        """
        return [int(width) for width in np.bincount(self.depths)[1:]]

    def to_networkx(self) -> networkx.DiGraph[int]:
        """A directed graph from root to leaves, with ``path``, ``rank`` and ``depth`` of each node."""
        import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph()
        for i, (path, rank) in enumerate(zip(self.paths, self.ranks.tolist(), strict=True)):
            graph.add_node(i, path=path, rank=rank, depth=len(path))
        graph.add_edges_from((parent, i) for i, parent in enumerate(self.parents.tolist()) if i)
        return graph

    def cut(self, *, max_depth: int, max_rank: int | None = None) -> Tree:
        """The nodes no deeper than ``max_depth``, all of whose ranks are at most ``max_rank``.

        >>> Tree.from_choices([[0], [3], [0, 0]]).cut(max_depth=1, max_rank=2).choices
        [[0]]
        """
        top = self.max_rank if max_rank is None else max_rank
        return Tree.from_choices(p for p in self.paths[1:] if len(p) <= max_depth and max(p) <= top)


class TreeFamily(NamedTuple):
    """Nodes in the order in which they were added: the first n are the tree of size n.

    paths : N paths, each after its parent; paths[0] = ()
    gains : (N,) tokens per step that each node adds, by the objective's own count; gains[0] = 1
    """

    paths: tuple[Choice, ...]
    gains: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GrownTrees:
    """The best trees of sizes 1...N, each of one of a few nested families.

    families : N, the family of the tree of each size

    >>> small, large = (TreeFamily(((), (0,), path), np.array([1.0, 0.5, 0.2])) for path in ((1,), (0, 0)))
    >>> grown = GrownTrees((small, small, large))
    >>> grown.tree(3).choices, grown.depths().tolist(), round(grown.tokens_per_step(3), 3)
    ([[0], [0, 0]], [0, 1, 2], 1.7)
    """

    families: tuple[TreeFamily, ...]

    @classmethod
    def nested(cls, paths: tuple[Choice, ...], gains: NDArray[np.float64]) -> GrownTrees:
        """The trees of one family."""
        return cls((TreeFamily(paths, gains),) * len(paths))

    def __len__(self) -> int:
        """Size of the largest tree."""
        return len(self.families)

    @property
    def sizes(self) -> IntArray:
        """(N,) sizes of the trees."""
        return np.arange(1, len(self) + 1)

    @property
    def paths(self) -> tuple[Choice, ...]:
        """The nodes of the largest tree, in the order in which they were added."""
        return self.families[-1].paths

    def family(self, size: int) -> TreeFamily:
        """The family of the tree of ``size`` nodes. Raises InvalidInput for a size that there is not."""
        if not 1 <= size <= len(self):
            raise InvalidInput(f"There are trees of 1 to {len(self)} nodes, but {size} was asked.")
        return self.families[size - 1]

    def tree(self, size: int) -> Tree:
        """The tree of ``size`` nodes. Raises InvalidInput for a size that there is not."""
        return Tree.from_choices(self.family(size).paths[1:size])

    def largest(self, size: int) -> Tree:
        """The largest tree of at most ``size`` nodes."""
        return self.tree(min(size, len(self)))

    def tokens_per_step(self, size: int) -> float:
        """The objective's own (in-sample) expectation for the tree of ``size`` nodes."""
        return float(self.family(size).gains[:size].sum())

    def depths(self) -> IntArray:
        """(N,) the depth of each tree."""
        depths = {id(f): np.maximum.accumulate([len(path) for path in f.paths]) for f in self.families}
        return np.array([depths[id(family)][i] for i, family in enumerate(self.families)])


def read_only(array: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A read-only copy of an array, of the given type. An array that is so already is returned itself."""
    is_so = isinstance(array, np.ndarray) and array.dtype == dtype and not array.flags.writeable
    result: NDArray[Any] = array if is_so else np.array(array, dtype=dtype)
    result.setflags(write=False)
    return result


def check_size(num_choices: int, depth: int = 0) -> None:
    """Raise InvalidInput for a tree that has too many nodes or is too deep."""
    if num_choices > MOST_NODES or depth > MOST_DEPTH:
        raise InvalidInput(f"A tree may have {MOST_NODES:,} nodes and be {MOST_DEPTH} deep, but this one is larger.")


def _as_choice(choice: Sequence[int]) -> Choice:
    try:
        check_size(0, len(choice))
        path = tuple(operator.index(rank) for rank in choice)
    except TypeError:
        path = ()
    if not path or min(path) < 0 or max(path) > MOST_RANK or bool in map(type, choice):
        raise InvalidInput(
            f"Every choice must be a non-empty list of ranks 0, 1, ... (the root is never listed), but got {quoted(choice)}."
        )
    return path
