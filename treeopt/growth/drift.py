"""Whether two sources of accuracies differ, depth by depth, and whether by more than noise.

top-1      share of the trials at a depth in which its likeliest guess is the token that came
survival   share of the steps of a chain that accept its guesses up to a depth: all that an engine counts, and a probe

Conversations are what was drawn at random: errors are of sums over whole conversations (linearised, Student's t). Where
a source has few of them, that calls too much different, and conversations change sides at random instead (permutation). The
depths are tested together by Holm's method, so that one of 50 pairs without a difference is called different, at most.

C conversations · D depths
"""

from dataclasses import dataclass
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import OutOfRange
from treeopt.growth.probed import tokens_of_trees
from treeopt.growth.replay import accepted_lengths, sequence_of, visited
from treeopt.growth.source import source_of
from treeopt.records.bootstrap import BOOTSTRAPS, LEVEL, SEED
from treeopt.records.calibration import ENGINE_LOG, Calibration
from treeopt.records.inputs import Accuracies
from treeopt.records.probe import Probe
from treeopt.records.trace import NO_TRIAL, Answers, RankTrace
from treeopt.trees.tree import IntArray, Tree

Floats = NDArray[np.float64]
TOP_1, SURVIVAL = "top-1", "survival"
FALSE_ALARMS = 0.02  # share of the pairs without a difference that may be called different
FEW = 30  # conversations of a source that Student's t is not trusted with


@dataclass(frozen=True, kw_only=True)
class Shift:
    """How far the guesses of a depth get in two sources.

    change95 : 95 % interval of ``after`` less ``before``, of this depth alone
    p_value  : of a difference as large without any
    moved    : whether it is beyond noise, with all depths tested together
    """

    depth: int
    before: float
    after: float
    change95: tuple[float, float]
    p_value: float
    moved: bool


@dataclass(frozen=True, eq=False)
class Reach:
    """(D,) shares of a source with their standard errors, by how many conversations; None where that is not known.

    counts : (2, C, D) passed and tried guesses of every conversation; None where they are not known
    """

    shares: Floats
    stderr: Floats
    conversations: int | None
    counts: Floats | None = None


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
    from scipy.stats import t

    measure, depth = measure_for(before, after), min(before.num_heads, after.num_heads)
    both = [reach(source_of(record).record, measure, depth) for record in (before, after)]  # repeated by their weights
    depth = min(len(one.shares) for one in both)
    ours, theirs = (one.shares[:depth] for one in both)
    variances = [one.stderr[:depth] ** 2 for one in both]
    error = np.maximum(np.sqrt(sum(variances)), 1e-12)
    # Welch's degrees of freedom; of counts without conversations there are no end of them.
    known = zip(variances, [one.conversations for one in both], strict=True)
    spread = np.asarray(sum(variance**2 / (n - 1) for variance, n in known if n is not None))
    freedom = np.where(spread > 0, error**4 / np.maximum(spread, 1e-300), np.inf)
    p_values = 2 * t.sf(np.abs(theirs - ours) / error, freedom)
    counts = [one.counts[..., :depth] for one in both if one.counts is not None]
    is_weighed = any(getattr(record, "weight", None) is not None for record in (before, after))  # sides are not alike
    if len(counts) == 2 and min(one.shape[1] for one in counts) < FEW and not is_weighed:
        p_values = permuted(counts[0], counts[1], measure)
    half = t.ppf((1 + LEVEL) / 2, freedom) * error
    rows = zip(
        *(values.tolist() for values in (ours, theirs, theirs - ours, half, p_values, holm(p_values))), strict=True
    )
    return [
        Shift(depth=d, before=a, after=b, change95=(change - h, change + h), p_value=p, moved=moved)
        for d, (a, b, change, h, p, moved) in enumerate(rows, 1)
    ]


def holm(p_values: Floats, level: float = FALSE_ALARMS) -> NDArray[np.bool_]:
    """Which are significant together: from the least on, each against ``level`` over those that are left.

    >>> [holm(np.array(p_values), 0.05).tolist() for p_values in ([0.03, 0.01, 0.04], [0.01, 0.02, 0.04])]
    [[False, True, False], [True, True, True]]
    """
    order = np.argsort(p_values, kind="stable")
    passed = np.logical_and.accumulate(p_values[order] <= level / np.arange(len(p_values), 0, -1))
    found = np.zeros(len(p_values), dtype=bool)
    found[order] = passed
    return found


def permuted(ours: Floats, theirs: Floats, measure: str) -> Floats:
    """(D,) share of the random divisions of all conversations that differ by as much as two sources do, by their counts."""
    rng, both = np.random.default_rng(SEED), np.concatenate([ours, theirs], axis=1)
    few, total = min(ours.shape[1], theirs.shape[1]), both.sum(1)[:, None]
    picks = np.array([rng.choice(both.shape[1], few, replace=False) for _ in range(BOOTSTRAPS)])
    some = both[:, picks].sum(2)  # (2, B, D)
    change, found = (
        np.abs(_shares(one[0], one[1], measure) - _shares(other[0], other[1], measure))
        for one, other in ((some, total - some), (ours.sum(1), theirs.sum(1)))
    )
    return np.asarray((1 + (change >= found - 1e-12).sum(0)) / (1 + BOOTSTRAPS))


def _shares(passed: Floats, tried: Floats, measure: str) -> Floats:
    """(..., D) shares by sums over conversations."""
    shares = passed / np.maximum(tried, 1)
    return np.asarray(np.cumprod(shares, axis=-1) if measure == SURVIVAL else shares)


@singledispatch
def reach(record: Accuracies, measure: str, depth: int) -> Reach:
    """Shares that the guesses of depths 1 ... D reach, by one of the two measures; chains are ``depth`` long.

    >>> trace = RankTrace(np.array([[0], [1], [-2]] * 2), np.array([0, 3, 6]))
    >>> reach(trace, TOP_1, 1).shares.tolist()
    [0.5]
    """
    raise TypeError(f"a trace, a probe or a calibration is wanted, but this is a {type(record).__name__}")


@reach.register
def _(record: RankTrace, measure: str, depth: int) -> Reach:
    if measure == TOP_1:
        states = np.flatnonzero(record.has_step)
        ranks = record.ranks[states, :depth]
        return _pooled(record, sequence_of(record, states), ranks == 0, ranks != NO_TRIAL, measure)
    accepted = accepted_lengths(record, Tree.chain(depth))
    states = visited(record, accepted)
    passed = accepted[states, None] > np.arange(depth)
    tried = (accepted[states, None] >= np.arange(depth)) & (record.ranks[states, :depth] != NO_TRIAL)
    return _pooled(record, sequence_of(record, states), passed, tried, measure)


@reach.register
def _(record: Probe, measure: str, depth: int) -> Reach:
    nodes = set(record.tree.paths)
    depth = next((d for d in range(depth) if (0,) * (d + 1) not in nodes), depth)
    if not depth:
        raise OutOfRange("Survival needs the likeliest first guess, but the probe's tree does not have it.")
    tokens = tokens_of_trees(record, Tree.chain(depth).paths, np.arange(1, depth + 2))  # (D+1, S)
    passed = np.diff(tokens, axis=0).T
    tried = np.column_stack([np.diff(record.starts), passed[:, :-1]])
    return _pooled(record, np.arange(record.num_sequences), passed, tried, SURVIVAL)


@reach.register
def _(record: Calibration, measure: str, depth: int) -> Reach:
    said = record.meta
    if measure == TOP_1:
        return Reach(record.accept[:depth, 0], record.stderr[:depth, 0], None)
    shares = record.survival[:depth]
    errors = said.get("survival_stderr")
    if errors is None:
        errors = np.sqrt(shares * (1 - shares) / (said.get("positions") or record.trials[0]))
    requests = None if said.get("survival_stderr_is_optimistic", True) else said.get("requests")
    return Reach(shares, np.asarray(errors)[:depth], requests)


def _pooled(
    record: Answers, sequence: IntArray, passed: NDArray[np.generic], tried: NDArray[np.generic], measure: str
) -> Reach:
    """Shares of (n, D) counts, each row of one of the sequences, with errors over conversations.

    A conversation's pull on a ratio p of sums is (passed - p tried) / sum of tried, and on a product of ratios the
    product times the sum of its pulls over the ratios.
    """
    n, conversation = record.num_conversations, record.clusters[sequence]
    if n < 2:
        raise OutOfRange("Each source must have at least 2 conversations, since noise is told by how they differ.")
    hits, trials = (
        np.stack([np.bincount(conversation, column, n) for column in counts.T], axis=1) for counts in (passed, tried)
    )
    shares = _shares(hits.sum(0), trials.sum(0), TOP_1)
    pulls = (hits - shares * trials) / np.maximum(trials.sum(0), 1)  # (C, D)
    if measure == SURVIVAL:
        pulls = np.cumsum(pulls / np.maximum(shares, 1e-12), axis=1) * np.cumprod(shares)
        shares = np.asarray(np.cumprod(shares))
    return Reach(shares, np.sqrt(n / (n - 1) * (pulls**2).sum(0)), n, np.stack([hits, trials]))
