"""What trees reach by a probe: against its definition, a slow decoder, and the best of all trees."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import OutOfRange
from treeopt.growth.probed import grow_coverage, guess_counts, tokens_of_trees
from treeopt.growth.rates import Rates, drawn, rates_by_group
from treeopt.growth.source import source_of
from treeopt.planning.planner import plan_trees
from treeopt.planning.request import PlanRequest
from treeopt.records.probe import Probe
from treeopt.records.trace import FOLDS, fold_numbers
from treeopt.trees.shapes import GROWN, SHAPES, Limits
from treeopt.trees.tree import Tree

from .conftest import trees
from .test_planner import staircase


def replay_probe(probe: Probe, tree: Tree) -> Rates:
    """Steps and tokens of every sequence with one tree."""
    tokens = tokens_of_trees(probe, tree.paths, np.array([len(tree)]))[0]
    return Rates(steps=np.diff(probe.starts), tokens=tokens)


def coverage(probe: Probe, tree: Tree) -> float:
    """1 + mean depth of the deepest accepted node, nodes after the end of an answer left out: what growth maximises."""
    nodes = [i for i, path in enumerate(probe.tree.paths) if path in tree.paths]
    depths = np.where((probe.accepted & (probe.first_end == 0))[:, nodes], probe.tree.depths[nodes], 0).max(1)
    return 1 + float(depths.mean()) if len(depths) else 1.0


def random_probe(rng, tree, steps, *, ends=0.05, policy=None) -> Probe:
    """Steps of answers of 0 to 9 steps (the first of none), easy and hard ones; siblings may pass together."""
    easy = rng.random(steps)
    accepted = np.ones((steps, len(tree)), dtype=bool)
    for node in range(1, len(tree)):
        chance = easy**0.5 * 0.9 / (1 + 0.7 * tree.ranks[node])
        accepted[:, node] = accepted[:, tree.parents[node]] & (rng.random(steps) < chance)
    stops = accepted & (rng.random(accepted.shape) < ends)
    stops[:, 0] = False
    # Few different values, so that paths are often equally likely.
    likelihood = -rng.integers(0, 3, accepted[:, 1:].sum()).astype(np.float32)
    starts = np.minimum(np.concatenate([[0, 0], np.cumsum(rng.integers(0, 10, steps))]), steps)
    starts = starts[: int(np.argmax(starts == steps)) + 1]
    n = len(starts) - 1
    about = {"group": np.arange(n) % 2, "prompt_tokens": np.full(n, 7), "meta": {"group_names": ["a", "b"]}}
    probe = Probe(tree, policy or tree, accepted, stops, likelihood, starts, np.zeros(n), **about)
    lengths = 1 + replay_probe(probe, probe.policy).tokens
    return replace(probe, lengths=lengths)


def one_answer(tree, accepted) -> Probe:
    """A probe of one answer that never ends."""
    likelihood = -np.ones(accepted[:, 1:].sum())
    return Probe(tree, tree, accepted, np.zeros_like(accepted), likelihood, np.array([0, len(accepted)]), np.array([1]))


@st.composite
def probes(draw, **limits) -> Probe:
    tree = draw(trees(**limits).filter(lambda tree: len(tree) > 1))
    return random_probe(np.random.default_rng(draw(st.integers(0, 2**32))), tree, 40)


def emitted(probe: Probe, step: int, tree: Tree) -> list[int]:
    """Depths of the guesses that a step emits, as decoding goes: the longest path wins, then it is cut."""
    index = {path: i for i, path in enumerate(probe.tree.paths)}
    likelihood = np.zeros(probe.accepted.shape)
    likelihood[:, 1:][probe.accepted[:, 1:]] = probe.log_likelihood
    best: tuple = (0, 0.0, 0)
    for path in tree.paths[1:]:
        node = index.get(path)
        if node is not None and probe.accepted[step, node]:
            best = max(best, (len(path), float(likelihood[step, node]), -node))
    winner, found = tree_path(probe.tree, -best[2]), []
    for node in winner:
        found.append(node)
        if probe.ends[step, node]:
            return found
    return [*found, 0]  # and the token that the target says after them


def tree_path(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


@given(probes(), trees())
def test_what_a_tree_emits_is_what_decoding_would(probe, tree):
    """Trees with nodes that were not probed among them: those are never accepted."""
    steps = [emitted(probe, p, tree) for p in range(len(probe.accepted))]
    replayed = replay_probe(probe, tree)
    want = [sum(map(len, steps[a:b])) for a, b in itertools.pairwise(probe.starts)]
    assert replayed.tokens.tolist() == want
    assert replayed.steps.tolist() == np.diff(probe.starts).tolist()
    guesses = [len([node for node in step if node]) for step in steps]
    assert guess_counts(probe, tree.paths).tolist() == np.bincount(guesses, minlength=tree.depth + 1).tolist()


@given(probes())
def test_all_trees_at_once_are_each_by_itself(probe):
    paths = probe.tree.paths
    found = tokens_of_trees(probe, paths, np.arange(1, len(paths) + 1))
    for size, tokens in enumerate(found, 1):
        assert tokens.tolist() == replay_probe(probe, Tree.from_choices(paths[1:size])).tokens.tolist()


@given(probes())
def test_coverage_is_its_definition(probe):
    """1 + sum over depths of P(some node there is accepted with all its ancestors), before any end."""
    tree, total = probe.tree, 0.0
    for depth in range(1, tree.depth + 1):
        for p in range(len(probe.accepted)):
            paths = (tree_path(tree, int(node)) for node in np.flatnonzero(tree.depths == depth))
            total += any(all(probe.accepted[p, v] and not probe.ends[p, v] for v in path) for path in paths)
    assert coverage(probe, tree) == pytest.approx(1 + total / len(probe.accepted))
    assert replay_probe(probe, tree).tokens_per_step <= coverage(probe, tree) + 1e-9


@given(probes(), st.sampled_from(GROWN), st.integers(1, 4), st.integers(0, 3))
def test_grown_trees_have_the_shape_and_the_gains_that_they_claim(probe, shape, max_depth, max_rank):
    family = grow_coverage(probe, Limits(15, max_depth=max_depth, max_rank=max_rank, shape=shape))
    for size in family.sizes.tolist():
        tree = family.tree(size)
        assert tree.depth <= max_depth
        assert max(tree.ranks) <= max_rank
        assert family.tokens_per_step(size) == pytest.approx(coverage(probe, tree))
    assert all(SHAPES[shape](family.tree(size)) for size in family.sizes.tolist())


def plain_greedy(probe: Probe, budget: int) -> list[float]:
    """Coverage of every size where only the next node counts."""
    paths, found = [()], [1.0]
    while len(paths) < budget:
        free = [p for p in probe.tree.paths if p not in paths and has_its_own(p, paths)]
        value, path = max((coverage(probe, Tree.from_choices([*paths[1:], p])), p) for p in free)
        paths.append(path)
        found.append(value)
    return found


def has_its_own(path, paths) -> bool:
    """Whether a node's parent and its sibling of the next lower rank are among others."""
    return path[:-1] in paths and (path[-1:] in ((), (0,)) or (*path[:-1], path[-1] - 1) in paths)


def best_of_all(probe: Probe, size: int) -> float:
    nodes = probe.tree.paths[1:]
    best = 0.0
    for chosen in itertools.combinations(nodes, size - 1):
        if all(has_its_own(path, [(), *chosen]) for path in chosen):
            best = max(best, coverage(probe, Tree.from_choices(chosen)))
    return best


def test_growth_is_close_to_the_best_tree():
    losses = []
    for seed in range(12):
        probe = random_probe(np.random.default_rng(seed), Tree.dense([3, 2, 1] if seed % 2 else [2, 2, 2]), 60)
        family = grow_coverage(probe, Limits(9))
        losses += [1 - family.tokens_per_step(size) / best_of_all(probe, size) for size in (3, 5, 7)]
    assert min(losses) > -1e-9  # nothing is better than the best
    assert max(losses) < 0.04
    assert np.mean(losses) < 0.01


def test_growth_looks_past_a_node_that_gains_nothing():
    """(0,) covers every step that (1,) does, but what follows (1,) is worth more than what follows (0,)."""
    tree = Tree.from_choices([[0], [1], [0, 0], [1, 0], [1, 0, 0]])
    accepted = np.zeros((20, 6), dtype=bool)
    accepted[:, 0] = accepted[:, 1] = True
    accepted[:9, [2, 4, 5]] = True
    accepted[9:11, 3] = True
    probe = one_answer(tree, accepted)
    assert grow_coverage(probe, Limits(5)).tree(5) == Tree.from_choices([[0], [1], [1, 0], [1, 0, 0]])
    assert plain_greedy(probe, 5)[-1] < coverage(probe, grow_coverage(probe, Limits(5)).tree(5))


@pytest.fixture(scope="module")
def probe():
    return random_probe(np.random.default_rng(3), Tree.dense([5, 3, 2]), 900, ends=0.01, policy=Tree.chain(2))


def test_figures_of_a_probe_are_held_out(probe):
    limits = Limits(12, max_depth=2, max_rank=3)
    held_out = source_of(probe).crossfit(limits)
    fold = fold_numbers(probe)
    for f in range(FOLDS):
        tree = grow_coverage(probe.select(np.flatnonzero(fold != f)), limits).tree(12)
        test = np.flatnonzero(fold == f)
        assert held_out.every[11].tokens[test].tolist() == replay_probe(probe, tree).tokens[test].tolist()
    assert held_out.every[11].steps.tolist() == np.diff(probe.starts).tolist()
    assert held_out.grown.family(12).paths == grow_coverage(probe, limits).paths
    rates = held_out.rates(12)
    assert rates.tokens_per_step == pytest.approx(held_out.every[11].tokens.sum() / len(probe.accepted))
    assert rates.estimate.stderr > 0
    assert drawn(held_out.every)[11].mean() == pytest.approx(rates.tokens_per_step, rel=0.01)
    guesses = source_of(probe).held_out_shares(held_out, 12)
    assert guesses.sum() == pytest.approx(1)
    assert 1 + guesses @ np.arange(len(guesses)) >= rates.tokens_per_step
    groups = rates_by_group(held_out.every[11], probe)
    steps = [np.diff(probe.starts)[probe.group == g].sum() for g in (0, 1)]
    tokens = sum(n * groups[name] for n, name in zip(steps, "ab", strict=True))
    assert tokens == pytest.approx(held_out.every[11].tokens.sum())


def test_a_plan_can_be_made_of_a_probe(probe):
    def cost(rows):
        return 2.0 + np.ceil(rows / 8)

    plan = plan_trees(probe, staircase(cost), PlanRequest(Limits(24)))
    entry = plan.entries[0]
    best = 0.0
    for depth in (1, 2, 3):
        held_out = source_of(probe).crossfit(Limits(24, max_depth=depth))
        for size, rate in zip(held_out.grown.sizes, held_out.tokens_per_step, strict=True):
            best = max(best, 1e3 * rate / cost(size))
    assert plan.objective == "coverage"
    assert entry.chosen.tokens_per_s == pytest.approx(best, rel=0.005)
    assert entry.chosen.size % 8 == 0
    assert entry.basis.steps == len(probe.accepted)
    chains = [replay_probe(probe, Tree.chain(depth)).tokens_per_step for depth in (1, 2, 3)]
    chain = entry.best("chain")
    assert chain.tokens_per_step == pytest.approx(chains[chain.depth - 1])
    assert any("approximate" in warning for warning in entry.warnings)
    assert list(entry.groups) == ["a", "b"]
    exact = plan_trees(replace(probe, policy=entry.tree), staircase(cost), PlanRequest(Limits(24))).entries[0]
    assert not any("approximate" in warning for warning in exact.warnings), "the plan is the tree that was probed with"


def test_what_cannot_be_grown_is_said(probe):
    with pytest.raises(OutOfRange, match="at least 2 sequences"):
        source_of(probe.select(np.array([0]))).crossfit(Limits(4))
    empty = np.flatnonzero(np.diff(probe.starts) == 0)
    with pytest.raises(OutOfRange, match="more than one token"):
        grow_coverage(probe.select(empty), Limits(4))
