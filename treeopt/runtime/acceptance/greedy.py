"""The interface of acceptance rules, and the greedy rule.

A rule chooses the target's own token after every node of a tree, and decides which guesses are accepted.

A rule is lossless where the text is what plain decoding under the same rule would write, whatever the tree.

b live rows · T nodes of the tree · V vocabulary
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from treeopt.records.origins import RuleRecord
from treeopt.trees.tree import Tree

Nodes = list[list[int]]  # (b, T) of every row and node


class Acceptance(Protocol):
    """A rule: it chooses the target's own tokens, and decides which guesses are accepted."""

    @property
    def record(self) -> RuleRecord: ...  # "rule", "temperature" and whatever else it depends on

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """(..., V) logits to the (...) tokens that the target chooses there.

        keys      : (...) int64  of each row's sequence, from its prompt alone
        positions : (...) int64  place in its sequence, prompt included, of the token that is chosen
        """

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        """The last accepted node of each of b rows; 0 for none.

        tokens  : of every node, the root's first; -1 for no guess
        choices : the target's token after every node; a rule may change that after the last accepted one
        logits  : (b, T, V)
        """


def sequence_key(prompt: Sequence[int]) -> int:
    """A 63-bit number for a sequence, by the tokens of its prompt alone.

    >>> sequence_key([1, 2]) == sequence_key((1, 2)) != sequence_key([2, 1])
    True
    """
    digest = hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Greedy:
    """The target chooses its likeliest token, of equal ones the smallest id; guesses that equal it are accepted."""

    @property
    def record(self) -> RuleRecord:
        return {"rule": "greedy", "temperature": 0.0}

    def choose(self, logits: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        return logits.argmax(-1)

    def accept(self, tree: Tree, tokens: Nodes, choices: Nodes, logits: Tensor) -> list[int]:
        return follow(tree, tokens, choices)


def follow(tree: Tree, tokens: Nodes, choices: Nodes) -> list[int]:
    """Follow the target's own choices down the tree as far as they were guessed.

    >>> follow(Tree.chain(2), [[7, 8, 9]], [[8, 5, 1]])
    [1]
    """
    parents = tree.parents.tolist()
    return [path[-1] for path in follow_each([parents] * len(tokens), tokens, choices)]


def follow_each(parents: Nodes, tokens: Nodes, choices: Nodes) -> Nodes:
    """The accepted paths, root first, of rows with trees of their own, by the (b, T) parents of their nodes.

    >>> follow_each([[-1, 0, 1]], [[7, 8, 9]], [[8, 9, 1]])
    [[0, 1, 2]]
    """
    paths = []
    for above, guesses, chosen in zip(parents, tokens, choices, strict=True):
        path, at = [0], 0
        for node in range(1, len(above)):  # children come after their parents
            if above[node] == at and guesses[node] == chosen[at]:
                path.append(at := node)
        paths.append(path)
    return paths
