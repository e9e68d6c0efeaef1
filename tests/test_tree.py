"""Trees: canonical order, masks, round trips, and what is refused."""

import networkx
import numpy as np
import pytest
from hypothesis import given

from treeopt.errors import InvalidInput
from treeopt.trees.published import published_tree
from treeopt.trees.tree import GrownTrees, Tree

from .conftest import trees


@given(trees())
def test_choices_round_trip(tree):
    assert Tree.from_choices(tree.choices) == tree
    assert Tree.from_choices(reversed(tree.choices)) == tree


@given(trees())
def test_the_mask_is_reflexive_ancestry(tree):
    graph = tree.to_networkx()
    assert networkx.is_arborescence(graph)
    for node in graph:
        assert set(np.flatnonzero(tree.mask[node])) == networkx.ancestors(graph, node) | {node}


@given(trees())
def test_derived_values_agree_with_the_paths(tree):
    paths = tree.paths
    assert tree.depths.tolist() == [len(p) for p in paths]
    assert list(paths) == sorted(paths, key=lambda p: (len(p), p))
    assert sum(tree.widths()) == len(tree) - 1


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], [0]], "comes twice"),
        ([[0], [1, 0]], "lacks"),
        ([[-1]], "ranks 0, 1"),
        ([[]], "root is never listed"),
        ([[0.5]], "ranks 0, 1"),
        ([["a"]], "ranks 0, 1"),
        ([0], "ranks 0, 1"),
        ([[True]], "ranks 0, 1"),
        ([[10**30]], "ranks 0, 1"),
    ],
)
def test_bad_choices_are_refused_by_rule(choices, message):
    with pytest.raises(InvalidInput, match=message):
        Tree.from_choices(choices)


def test_arrays_cannot_be_written():
    tree = Tree.chain(2)
    with pytest.raises(ValueError, match="read-only"):
        tree.parents[1] = 0


def test_cut_keeps_parents():
    tree = published_tree().cut(max_depth=3, max_rank=4)
    assert all(max(p) <= 4 and len(p) <= 3 for p in tree.paths[1:])
    assert len(tree) == 1 + 38 - 2  # of the 38 nodes with ranks up to 4, two are four deep


def test_grown_trees_have_no_other_sizes():
    with pytest.raises(InvalidInput, match="1 to 2"):
        GrownTrees.nested(((), (0,)), np.array([1.0, 0.5])).tree(3)
