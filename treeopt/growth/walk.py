"""Greedy decoding of a whole trace with growing trees, from the few states that a new node changes.

Some states are visited whatever the tree is: those that no run of right ranks before them reaches beyond. They cut every
sequence into *segments*, which decoding passes one after the other, each from its first state on. So a new node changes
only segments with a state whose path begins with it, and these are decoded again, with the old tree and with the new one.
Several trees that differ in few nodes are decoded together, and nothing is kept of single states.

P states · S sequences · C conversations · F parts of them · G segments · N distinct paths · R ranks told apart
M nodes of any of the trees
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.growth.paths import Paths, narrow, portions
from treeopt.records.trace import RankTrace
from treeopt.trees.tree import Choice, IntArray

AT_ONCE = 2**21  # states of segments that are decoded together, if all were as long as the longest
ARRAYS = ("accepted", "cell", "counts", "inside", "saved", "steps", "leaving", "ahead")  # of `WalkState`


@dataclass(frozen=True, eq=False)
class SegmentBlock:
    """Segments of about the same length, the longest first, W of them, L states the longest.

    segments : (W,) their numbers · lengths : (W,)
    rows     : (L + 1,) where the paths of the first states begin, of the second ones, ...; of those that have one
    paths    : (rows[L],) paths of all states
    """

    segments: IntArray
    lengths: IntArray
    rows: IntArray
    paths: NDArray[Any]

    def with_paths(self, which: slice) -> IntArray:
        """The places (ascending) of segments that have one of these paths."""
        if which.start == which.stop:
            return self.rows[:0]
        behind = self.paths - self.paths.dtype.type(which.start)  # those before it become very large
        at = np.flatnonzero(behind < which.stop - which.start)
        found = np.zeros(len(self.segments), dtype=bool)
        found[at - np.repeat(self.rows[:-1], np.diff(np.searchsorted(at, self.rows)))] = True
        return np.flatnonzero(found)


@dataclass(frozen=True, eq=False)
class WalkState:
    """The states that decoding with one tree visits, summed up by node.

    nodes    : number of every node, 0 for the root
    accepted : (N,) depth of the deepest node that is accepted at a state of each path
    cell     : (N,) its number x (R + 2) + the rank that would be accepted next; R for none of ours, R + 1 for no trial
    counts   : (F, M, R + 2) how many visited states have each cell
    saved    : (F, M, R + 2) steps that one more guess saves at them; ``inside`` without the last state of each segment,
               behind which decoding is at the first one of the next
    steps    : (G,) in each segment
    leaving  : (G,) path of the last visited state of each segment
    ahead    : (G,) steps that it saves to begin at the segment's second state
    """

    nodes: dict[Choice, int]
    accepted: NDArray[np.uint16]
    cell: NDArray[np.int32]
    counts: IntArray
    inside: IntArray
    saved: IntArray
    steps: NDArray[np.int32]
    leaving: NDArray[np.int32]
    ahead: NDArray[np.int32]


class Walk:
    """The segments of a trace, and decoding them with trees up to a depth.

    paths : of the trace's states, at least so deep
    part  : (S,) of each sequence
    most  : M, nodes that there can be
    """

    def __init__(self, trace: RankTrace, paths: Paths, depth: int, part: IntArray, most: int) -> None:
        self.paths, shorter = paths.cut(depth)
        self.most, self.parts = most, int(part.max()) + 1
        first = _firsts(trace, paths.of, self.paths.hits[shorter], depth)
        sequence = np.searchsorted(trace.starts, first, side="right") - 1
        lengths = np.minimum(np.append(first[1:], len(paths.of)), trace.starts[sequence + 1] - 1) - first
        self.states = int(lengths.sum())
        self.part = part[sequence].astype(np.int32)
        self.conversation = trace.clusters[sequence].astype(np.int32)
        self.conversations = trace.num_conversations
        self._goes_on = np.flatnonzero(sequence[1:] == sequence[:-1])  # segments that another one follows
        order, shorter = (np.argsort(-lengths, kind="stable"), narrow(shorter, len(shorter)))
        self.blocks: list[SegmentBlock] = []
        while len(order):
            some = max(1, AT_ONCE // int(lengths[order[0]]))
            self.blocks.append(_block(order[:some], lengths, first, paths.of, shorter))
            order = order[some:]

    def alone(self) -> WalkState:
        ranks, cells, segments = self.paths.ranks, (self.parts, self.most, self.paths.top + 2), len(self.part)
        counts, inside, saved = np.zeros((3, *cells), dtype=np.int64)
        steps, leaving, ahead = np.zeros((3, segments), dtype=np.int32)
        accepted, cell = np.zeros(len(ranks), dtype=np.uint16), ranks[:, 0].astype(np.int32)
        found = WalkState({(): 0}, accepted, cell, counts, inside, saved, steps, leaving, ahead)
        self._decode([found], [slice(0, len(ranks))])
        return found

    def added(self, changes: Sequence[tuple[WalkState, Choice]]) -> list[WalkState]:
        """Decoding with each of some trees and one node more, whose parent it has."""
        found, changed = [], []
        for before, path in changes:
            tree = replace(before, **{name: getattr(before, name).copy() for name in ARRAYS})
            here, number = self.paths.beginning_with(path), len(tree.nodes)
            tree.accepted[here] = len(path)
            tree.cell[here] = number * (self.paths.top + 2) + self.paths.ranks[here, len(path)]
            found.append(replace(tree, nodes={**tree.nodes, path: number}))
            changed.append(here)
        self._decode(found, changed, [before for before, _ in changes])
        return found

    def steps(self, decoded: WalkState) -> IntArray:
        """(C,) of every conversation."""
        return np.bincount(self.conversation, decoded.steps, self.conversations).astype(np.int64)

    def _decode(self, trees: list[WalkState], changed: Sequence[slice], before: Sequence[WalkState] = ()) -> None:
        """Decode the segments with a changed path, and put what is visited now in the place of what was ``before``.

        Where they have more than half of all states, all segments are decoded, with the new tree alone.
        """
        places = [[block.with_paths(which) for block in self.blocks] for which in changed]
        states = [sum(int(b.lengths[some].sum()) for b, some in zip(self.blocks, each, strict=True)) for each in places]
        whole = [2 * some > self.states for some in states]
        for i, tree in enumerate(trees):
            if whole[i]:
                places[i] = [np.arange(len(block.segments)) for block in self.blocks]
                tree.counts[:], tree.inside[:] = 0, 0
        jobs = [(i, tree, 1) for i, tree in enumerate(trees)]
        jobs += [(i, tree, -1) for i, tree in enumerate(before) if not whole[i]]
        for b, block in enumerate(self.blocks):
            self._decode_block(
                block, [(trees[i], tree, sign, places[i][b]) for i, tree, sign in jobs if len(places[i][b])]
            )
        for tree in trees:
            key = self.part[self._goes_on] * np.int64(tree.counts[0].size) + tree.cell[tree.leaving[self._goes_on]]
            more = np.bincount(key, tree.ahead[self._goes_on + 1], minlength=tree.counts.size)
            tree.saved[:] = tree.inside + more.astype(np.int64).reshape(tree.saved.shape)

    def _decode_block(self, block: SegmentBlock, jobs: list[tuple[WalkState, WalkState, int, IntArray]]) -> None:
        """Segments of a block: each job is for a tree to change, with a tree, added or taken away, in some places."""
        if not jobs:
            return
        which = np.repeat(np.arange(len(jobs), dtype=np.int32), [len(places) for *_, places in jobs])
        places = np.concatenate([places for *_, places in jobs])
        order = np.argsort(places, kind="stable") if len(jobs) > 1 else np.arange(len(places))
        counts, inside, *by_segment = self._visited(block, places[order], which[order], [job[1] for job in jobs])
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        end = 0
        for i, (tree, _, sign, some) in enumerate(jobs):
            begin, end = end, end + len(some)
            mine, segments = rank[begin:end], block.segments[some]
            tree.counts[:] += sign * counts[i]
            tree.inside[:] += sign * inside[i]
            if sign > 0:
                for name, values in zip(("steps", "leaving", "ahead"), by_segment, strict=True):
                    getattr(tree, name)[segments] = values[mine]

    def _visited(
        self, block: SegmentBlock, places: IntArray, which: NDArray[np.int32], trees: list[WalkState]
    ) -> tuple[NDArray[Any], ...]:
        """Decode n segments of a block, each with one of m trees.

        places, which : (n,) of each its place in the block, ascending, and its tree

        Returns (m, F, M, R + 2) counts and inside, and (n,) steps, leaving and ahead, all as of `WalkState`. Steps to the
        end are worked out backwards, a row of states of all segments at once; then all go forwards.
        """
        n, lengths = len(places), block.lengths[places]
        height, ends = int(lengths.max()), n - np.bincount(lengths).cumsum()  # how many are longer than 0, 1, ...
        size, at = n * (height + self.paths.depth + 2), np.arange(n)
        to_go: NDArray[Any] = np.zeros(size, np.int16 if height < 2**15 else np.int32)  # row by row, as all others
        ahead, jump = np.empty(n * height, dtype=to_go.dtype), np.empty(n * height, dtype=np.uint16)
        path = np.empty(n * height, dtype=np.int32)
        offset = which * np.int32(len(self.paths.ranks))
        accepted = np.concatenate([tree.accepted for tree in trees])
        for t in range(height - 1, -1, -1):
            k = ends[t]
            row = slice(t * n, t * n + k)
            of = np.add(block.paths[block.rows[t] :].take(places[:k]), offset[:k], out=path[row])
            then = np.multiply(accepted.take(of, out=jump[row], mode="clip"), n, dtype=np.int64)
            then += at[:k]
            steps = to_go[(t + 1) * n :].take(then)
            np.subtract(steps, to_go[(t + 2) * n :].take(then), out=ahead[row])
            np.add(steps, 1, out=to_go[row])
        visits, segment = _forwards(jump, ends, n, self.paths.depth)
        of = path.take(visits)
        last = np.flatnonzero(visits // n + jump.take(visits) + 1 >= lengths.take(segment))
        leaving = np.zeros(n, dtype=np.int32)
        leaving[segment[last]] = of[last] % len(self.paths.ranks)
        cells = self.most * (self.paths.top + 2)
        group = which * np.int32(self.parts) + self.part[block.segments[places]]
        key = group.take(segment) * np.int64(cells) + np.concatenate([tree.cell for tree in trees]).take(of)
        shape = (len(trees), self.parts, self.most, self.paths.top + 2)
        counts = np.bincount(key, minlength=math.prod(shape)).reshape(shape)
        inside = np.bincount(key, ahead.take(visits), minlength=math.prod(shape)).astype(np.int64).reshape(shape)
        return counts, inside, to_go[:n], leaving, to_go[:n] - to_go[n : 2 * n]


def _forwards(jump: NDArray[np.uint16], ends: IntArray, n: int, depth: int) -> tuple[IntArray, IntArray]:
    """The states that decoding visits from the first row on, and the segment of each.

    jump : guesses accepted at each state of n segments, at most ``depth``; row by row, ``ends`` of them in each row and
        after these anything
    """
    seen = np.zeros(len(jump) + n * (1 + depth), dtype=bool)
    seen[:n] = True
    segments, counts = [], []
    for t, k in enumerate(ends[:-1].tolist()):
        (segment,) = seen[t * n : t * n + k].nonzero()
        seen[np.multiply(jump[t * n :].take(segment), n, dtype=np.int64) + segment + (t + 1) * n] = True
        segments.append(segment)
        counts.append(len(segment))
    segment = np.concatenate(segments)
    return segment + np.repeat(np.arange(len(counts)) * n, counts), segment


def _firsts(trace: RankTrace, of: NDArray[np.int32], hits: NDArray[np.uint16], depth: int) -> IntArray:
    """(G,) where the segments of all sequences begin.

    hits : (N,) right ranks of each path

    No step is taken at a sequence's last state, which is in no segment.
    """
    crossed = np.zeros(len(of), dtype=bool)
    for here in portions(len(of)):
        right = hits[of[here]]
        for k in range(1, depth + 1):  # from k states before
            begin, end = here.start + k, min(here.stop + k, len(of))
            crossed[begin:end] |= right[: max(end - begin, 0)] >= k
    crossed[trace.starts[:-1]] = False
    crossed[trace.starts[1:] - 1] = True
    return np.flatnonzero(~crossed)


def _block(
    segments: IntArray, lengths: IntArray, first: IntArray, of: NDArray[np.int32], shorter: NDArray[Any]
) -> SegmentBlock:
    """Some segments, the longest first, with the paths of their states."""
    own, begin = lengths[segments], first[segments]
    ends = len(own) - np.bincount(own, minlength=int(own.max()) + 1).cumsum()[:-1]
    rows = np.append(0, ends.cumsum())
    paths = np.empty(rows[-1], dtype=shorter.dtype)
    for t, (low, high) in enumerate(pairwise(rows.tolist())):
        paths[low:high] = shorter[of[begin[: high - low] + t]]
    return SegmentBlock(segments, own, rows, paths)
