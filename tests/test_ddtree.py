"""Trees over marginals against all paths sorted, their records against plain loops, and damage that is refused."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeopt.errors import InvalidInput, OutOfRange
from treeopt.growth.replay import accepted_lengths, marginal_rates, record_for, replay, tells
from treeopt.growth.source import TraceSource
from treeopt.records.pools import NO_PLACE, Counts, columns_of
from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.runtime.drafters.levels import chosen_tree
from treeopt.runtime.drafters.marginals import MarginalDraft
from treeopt.trees.draft import MOST_BLOCK, MOST_ROWS, MOST_WIDTH, DDTree, DynamicTree, TreeSize, draft_of, product_size

from .conftest import some_long
from .test_dynamic import STEP, paths_of, slow_replay

AT_ONCE = 20
LENGTHS, WIDTHS = [1, 2, 18, 7, 20], (1, 2, 3, 5)


class Given(MarginalDraft):
    """Drafts by (b, D, V) logits; the last of V tokens is none of the target's."""

    def __init__(self, logits):
        self.drafter, self.given = None, logits

    def named(self, guesses, depth):
        return guesses.masked_fill(guesses == self.given.shape[2] - 1, -1)

    def marginals(self, roots, depth):
        return self.given[:, :depth]

    def pool(self, *numbers):
        return self.first_nodes(DDTree(*numbers), torch.arange(len(self.given)))


def draft(rng, depth, tokens, rows=AT_ONCE) -> Given:
    """Logits of many ties, within a depth and between depths: coarse ones, exact powers, a few certain or impossible tokens."""
    shape = (rows, depth, tokens)
    kinds = [rng.normal(size=shape), rng.integers(0, 3, shape), -STEP * rng.integers(0, 4, shape)]
    logits = np.choose(rng.integers(0, 3, (rows, 1, 1)), kinds)
    logits[:, 1:2][rng.random(rows) < 0.5] = logits[:1, :1]
    logits[rng.random(shape) < 0.02] = -np.inf
    logits[..., 0] = np.maximum(logits[..., 0], -STEP)
    return Given(torch.tensor(logits, dtype=torch.float32))


def sorted_paths(logits, depth, width) -> list[tuple[float, tuple[int, ...]]]:
    """Score and tokens of every path, in the order that DDTree takes them: all enumerated, and sorted."""
    ids = [sorted(range(len(of)), key=lambda i: (-of[i], i))[:width] for of in logits.tolist()]
    said = [*range(logits.shape[1] - 1), -1]
    logs = (logits - logits.logsumexp(-1, keepdim=True)).tolist()  # float32; they are summed as Python's floats
    ranks = [path for d in range(1, depth + 1) for path in itertools.product(range(min(width, len(ids[0]))), repeat=d)]
    tokens = {path: tuple(ids[d][rank] for d, rank in enumerate(path)) for path in ranks}
    score = {path: np.cumsum([logs[d][token] for d, token in enumerate(tokens[path])])[-1] for path in ranks}
    ranks.sort(key=lambda path: (-score[path], path))
    return [(score[path], tuple(said[token] for token in tokens[path])) for path in ranks]


@pytest.mark.parametrize("count", [160, *some_long(2000)])
def test_nodes_are_the_first_of_all_paths_sorted(count):
    """Every budget, width and depth cut; of each one budget through the tree that a step verifies."""
    rng, ties = np.random.default_rng(0), 0
    for _ in range(count // AT_ONCE):
        most, tokens = int(rng.integers(1, 5)), int(rng.integers(2, 5))
        given = draft(rng, most, tokens)
        for depth, width in itertools.product(range(1, most + 1), range(1, tokens + 1)):
            nodes = min(product_size(depth, width), MOST_ROWS - 1)
            pool, rows = given.pool(depth, width, 1 + nodes), int(rng.integers(2, nodes + 2))
            *found, depths, _ = chosen_tree(given.pool(depth, width, rows), torch.arange(AT_ONCE), rows)
            for i in range(AT_ONCE):
                paths = paths_of([0, *pool.tokens[i].tolist()], [0, *(1 + pool.parents[i]).tolist()])
                scores, slow = zip(*sorted_paths(given.given[i], depth, width)[:nodes], strict=True)
                assert paths == [*slow]
                ties += sum(one == other for one, other in itertools.pairwise(scores))
                ours = paths_of(*(part[i].tolist() for part in found))
                assert sorted(ours) == sorted(slow[: rows - 1])
                assert depths[i].tolist() == [0, *map(len, ours)]
    assert ties > 10 * count


def test_edge_llm_takes_the_same_nodes_where_no_scores_are_equal():
    """Its rule: the best child so far untried of any node that there is, of so many ranks of each depth."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        depth, topk, rows = int(rng.integers(2, 6)), int(rng.integers(2, 9)), int(rng.integers(3, 30))
        rows = min(max(rows, topk + 1), product_size(depth, topk) + 1)
        logits = torch.tensor(rng.normal(size=(1, depth, 12)), dtype=torch.float32)
        logs, ids = logits[0].log_softmax(-1).sort(-1, descending=True)
        nodes, scores, tried = [()], [0.0], [0]
        while len(nodes) < rows:
            may = [i for i, path in enumerate(nodes) if len(path) < depth and tried[i] < topk]
            best = max(may, key=lambda i: scores[i] + float(logs[len(nodes[i]), tried[i]]))
            scores.append(scores[best] + float(logs[len(nodes[best]), tried[best]]))
            nodes.append((*nodes[best], int(ids[len(nodes[best]), tried[best]])))
            tried[best] += 1
            tried.append(0)
        pool = Given(torch.cat([logits, torch.full((1, depth, 1), -99.0)], 2)).pool(depth, topk, rows)
        ours = paths_of([0, *pool.tokens[0].tolist()], [0, *(1 + pool.parents[0]).tolist()])
        assert ours == nodes[1:]  # in the same order, too


def slow_places(logits, true, width) -> list[int]:
    """Of one state: cut by cut, path by path."""
    paths, found = [tuple(true[: d + 1]) for d in range(len(true))], []
    for cut in range(1, 1 + len(true)):
        order = {path: n for n, (_, path) in enumerate(sorted_paths(logits, cut, width)) if min(path) >= 0}
        found += [order.get(path, NO_PLACE) for path in paths[:cut]]
    return found


def recorded(seed, lengths, widths, depth=4, tokens=5) -> tuple[RankTrace, np.ndarray]:
    """A trace of random texts as it is recorded, and its true paths' places as they should be, however far behind."""
    rng, states = np.random.default_rng(seed), int(np.sum(lengths))
    given, last = draft(rng, depth, tokens, states), np.cumsum(lengths)
    left = np.repeat(last, lengths) - np.arange(states)
    labels = rng.integers(0, tokens, (states, depth))
    labels = np.where(rng.random(labels.shape) < 0.6, given.named(given.given.argmax(-1), 0), labels)
    labels[np.arange(1, depth + 1) >= left[:, None]] = rng.choice([MISS, NO_TRIAL])
    places = given.true_nodes(torch.arange(states), torch.tensor(labels), widths).numpy()
    states = zip(given.given, labels.tolist(), strict=True)
    slow = np.array([[slow_places(*state, width) for width in widths] for state in states])
    about = {"cluster": np.arange(len(lengths)) // 2, "meta": {"marginals": {"levels": depth, "widths": list(widths)}}}
    ranks, starts = np.where(left < 2, NO_TRIAL, 0)[:, None], np.concatenate([[0], last])
    return RankTrace(ranks, starts, marginal_places=places, **about), slow


@pytest.mark.parametrize("seed", [0, *some_long(1, 2, 3)])
def test_one_record_tells_every_width_and_depth_cut(seed):
    trace, slow = recorded(seed, LENGTHS, WIDTHS)
    assert (trace.marginal_places == np.where(slow < MOST_ROWS - 1, slow, NO_PLACE)).all()
    assert ((slow >= MOST_ROWS - 1) & (slow != NO_PLACE)).any()  # some are too far behind


def test_every_setting_is_replayed_as_a_plain_loop_does(tmp_path):
    made, slow = recorded(7, LENGTHS, WIDTHS)
    made.save(tmp_path / "t.npz")
    rates, settings = marginal_rates(trace := RankTrace.load(tmp_path / "t.npz")), 0
    for (i, width), depth in itertools.product(enumerate(WIDTHS), range(1, 5)):
        for rows in range(2, min(product_size(depth, width) + 1, MOST_ROWS) + 1):
            tree = DDTree(depth, width, rows)
            accepted = [sum(place < rows - 1 for place in of[i][columns_of(depth)]) for of in slow]
            steps = [len(states) for states in slow_replay(trace, accepted)]
            assert accepted_lengths(trace, tree).tolist() == accepted
            assert replay(trace, tree).steps.tolist() == steps
            by_turns = np.bincount(np.arange(len(LENGTHS)) // 2, steps).tolist()
            assert TraceSource(trace).rates(tree).steps.tolist() == by_turns
            least = next(w for w in WIDTHS if w >= min(width, rows - 1))
            if rows > depth:
                assert rates[DDTree(depth, least, rows)].steps.tolist() == by_turns
                settings += least == width
    assert len(rates) == settings
    assert tells(trace, DDTree(3, 6, 6))  # a width of 5 makes the same tree
    for beyond in (DDTree(5, 5, 9), DDTree(3, 4, 6), DynamicTree(2, 2, 4)):
        assert not tells(trace, beyond)
        with pytest.raises(OutOfRange):
            accepted_lengths(trace, beyond)
    assert not marginal_rates(RankTrace(trace.ranks, trace.starts))


def test_records_are_selected_and_joined_and_asked_for():
    trace, _ = recorded(8, LENGTHS, WIDTHS)
    both = RankTrace.concatenate([trace, trace], trace.meta)
    assert (both.select(np.arange(5, 10)).marginal_places == trace.marginal_places).all()
    wanted = [DDTree(3, 8, 16), DDTree(5, 4, 9), DynamicTree(2, 4, 8)]
    assert record_for(wanted) == Counts(1, 2, (4,), 5, (4, 8))
    few = SimpleNamespace(draft_vocab_size=6, num_heads=4, has_probabilities=True)
    few.has_marginals = True
    assert record_for(wanted).fitting(few) == Counts(1, 2, (4,), 4, (4,))
    few.has_marginals = False
    assert record_for(wanted).fitting(few) == Counts(1, 2, (4,))


def test_a_draft_is_read_from_its_record_and_has_limits():
    for tree in (DDTree(5, 8, 32), DDTree(MOST_BLOCK, MOST_WIDTH, MOST_ROWS), DDTree(3, 1, 4), TreeSize(16, 3)):
        assert draft_of(tree.record) == tree
    for numbers in (
        (0, 2, 2),
        (MOST_BLOCK + 1, 2, 8),
        (3, 0, 4),
        (3, MOST_WIDTH + 1, 4),
        (3, 2, 1),
        (2, 2, 8),
        (9, 9, 65),
    ):
        with pytest.raises(InvalidInput, match="of a tree over marginals must be"):
            DDTree(*numbers)
