"""Our trees against the algorithms of others on small random tables (benchmarks/baselines.py)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.growth.grow import grow_products
from treeopt.trees.shapes import Limits

from .test_growth import every_tree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from baselines import expected, explore_graph, literal_table, sequoia, sequoia_loops

SEEDS = st.integers(0, 2**32)


def table(seed: int, depth: int = 3, ranks: int = 4, *, falling: bool = False):
    """Acceptances that sum to less than one at every depth, in any order or falling."""
    accept = np.random.default_rng(seed).dirichlet(np.ones(ranks + 1), depth)[:, :ranks]
    return -np.sort(-accept, axis=1) if falling else accept


def ours(accept, size: int):
    family = grow_products(accept, Limits(size))
    return family.tokens_per_step(len(family))


@given(SEEDS, st.integers(2, 40))
def test_medusas_growth_is_ours_on_falling_tables_node_by_node(seed, size):
    accept = table(seed, falling=True)
    assert list(grow_products(accept, Limits(size)).paths[1:]) == explore_graph(accept, size)


@given(SEEDS, st.integers(1, 25))
def test_the_dynamic_programme_is_ours_on_falling_tables(seed, size):
    accept = table(seed, falling=True)
    assert sequoia(accept, size)[0] == pytest.approx(ours(accept, size))


@given(SEEDS, st.integers(2, 25))
def test_the_dynamic_programmes_tree_is_worth_what_it_says(seed, size):
    accept = table(seed)
    value, choices = sequoia(accept, size)
    assert len(set(choices)) == len(choices) == size - 1
    assert expected(accept, choices) == pytest.approx(value)


@pytest.mark.parametrize("seed", range(8))
def test_loops_and_arrays_are_one_programme(seed):
    vector = table(seed, 1, 3)[0]
    for size, levels in ((2, 2), (7, 3), (9, 4)):
        accept = np.tile(vector, (levels - 1, 1))
        looped = sequoia_loops(torch.tensor([0.0, *vector], dtype=torch.float64), size, levels)
        assert looped == pytest.approx(sequoia(accept, size)[0], rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_all_of_them_are_brute_force_on_tiny_tables(seed):
    accept = table(seed, 2, 3, falling=True)
    for size in range(2, 6):
        best = max(expected(accept, tree.paths[1:]) for tree in every_tree() if len(tree) == size and tree.depth <= 2)
        assert ours(accept, size) == pytest.approx(best)
        assert expected(accept, explore_graph(accept, size)) == pytest.approx(best)
        assert sequoia(accept, size)[0] == pytest.approx(best)


def test_the_literal_divisor_is_right_for_805_prompts_of_20_steps_at_head_1_only():
    hits = np.array([[8050], [7647.5]])  # half of 805 x 20 rows, and of 805 x 19
    assert literal_table(hits).tolist() == [[0.5], [0.475]]
