"""Whether two sources of accuracies differ, depth by depth, and whether by more than noise.

top-1      share of the trials at a depth in which its likeliest guess is the token that came
survival   share of the steps of a chain that accept its guesses up to a depth: all that an engine counts, and a probe

Conversations are what was drawn at random, so those of each source are drawn again. The intervals of all depths hold
together: where nothing differs, one of 20 pairs is called different, at most.

C conversations · D depths · B bootstrap draws
"""

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.probed import tokens_of_trees
from treeopt.growth.replay import accepted_lengths, sequence_of, visited
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, drawn_rates, interval95
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import NO_TRIAL, Answers, RankTrace
from treeopt.trees.tree import IntArray, Tree

Floats = NDArray[np.float64]
TOP_1, SURVIVAL = "top-1", "survival"


@dataclass(frozen=True, kw_only=True)
class Shift:
    """How far the guesses of a depth get in two sources.

    change95 : interval of ``after`` less ``before``; those of all depths together hold in 95 % of the cases
    moved    : whether 0 is not in it
    """

    depth: int
    before: float
    after: float
    change95: tuple[float, float]
    moved: bool


@dataclass(frozen=True, eq=False)
class Reach:
    """(D,) shares of a source, and (D, B) draws of them, by how many conversations; None where that is not known."""

    shares: Floats
    draws: Floats
    conversations: int | None


def measure_for(*records: Accuracies) -> str:
    """The measure that can be compared of all: survival where one tells of chains alone, else top-1."""
    of_chains = [source_of(one).kind == "probe" or one.meta.get("source") == ENGINE_LOG for one in records]
    return SURVIVAL if any(of_chains) else TOP_1


def shifts(before: Accuracies, after: Accuracies) -> list[Shift]:
    """The depths that both sources have.

    >>> one, two = (Calibration(np.array([[hits]]), np.array([1000])) for hits in (600, 500))
    >>> [(shift.before, shift.after, shift.moved) for shift in shifts(one, two)]
    [(0.6, 0.5, True)]
    """
    measure, depth = measure_for(before, after), min(before.num_heads, after.num_heads)
    # Weights repeat sequences. Sources are independent, so each has draws of its own.
    ours, theirs = (
        reach(source_of(record).record, measure, depth, seed) for record, seed in ((before, SEED), (after, SEED + 1))
    )
    count = min(ours.draws.shape[1], theirs.draws.shape[1])
    n = min(ours.conversations or BOOTSTRAPS, theirs.conversations or BOOTSTRAPS)
    found, depth = [], min(len(ours.shares), len(theirs.shares))
    for d in range(depth):
        low, high = interval95(theirs.draws[d, :count] - ours.draws[d, :count], n, tests=depth)
        found.append(
            Shift(
                depth=d + 1,
                before=float(ours.shares[d]),
                after=float(theirs.shares[d]),
                change95=(low, high),
                moved=not low <= 0 <= high,
            )
        )
    return found


@singledispatch
def reach(record: Accuracies, measure: str, depth: int, seed: int = SEED) -> Reach:
    """Shares that the guesses of depths 1 ... D reach, by one of the two measures; chains are ``depth`` long.

    >>> trace = RankTrace(np.array([[0], [1], [-2]] * 2), np.array([0, 3, 6]))
    >>> reach(trace, TOP_1, 1).shares.tolist()
    [0.5]
    """
    raise TypeError(f"a trace, a probe or a calibration is wanted, but this is a {type(record).__name__}")


@reach.register
def _(record: RankTrace, measure: str, depth: int, seed: int = SEED) -> Reach:
    if measure == TOP_1:
        states = np.flatnonzero(record.has_step)
        ranks = record.ranks[states, :depth]
        return _pooled(record, sequence_of(record, states), ranks == 0, ranks != NO_TRIAL, measure, seed)
    accepted = accepted_lengths(record, Tree.chain(depth))
    states = visited(record, accepted)
    passed = accepted[states, None] > np.arange(depth)
    tried = (accepted[states, None] >= np.arange(depth)) & (record.ranks[states, :depth] != NO_TRIAL)
    return _pooled(record, sequence_of(record, states), passed, tried, measure, seed)


@reach.register
def _(record: Probe, measure: str, depth: int, seed: int = SEED) -> Reach:
    nodes = set(record.tree.paths)
    depth = next((d for d in range(depth) if (0,) * (d + 1) not in nodes), depth)
    if not depth:
        raise OutOfRange("Survival needs the likeliest first guess, but the probe's tree does not have it.")
    tokens = tokens_of_trees(record, Tree.chain(depth).paths, np.arange(1, depth + 2))  # (D+1, S)
    passed = np.diff(tokens, axis=0).T
    tried = np.column_stack([np.diff(record.starts), passed[:, :-1]])
    return _pooled(record, np.arange(record.num_sequences), passed, tried, SURVIVAL, seed)


@reach.register
def _(record: Calibration, measure: str, depth: int, seed: int = SEED) -> Reach:
    info, requests = record.meta, None
    if measure == TOP_1:
        shares, errors = record.accept[:depth, 0], record.stderr[:depth, 0]
    else:
        shares = record.survival[:depth]
        known, trials = info.get("survival_stderr"), info.get("positions") or record.trials[0]
        errors = np.sqrt(shares * (1 - shares) / trials) if known is None else np.asarray(known)[:depth]
        requests = None if info.get("survival_stderr_is_optimistic", True) else info.get("requests")
    noise = np.random.default_rng(seed).standard_normal((len(shares), BOOTSTRAPS))
    return Reach(shares, shares[:, None] + errors[:, None] * noise, requests)


def _pooled(
    record: Answers,
    sequence: IntArray,
    passed: NDArray[np.generic],
    tried: NDArray[np.generic],
    measure: str,
    seed: int,
) -> Reach:
    """Shares of (n, D) counts, each row of one of the sequences, and draws of them over conversations."""
    n, conversation = record.num_conversations, record.clusters[sequence]
    if n < 2:
        raise OutOfRange("Each source must have at least 2 conversations, since noise is told by how they differ.")
    hits, trials = (
        np.stack([np.bincount(conversation, column, n) for column in counts.T]) for counts in (passed, tried)
    )  # (D, C)
    shares = np.asarray(hits.sum(1) / np.maximum(trials.sum(1), 1))
    draws = drawn_rates(hits, trials, conversation_draws(n, seed=seed))
    if measure == SURVIVAL:
        shares, draws = np.asarray(np.cumprod(shares)), np.asarray(np.cumprod(draws, axis=0))
    return Reach(shares, draws, n)
