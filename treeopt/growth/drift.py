"""Whether two sources of accuracies differ by more than noise, depth by depth.

top-1      share of the trials at a depth in which the likeliest guess was right
survival   share of a chain's steps that accept its guesses up to a depth; all that probes and engines count

Conversations were drawn at random, so those of each source are drawn again. The intervals of all depths hold together:
at most one of 20 pairs of equal sources is called different.

C conversations · D depths · B bootstrap draws
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.probed import tokens_of_trees
from treeopt.growth.replay import accepted_lengths, sequence_of, visited
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import BOOTSTRAPS, SEED, conversation_draws, drawn_rates, interval95
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.estimate import Estimate
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import NO_TRIAL, RankTrace
from treeopt.trees.tree import IntArray, Tree

Floats = NDArray[np.float64]
TOP_1, SURVIVAL = "top-1", "survival"


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The share at one depth in two sources.

    change : ``after`` - ``before``; the intervals of all depths together hold in 95 % of the cases
    moved  : whether the interval excludes 0
    """

    depth: int
    before: float
    after: float
    change: Estimate
    moved: bool


@dataclass(frozen=True, eq=False)
class Shares:
    """(D,) shares of a source, their (D, B) draws, and the number of conversations, None where it is not known."""

    values: Floats
    draws: Floats
    conversations: int | None


def measure_for(*records: Accuracies) -> str:
    """The measure that all records have: survival where a record is of chains alone, else top-1."""
    for record in records:
        if source_of(record).kind == "probe" or record.meta.get("source") == ENGINE_LOG:
            return SURVIVAL
    return TOP_1


def shifts(before: Accuracies, after: Accuracies) -> list[Shift]:
    """How the share of each depth that both sources have differs between them.

    >>> before, after = (Calibration(np.array([[hits]]), np.array([1000])) for hits in (600, 500))
    >>> [(shift.before, shift.after, shift.moved) for shift in shifts(before, after)]
    [(0.6, 0.5, True)]
    """
    measure, depth = measure_for(before, after), min(before.num_heads, after.num_heads)
    # Sources are independent, so their draws have different seeds.
    first, second = shares_of(before, measure, depth, SEED), shares_of(after, measure, depth, SEED + 1)
    count = min(first.draws.shape[1], second.draws.shape[1])
    n = min(first.conversations or BOOTSTRAPS, second.conversations or BOOTSTRAPS)
    depth = min(len(first.values), len(second.values))
    changes = [second.draws[d, :count] - first.draws[d, :count] for d in range(depth)]
    intervals = [interval95(change, n, tests=depth) for change in changes]
    return [
        Shift(
            depth=d + 1,
            before=float(first.values[d]),
            after=float(second.values[d]),
            change=Estimate(float(second.values[d] - first.values[d]), None, low, high),
            moved=not low <= 0 <= high,
        )
        for d, (low, high) in enumerate(intervals)
    ]


def shares_of(record: Accuracies, measure: str, depth: int, seed: int = SEED) -> Shares:
    """The shares of depths 1 ... D by one of the two measures, of chains of ``depth`` guesses.

    >>> trace = RankTrace(np.array([[0], [1], [-2]] * 2), np.array([0, 3, 6]))
    >>> shares_of(trace, TOP_1, 1).values.tolist()
    [0.5]
    """
    if (answers := source_of(record).answers) is None:
        return _counted_shares(cast(Calibration, record), measure, depth, seed)
    n = answers.num_conversations
    if n < 2:
        raise OutOfRange("Each source must have at least 2 conversations, since their differences tell the noise.")
    passed, tried, sequence = TRIALS[type(answers)](answers, measure, depth)
    clusters = answers.clusters[sequence]
    hits, totals = (np.stack([np.bincount(clusters, column, n) for column in rows.T]) for rows in (passed, tried))
    shares = np.asarray(hits.sum(1) / np.maximum(totals.sum(1), 1))
    draws = drawn_rates(hits, totals, conversation_draws(n, seed=seed))
    if measure == SURVIVAL:
        shares, draws = np.asarray(np.cumprod(shares)), np.asarray(np.cumprod(draws, axis=0))
    return Shares(shares, draws, n)


def _counted_shares(record: Calibration, measure: str, depth: int, seed: int) -> Shares:
    meta, requests = record.meta, None
    if measure == TOP_1:
        shares, errors = record.accept[:depth, 0], record.stderr[:depth, 0]
    else:
        shares, trials = record.survival[:depth], meta.get("positions") or record.trials[0]
        stderr = record.survival_stderr
        errors = np.sqrt(shares * (1 - shares) / trials) if stderr is None else stderr[:depth]
        requests = None if meta.get("survival_stderr_is_optimistic", True) else meta.get("requests")
    noise = np.random.default_rng(seed).standard_normal((len(shares), BOOTSTRAPS))
    return Shares(shares, shares[:, None] + errors[:, None] * noise, requests)


Trials = tuple[
    NDArray[np.generic], NDArray[np.generic], IntArray
]  # (n, D) passed and tried guesses; (n,) sequence of each row


def _trace_trials(trace: RankTrace, measure: str, depth: int) -> Trials:
    if measure == TOP_1:
        states = np.flatnonzero(trace.has_step)
        ranks = trace.ranks[states, :depth]
        return ranks == 0, ranks != NO_TRIAL, sequence_of(trace, states)
    accepted = accepted_lengths(trace, Tree.chain(depth))
    states = visited(trace, accepted)
    reached, places = accepted[states, None], np.arange(depth)
    return reached > places, (reached >= places) & (trace.ranks[states, :depth] != NO_TRIAL), sequence_of(trace, states)


def _probe_trials(probe: Probe, measure: str, depth: int) -> Trials:
    nodes = set(probe.tree.paths)
    depth = next((d for d in range(depth) if (0,) * (d + 1) not in nodes), depth)
    if not depth:
        raise OutOfRange("Survival needs the likeliest first guess, but the probe's tree does not have it.")
    tokens = tokens_of_trees(probe, Tree.chain(depth).paths, np.arange(1, depth + 2))  # (D+1, S)
    passed = np.diff(tokens, axis=0).T
    return passed, np.column_stack([np.diff(probe.starts), passed[:, :-1]]), np.arange(probe.num_sequences)


TRIALS: dict[type, Callable[..., Trials]] = {RankTrace: _trace_trials, Probe: _probe_trials}
