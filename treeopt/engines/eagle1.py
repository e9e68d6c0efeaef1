"""EAGLE-1: Medusa's list for its static tree, which it drafts and verifies by tables of its own.

All candidates lie in one row: the root's token, then ten of every node that expands, in order. A node points at
candidate 1 + rank + 10 x (expanding nodes before its parent) (eagle/model/utils.py). Drafting keeps only the nodes that
expand, a table a depth (eagle/model/utils_c.py).
"""

from collections.abc import Sequence

from treeopt.engines.base import Choices, Method, Request, ServingEngine, Written
from treeopt.engines.lists import TOPK, as_lists, in_order, listed, medusa_buffers
from treeopt.errors import InvalidInput
from treeopt.files.shell import shell_word
from treeopt.trees.tree import MAX_RANK, Choice, Tree

NOTES = (
    "The tree is heeded on branch v1 of SafeAILab/EAGLE only: git checkout v1. On main, EAGLE-2 and EAGLE-3 make their "
    "trees while they decode, and --tree-choices is ignored.",
    "--temperature is 1 unless it is given, and then EAGLE-1 samples.",
)


def write(request: Request) -> Written:
    """``choices.py`` for eagle/model/choices.py. Raises InvalidInput for a tree of depth 1, which EAGLE fails on."""
    tree = request.tree_of("eagle1")
    if tree.depth < 2:
        raise InvalidInput(
            "EAGLE-1 needs a tree of depth 2 or more: its buffers have an IndexError on one of depth 1. "
            "Search again with a larger `budget`."
        )
    choices = listed(tree)
    command = (
        "python -m eagle.evaluation.gen_ea_answer_vicuna --base-model-path MODEL --ea-model-path DRAFTER "
        f"--tree-choices {shell_word(choices)} --temperature 0"
    )
    misdrafted_note = [
        f"EAGLE-1 drafts below {list(path)} from another node's guesses, because a node before its "
        "parent has children but no grandchildren. The text stays right, but fewer guesses are accepted "
        "than planned."
        for path in misdrafted(tree.choices)[:1]
    ]
    files = {"choices.py": f"treeopt_{len(tree) - 1} = {choices}\n"}
    return Written(files=files, command=command, notes=(*NOTES, *misdrafted_note))


def verified(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree that is verified. Raises InvalidInput where a node's candidate is another node's child.

    >>> verified([[0], [10], [0, 0]])
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: EAGLE-1 would verify rank 0 below [0] for [10].
    """
    medusa_buffers(choices)  # the mask is Medusa's, and fails where that does
    ordered = in_order(map(tuple, choices))
    parents = list(dict.fromkeys(path[:-1] for path in ordered))  # each has ten candidates
    for path in ordered:
        block, rank = divmod(parents.index(path[:-1]) * TOPK + path[-1], TOPK)
        if rank != path[-1]:
            owner = list(parents[block]) if block < len(parents) else "no node"
            raise InvalidInput(f"EAGLE-1 would verify rank {rank} below {owner} for {list(path)}.")
    return Tree.from_choices(ordered)


def drafting_levels(choices: Sequence[Sequence[int]]) -> list[int]:
    """Nodes that expand at depths 1, 2, ...; KeyError and IndexError where EAGLE's drafting side raises them.

    A choice that comes twice counts once there, although the verifying side counts it twice.

    >>> drafting_levels([[0], [1], [0, 0]])
    [1]
    >>> drafting_levels([[0], [1]])
    Traceback (most recent call last):
    IndexError: EAGLE-1 has no buffers for a tree of depth 1
    """
    paths = {(), *map(tuple, choices)}
    for path in in_order(paths):
        if path[:-1] not in paths:
            raise KeyError(path[:-1])
    expanding = {path[:-1] for path in paths} - {()}
    if not expanding:
        raise IndexError("EAGLE-1 has no buffers for a tree of depth 1")
    return [sum(len(path) == depth for path in expanding) for depth in range(1, 1 + max(map(len, expanding)))]


def misdrafted(choices: Sequence[Sequence[int]]) -> list[Choice]:
    """Nodes that expand and whose own token is drafted from another node than their parent.

    At each depth the parents of expanding nodes are counted from 0, whichever they are, and the count is taken
    for the parent's place among the expanding nodes above. So those with expanding children must come first.

    >>> misdrafted([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    [(1, 0)]
    """
    expanding = in_order({tuple(p[:-1]) for p in choices if len(p) > 1})
    wrong = []
    for depth in range(2, 1 + max(map(len, expanding), default=0)):
        above = [path for path in expanding if len(path) == depth - 1]
        level = [path for path in expanding if len(path) == depth]
        parents = list(dict.fromkeys(path[:-1] for path in level))
        wrong += [path for path in level if parents.index(path[:-1]) != above.index(path[:-1])]
    return wrong


def read(choices: Choices, _: Tree) -> Tree:
    """The tree that EAGLE-1 verifies; LookupError where the drafting side fails on it."""
    lists = as_lists(choices)
    drafting_levels(lists)
    return verified(lists)


ENGINE = ServingEngine(name="eagle1", title="EAGLE-1", readers={"EAGLE-1": read}, methods=(
    Method(name="choices", checked="08dc06c, before EAGLE-2", drafters=("eagle",), shape="any", max_rank=MAX_RANK,
           max_batch_size=1,
           carrier="eagle/model/choices.py, --tree-choices", syntax="[[0], [1], [0, 0]]", derived=("depth >= 2",),
           versions="branch v1; main ignores the tree",
           source="SafeAILab/EAGLE eagle/model/utils_c.py, eagle/model/utils.py", write=write),
))  # fmt: skip
