"""Dynamic trees: the pool and the tree chosen from it against engines' own builders, and replay against plain loops."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from treeopt.growth import replay
from treeopt.growth.replay import accepted_lengths, dynamic_rates, steps_by_place, tells
from treeopt.records.pools import NO_PLACE, columns_of
from treeopt.records.trace import MISS, NO_TRIAL, RankTrace
from treeopt.runtime.drafters.levels import LevelDraft, Pool, chosen_tree
from treeopt.runtime.measure.ranks import true_places
from treeopt.trees.draft import MOST_ROWS, DynamicTree, pool_size

from .conftest import some_long
from .helpers.slow_builders import eagle_tree, openvino_tree, sglang_tree

AT_ONCE, TOKENS = 20, 12
STEP = 40.0  # of the logarithms of a coarse table: so far apart that their sum rounds to the largest


class Table:
    """What a drafter says of every path: (V,) logits of random numbers, the same each time.

    coarse : multiples of a step, so that scores are often equal, exactly; now and then one token is certain
    apart  : those of one path are not equal
    """

    def __init__(self, seed: int, *, coarse: bool = False, apart: bool = False) -> None:
        self.seed, self.coarse, self.apart = seed, coarse, apart
        self.logits = cache(self._logits)
        self.logs = cache(self._logs)
        self.probabilities = cache(self._probabilities)

    def _logits(self, path):
        rng = np.random.default_rng([self.seed, len(path), *(1 + token for token in path)])
        if not self.coarse:
            return (rng.choice([0.5, 2.0, 4.0]) * rng.normal(size=TOKENS)).astype(np.float32).astype(float)
        steps = 1 + rng.permutation(TOKENS) if self.apart else rng.integers(1, 5, TOKENS)
        if rng.random() < 0.3:
            steps[rng.integers(TOKENS)] = 0
        return -STEP * steps

    def _logs(self, path):
        logits = self.logits(path)
        return (logits if self.coarse else logits - np.log(np.exp(logits).sum())).tolist()

    def _probabilities(self, path):
        """Of a coarse table powers of two in the same order, whose products are exact."""
        return (2.0 ** (self.logits(path) / STEP) if self.coarse else np.exp(self._logs(path))).tolist()


class TableDraft(LevelDraft):
    """Drafts by a table for each row, and checks what it is told of the nodes that it expands; ``unknown`` tokens are -1."""

    def __init__(self, tables, unknown=()):
        self.drafter, self.tables, self.unknown = None, tables, torch.tensor([*unknown, -1])

    def begin(self, roots, depth):
        self.paths, self.above = [[()] for _ in self.tables], [[] for _ in self.tables]

    def logits(self, level, tokens):
        if level.depth:
            of = level.inherit(torch.arange(len(self.paths[0])).expand(len(tokens), -1)).tolist()
            self.paths = [
                [(*paths[parent], token) for parent, token in zip(parents, row, strict=True)]
                for paths, parents, row in zip(self.paths, of, tokens.tolist(), strict=True)
            ]
            for above, paths in zip(self.above, self.paths, strict=True):
                above += paths
        for i, (above, paths) in enumerate(zip(self.above, self.paths, strict=True)):
            if len(set(above)) < len(above):  # unknown tokens, that cannot be told apart
                continue
            assert len(paths) == level.nodes
            assert level.first + level.nodes - 1 == len(above)
            assert level.ancestors[i].tolist() == [[path[: len(a)] == a for a in above] for path in paths]
            assert level.beyond.tolist() == [len(a) - 1 for a in above]
        return torch.tensor(
            np.array([[t.logits(p) for p in paths] for t, paths in zip(self.tables, self.paths, strict=True)])
        )

    def scores(self, logits):
        if not self.tables[0].coarse:
            return logits
        rest = torch.where(logits.amax(-1, keepdim=True) == 0, -torch.inf, 0.0)  # of a token that is never guessed
        return torch.cat([logits, rest.double()], -1)

    def named(self, guesses, depth):
        return guesses.masked_fill(torch.isin(guesses, self.unknown), -1)


def grown(tables, levels, topk, unknown=()) -> Pool:
    draft = TableDraft(tables, unknown)
    return draft.grow(levels, [topk], torch.zeros(len(tables), dtype=torch.long))[0]


def random_shape(rng) -> tuple[int, int]:
    return int(rng.integers(1, 7)), int(rng.integers(1, 8))


def pools(seed, count, unknown=(), **kind):
    """Tables of many shapes, and their pools: (levels, topk, tables, pool)."""
    rng = np.random.default_rng(seed)
    for first in range(0, count, AT_ONCE):
        levels, topk = random_shape(rng)
        tables = [Table(seed * count + i, **kind) for i in range(first, first + AT_ONCE)]
        yield rng, levels, topk, tables, grown(tables, levels, topk, unknown)


def paths_of(tokens, parents) -> list[tuple[int, ...]]:
    paths = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


BUILDERS = {
    "sglang": lambda table, levels, topk, rows: sglang_tree(table.probabilities, levels, topk, rows),
    "eagle": lambda table, levels, topk, rows: eagle_tree(table.logs, rows, levels - 1, topk),
    "openvino": lambda table, levels, topk, rows: openvino_tree(table.logs, levels, topk, rows - 1),
}


@pytest.mark.parametrize("count", [240, *some_long(1000)])
@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "ties"])
@pytest.mark.parametrize("engine", BUILDERS)
def test_trees_are_those_that_engines_build(engine, coarse, count):
    seed = 3 * list(BUILDERS).index(engine) + coarse
    ties = 0
    for rng, levels, topk, tables, pool in pools(seed, count, coarse=coarse, apart=engine == "openvino"):
        roots = torch.full((AT_ONCE,), 7)
        most = min(pool_size(levels, topk) + 1, MOST_ROWS)
        for rows in {most, int(rng.integers(2, most + 1))}:
            tokens, parents, _, _ = chosen_tree(pool, roots, rows)
            for i, table in enumerate(tables):
                ours = paths_of(tokens[i].tolist(), parents[i].tolist())
                theirs = BUILDERS[engine](table, levels, topk, rows)
                assert sorted(ours) == sorted(theirs), (levels, topk, rows, table.seed)
        scores = pool.scores.sort(1).values
        ties += int((scores[:, 1:] == scores[:, :-1]).sum())
    assert (ties > count) == coarse


def test_a_chosen_tree_is_whole():
    for rng, levels, topk, _, pool in pools(91, 200, unknown=(0, 5, 9), coarse=True):
        rows = int(rng.integers(2, min(pool_size(levels, topk) + 1, MOST_ROWS) + 1))
        roots = torch.arange(AT_ONCE)
        tokens, parents, depths, ancestors = chosen_tree(pool, roots, rows)
        best = pool.best(rows - 1).sort(1).values
        for i in range(AT_ONCE):
            above = parents[i].tolist()
            assert tokens[i, 0] == i
            assert above[0] == 0
            assert depths[i, 0] == 0
            places = best[i].tolist()
            assert tokens[i, 1:].tolist() == pool.tokens[i, places].tolist()
            for node in range(1, rows):
                parent = int(pool.parents[i, places[node - 1]])
                assert above[node] == (0 if parent < 0 else 1 + places.index(parent)) < node
                assert depths[i, node] == depths[i, above[node]] + 1
            for node in range(rows):
                line = {node}
                while node:
                    line.add(node := above[node])
                assert set(ancestors[i, max(line)].nonzero()[:, 0].tolist()) == line


def slow_places(pool, row, labels, levels):
    """Of one state: pool by pool, node by node."""
    found = [NO_PLACE] * columns_of(levels).stop
    tokens, parents, scores = (part[row].tolist() for part in (pool.tokens, pool.parents, pool.scores))
    nodes, depths = range(len(tokens)), pool.depths.tolist()
    for s in range(1, levels + 1):
        here = sorted((i for i in nodes if depths[i] <= s), key=lambda i: (-scores[i], i))
        node = -1
        for depth, token in enumerate(labels[:s]):
            children = [i for i in nodes if parents[i] == node and depths[i] == depth + 1]
            node = next((i for i in children if token >= 0 and tokens[i] == token), None)
            if node is None:
                break
            if here.index(node) <= MOST_ROWS - 2:
                found[columns_of(s).start + depth] = here.index(node)
    return found


@pytest.mark.parametrize("coarse", [False, True], ids=["apart", "ties"])
def test_places_are_those_of_the_true_path_in_every_pool(coarse):
    seen = []
    for rng, levels, _, _, pool in pools(50 + coarse, 300, unknown=(2, 3, 11), coarse=coarse):
        labels = rng.integers(0, TOKENS, (AT_ONCE, levels))
        for row in range(AT_ONCE):  # mostly a path of the pool, sometimes the end of the text
            node = -1
            for depth in range(levels):
                children = (pool.parents[row] == node) & (pool.depths == depth + 1)
                among = children.nonzero()[:, 0].tolist()
                if not among or rng.random() < 0.1:
                    break
                node = among[min(int(rng.geometric(0.4)) - 1, len(among) - 1)]
                labels[row, depth] = pool.tokens[row, node]
            if rng.random() < 0.3:
                labels[row, rng.integers(levels) :] = rng.choice([MISS, NO_TRIAL])
        places = true_places(pool, torch.tensor(labels), levels)
        assert places.dtype == torch.uint8
        assert places.tolist() == [slow_places(pool, i, labels[i].tolist(), levels) for i in range(AT_ONCE)]
        seen.append(places.flatten())
    last = {MOST_ROWS - 2} if coarse else set()
    assert {*range(20), *last, NO_PLACE} <= set(torch.cat(seen).tolist())


def test_a_guess_that_is_no_token_is_chosen_last_and_is_never_true():
    tables = [Table(seed) for seed in range(AT_ONCE)]
    pool = grown(tables, 3, 4, unknown=range(6))
    missing = pool.tokens < 0
    assert missing.any()
    assert (pool.scores[missing] == -torch.inf).all()
    behind = pool.parents >= 0
    assert (pool.scores.gather(1, pool.parents.clamp_min(0)) >= pool.scores)[behind].all()
    places = true_places(pool, torch.full((AT_ONCE, 3), -1), 3)
    assert (places == NO_PLACE).all()


def with_pools(rng, lengths, levels, topks, *, turns=1) -> RankTrace:
    """Random places: a deeper node's is never better than its parent's, nor is any better in a pool of more levels."""
    states = int(np.sum(lengths))
    places = np.full((states, len(topks), columns_of(levels).stop), NO_PLACE)
    for i, topk in enumerate(topks):
        steps = rng.geometric(0.35, (states, levels))
        later = rng.integers(0, 2, (states, levels, levels)) * (rng.random((states, 1, 1)) < 0.5)
        for s in range(1, levels + 1):
            here = (np.cumsum(steps, 1) - 1 + later[:, :s].sum(1).cumsum(1))[:, :s]
            here[here >= min(pool_size(s, topk), MOST_ROWS - 1)] = NO_PLACE
            here[:, :-1] = np.maximum(here[:, :-1], places[:, i, columns_of(s - 1)])
            places[:, i, columns_of(s)] = np.maximum.accumulate(here, axis=1)
    last = np.cumsum(lengths)
    left = np.repeat(last, lengths) - np.arange(states)
    for s in range(1, levels + 1):
        some = places[:, :, columns_of(s)]
        some[left < 2] = NO_PLACE
        some[np.broadcast_to((left[:, None] < 2 + np.arange(s))[:, None], some.shape)] = NO_PLACE
    return RankTrace(
        np.where(left < 2, NO_TRIAL, 0)[:, None],
        np.concatenate([[0], last]),
        cluster=np.arange(len(lengths)) // turns,
        pool_places=places,
        meta={"pools": {"levels": levels, "topks": list(topks)}},
    )


def numbers(trees) -> list[list[int]]:
    """Rows, levels and topks."""
    return [[getattr(tree, name) for tree in trees] for name in ("rows", "levels", "topk")]


def slow_replay(trace, accepted) -> list[list[int]]:
    """(S,) the states at which each sequence takes a step that accepts so many guesses."""
    found = []
    for begin, end in zip(trace.starts[:-1].tolist(), trace.starts[1:].tolist(), strict=True):
        t, steps = begin, []
        while t < end - 1:
            steps.append(t)
            t += 1 + accepted[t]
        found.append(steps)
    return found


def slow_lengths(trace, levels, topk, rows) -> list[int]:
    found = []
    for places in trace.pools.places_in(levels, topk).tolist():
        accepted = 0
        while accepted < levels and places[accepted] + 1 < rows:  # the root is a row
            accepted += 1
        found.append(accepted)
    return found


@pytest.mark.parametrize("at_once", [2**26, 2**10], ids=["all at once", "in portions"])
def test_steps_of_every_setting_are_those_of_a_plain_loop(monkeypatch, at_once):
    monkeypatch.setattr(replay, "AT_ONCE", at_once)
    rng = np.random.default_rng(at_once)
    trace = with_pools(rng, [1, 2, 3, 300, 1, 290, *rng.integers(1, 50, 8).tolist(), 2], 4, (1, 3, 8), turns=3)
    places = trace.pool_places.copy()
    places[trace.starts[5] : trace.starts[6]] = NO_PLACE  # more steps in a row than a byte counts
    trace = replace(trace, pool_places=places)
    rates = dynamic_rates(trace)
    assert next(iter(rates.values())).tokens.tolist() == [
        int((trace.lengths - 1)[trace.clusters == c].sum()) for c in range(5)
    ]
    seen = {(tree.levels, tree.topk, tree.rows): reached.steps.tolist() for tree, reached in rates.items()}
    for topk in (1, 3, 8):
        for levels in range(1, 5):
            rows = list(range(2, min(pool_size(levels, topk) + 1, MOST_ROWS) + 1))
            found = steps_by_place(trace, trace.pools.places_in(levels, topk), rows)
            for n, steps in zip(rows, found.tolist(), strict=True):
                lengths = slow_lengths(trace, levels, topk, n)
                assert accepted_lengths(trace, DynamicTree(levels, topk, n)).tolist() == lengths
                slow = [len(states) for states in slow_replay(trace, lengths)]
                assert steps == slow, (levels, topk, n)
                if n > levels and topk > 1:
                    assert seen.pop((levels, topk, n)) == np.bincount(trace.clusters, slow).tolist()
    assert not seen
    assert not tells(trace, DynamicTree(5, 3, 9))
    assert not tells(trace, DynamicTree(2, 2, 3))
