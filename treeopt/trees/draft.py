"""Drafts: what a decoding step can verify, whatever kind of tree that is.

A dynamic tree is built anew at every step from the drafter's own probabilities (EAGLE-2, section 4). At every level the
drafter expands the ``topk`` likeliest nodes of the last one, each by its ``topk`` likeliest children. All children enter the
pool, with the probability of their path as score; the best of the pool are verified.

A tree over marginals is built anew too, of guesses that do not depend on others, as those of Medusa's heads and block drafters:
the likeliest paths, as if depths were independent (DDTree, algorithm 1).

A new kind has the properties of `Draft`, a line in `RECORDS`, its replay in `treeopt.growth.replay` and its nodes in a
drafter's file. In files a draft has ``rows`` and ``depth``, and

    medusa_choices     a fixed tree, from which both follow
    levels, topk       a dynamic tree
    width              a tree over marginals
    copies, settings   what a drafter that copies text finds, at most
    nothing else       a tree of which only the size is known
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from typing_extensions import Self

from treeopt.errors import InvalidInput, quoted
from treeopt.trees.tree import FIXED, Cost, Tree, size_words

MOST_LEVELS, MOST_TOPK, MOST_ROWS = 8, 10, 64  # of dynamic trees
OVER_MARGINALS, COPIED = "marginals", "copied"  # families of cost; those of dynamic trees are `topk_family`
ANEW = ("dynamic", "ddtree")  # kinds of drafts that are built anew at every step
MOST_BLOCK, MOST_WIDTH = 16, MOST_ROWS - 1  # depth and width of trees over marginals; nothing wider can be told apart


@runtime_checkable
class Draft(Protocol):
    """The root and the guesses that a step verifies.

    rows       : verified per sequence and step, root included; also its ``len()``
    depth      : guesses that a step accepts at most
    topk       : nodes expanded on each level and children of each, of a dynamic tree; else None
    cost       : what the latency of its step depends on
    drafter    : an engine's own, that finds it as the options say; empty where the guesses are those of the run's drafter
    options    : of an engine, by its own names, that make it draft so; empty where the draft itself says all
    name       : what tables and journals call it
    words      : what sentences call it; "do not speculate" for a lone root
    kind       : "plain" (a lone root), "chain", "tree", "dynamic", "ddtree" or "copied"; for display
    record     : the object that files have for it; `draft_of` reads it
    """

    @property
    def rows(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def topk(self) -> int | None: ...
    @property
    def cost(self) -> Cost: ...
    @property
    def drafter(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def words(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def record(self) -> dict[str, object]: ...
    def __len__(self) -> int: ...


class Numbers:
    """The base of drafts that a few numbers describe."""

    rows: int
    depth: int

    def __len__(self) -> int:
        return self.rows

    options = property(lambda self: {})
    words = property(lambda self: self.name)

    @property
    def record(self) -> dict[str, object]:
        return {"rows": self.rows, "depth": self.depth, **vars(self)}


@dataclass(frozen=True, order=True)
class DynamicTree(Numbers):
    """The three numbers of a dynamic tree.

    levels : how deep it is drafted · topk : nodes expanded on each level, and children of each
    rows   : rows verified per sequence and step, root included

    >>> DynamicTree(5, 4, 16).name
    '5/4/16'
    """

    levels: int
    topk: int
    rows: int

    def __post_init__(self) -> None:
        rows = min(pool_size(self.levels, self.topk) + 1, MOST_ROWS)
        _check(self, "a dynamic tree", {"levels": (1, MOST_LEVELS), "topk": (1, MOST_TOPK), "rows": (2, rows)})

    kind, drafter = "dynamic", ""
    depth = property(lambda self: self.levels)
    cost = property(lambda self: Cost(topk_family(self.topk), self.rows, self.levels))
    words = property(lambda self: f"dynamic tree {self.name}")

    @property
    def name(self) -> str:
        """Levels, topk and rows, as engines' users write them."""
        return f"{self.levels}/{self.topk}/{self.rows}"


def topk_family(topk: int) -> str:
    """Family of the dynamic trees with that topk; with 1 they are chains, which cost what fixed trees do."""
    return f"topk {topk}" if topk > 1 else FIXED


def _check(tree: Draft, what: str, limits: dict[str, tuple[int, int]]) -> None:
    """Raise InvalidInput for a number that is not within its limits."""
    for name, (least, most) in limits.items():
        if not least <= (value := getattr(tree, name)) <= most:
            raise InvalidInput(f"{name} of {what} must be {least} to {most}, but got {value} in {tree.name}.")


@dataclass(frozen=True, order=True)
class DDTree(Numbers):
    """A tree over marginals: the likeliest paths, as if the guesses at different depths were independent (DDTree).

    depth : of the deepest guess · width : ranks of each depth that are tried · rows : verified, root included

    >>> DDTree(5, 8, 32).name
    'ddtree 5/8/32'
    """

    depth: int
    width: int
    rows: int

    def __post_init__(self) -> None:
        rows = min(product_size(min(self.depth, MOST_BLOCK), self.width) + 1, MOST_ROWS)
        _check(self, "a tree over marginals", {"depth": (1, MOST_BLOCK), "width": (1, MOST_WIDTH), "rows": (2, rows)})

    kind, topk, drafter = "ddtree", None, ""
    cost = property(lambda self: Cost(OVER_MARGINALS, self.rows, self.depth))

    name = property(lambda self: f"ddtree {self.depth}/{self.width}/{self.rows}")
    ranks = property(lambda self: min(self.width, self.rows - 1))  # of a depth that can be among its nodes


@dataclass(frozen=True)
class CopiedText(Numbers):
    """What a drafter that copies text finds, at most so many rows and so deep; at most steps it finds less, or nothing.

    drafter  : an engine's own, as "vllm:suffix" · settings : of its options, those that are not the engine's defaults

    >>> CopiedText.of("vllm:suffix", {"num_speculative_tokens": 12}, 13, 12).name
    'vllm:suffix num_speculative_tokens=12'
    """

    drafter: str
    settings: tuple[tuple[str, Any], ...]
    rows: int
    depth: int

    kind, topk = "copied", None
    cost = property(lambda self: Cost(COPIED, self.rows, self.depth))

    @classmethod
    def of(cls, drafter: str, settings: Mapping[str, Any], rows: int, depth: int) -> Self:
        """A draft by the engine's name for its drafter and its options, whose lists become tuples."""
        values = {option: tuple(value) if isinstance(value, list) else value for option, value in settings.items()}
        return cls(drafter, tuple(sorted(values.items())), rows, depth)

    def __post_init__(self) -> None:
        TreeSize(self.rows, self.depth)

    options = property(lambda self: dict(self.settings))
    name = property(lambda self: " ".join([self.drafter, *(f"{option}={value}" for option, value in self.settings)]))

    record = property(
        lambda self: {"rows": self.rows, "depth": self.depth, "copies": self.drafter, "settings": self.options}
    )


@dataclass(frozen=True)
class DynamicLimits:
    """Limits of dynamic trees: at most so many levels and rows.

    within_levels : whether it may have ``topk`` nodes for each level, fewer than its pool has (TensorRT-LLM)
    marginals     : whether trees over marginals are, as deep as the drafter guesses, of at most as many rows
    width         : most ranks of a depth of trees over marginals

    >>> DynamicLimits().most_rows(3, 4), DynamicLimits(within_levels=True).most_rows(3, 4)
    (37, 13)
    """

    levels: int = MOST_LEVELS
    rows: int = MOST_ROWS
    within_levels: bool = False
    marginals: bool = False
    width: int = MOST_WIDTH

    def most_rows(self, levels: int, topk: int) -> int:
        """Most rows of a tree with these levels and topk."""
        return min(self.rows, 1 + (topk * levels if self.within_levels else pool_size(levels, topk)))


def pool_size(levels: int, topk: int, /) -> int:
    """Nodes of the pool: ``topk`` on the first level, their ``topk`` children each on every further one.

    >>> [pool_size(levels, 2) for levels in (1, 2, 3)]
    [2, 6, 10]
    """
    return topk + (levels - 1) * topk**2


def product_size(depth: int, width: int, /) -> int:
    """Nodes of all paths of so many ranks, down to a depth.

    >>> product_size(3, 2), product_size(4, 1)
    (14, 4)
    """
    return sum(width**d for d in range(1, depth + 1))


@dataclass(frozen=True, order=True)
class TreeSize(Numbers):
    """A fixed tree of which only rows and depth are known, such as a point of a curve.

    >>> TreeSize(16, 3).name, TreeSize(16, 3).record
    ('16 rows, 3 deep', {'rows': 16, 'depth': 3})
    """

    rows: int
    depth: int

    def __post_init__(self) -> None:
        if not min(self.rows - 1, 1) <= self.depth < self.rows:
            raise InvalidInput(
                f"A tree needs 1 <= depth < rows (depth 0 for 1 row), but got {self.depth} and {self.rows}."
            )

    topk, drafter = None, ""
    cost = property(lambda self: Cost(FIXED, self.rows, self.depth))
    words = property(lambda self: size_words(self.rows, self.depth))

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.depth} deep"

    @property
    def kind(self) -> str:
        return "tree" if self.rows > 1 else "plain"


def draft_tree(draft: Draft) -> Tree:
    """The draft itself, if it is a fixed tree; InvalidInput for another."""
    if not isinstance(draft, Tree):
        raise InvalidInput(f"A fixed tree is wanted, but this draft is {draft.name}.")
    return draft


# The keys of a record, and what makes a draft of their values; the first whose keys a record all has is taken.
RECORDS: dict[tuple[str, ...], Callable[..., Draft]] = {
    ("medusa_choices",): Tree.from_choices,
    ("levels", "topk", "rows"): DynamicTree,
    ("depth", "width", "rows"): DDTree,
    ("copies", "settings", "rows", "depth"): CopiedText.of,
    ("rows", "depth"): TreeSize,
}
TYPES: dict[str, tuple[type, str]] = {  # of a record's values, but for whole numbers
    "medusa_choices": (list, "a list"),
    "copies": (str, "a name"),
    "settings": (dict, "an object of options"),
}


def draft_of(record: object) -> Draft:
    """The draft that a file's record describes, or that is given; InvalidInput for a record of none.

    >>> draft_of({"levels": 3, "topk": 4, "rows": 16})
    DynamicTree(levels=3, topk=4, rows=16)
    """
    if isinstance(record, Draft):
        return record
    known = next((keys for keys in RECORDS if isinstance(record, Mapping) and record.keys() >= set(keys)), None)
    if known is None or not isinstance(record, Mapping):
        raise InvalidInput(f"A draft must have medusa_choices, or levels, topk and rows, but is {quoted(record)}.")
    for key in known:
        wanted, words = TYPES.get(key, (int, "a whole number"))
        if type(record[key]) is not wanted:
            raise InvalidInput(f"{key} of a draft must be {words}, but is {quoted(record[key])}.")
    return RECORDS[known](*(record[key] for key in known))
