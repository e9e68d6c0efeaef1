"""Samples of conversations, and large files."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.growth.grow import grow
from treeopt.growth.source import source_of
from treeopt.records.profile import LatencyProfile, StepTiming
from treeopt.records.trace import RankTrace
from treeopt.trees.shapes import Limits

from .conftest import random_trace

ROWS = (2, 4, 8, 16)


def profile(depths: int) -> LatencyProfile:
    """Steps with noise, so that intervals have something to say."""
    rng = np.random.default_rng(0)
    points = tuple(
        StepTiming(1, 64, n, d, tuple((4 + 0.1 * n + 0.1 * d) * rng.normal(1, 0.02, 5)))
        for n in ROWS
        for d in range(1, depths + 1)
        if d < n
    )
    return LatencyProfile(points, (StepTiming(1, 64, 1, 0, (3.9, 4.0, 4.1)),))


def runs_trace(seed: int, sequences: int, heads: int, *, turns: bool) -> RankTrace:
    """Easy and hard runs, so that decoding jumps; several turns of a conversation; short answers among long ones."""
    rng = np.random.default_rng(seed)
    trace = random_trace(rng, rng.choice([1, 2, 3, 40, 120], sequences), heads, 12)
    ease = np.repeat(rng.random(len(trace.ranks) // 5 + 1) < 0.6, 5)[: len(trace.ranks), None]
    ranks = np.where(ease & (trace.ranks > 1) & (rng.random(trace.ranks.shape) < 0.8), 0, trace.ranks)
    cluster = np.sort(rng.integers(0, sequences // 2, sequences)) if turns else None
    return replace(trace, ranks=ranks, cluster=cluster)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A trace in a file that is not compressed."""
    trace = runs_trace(5, 60, 4, turns=True)
    monkeypatch.setattr(npz, "LARGE_BYTES", trace.ranks.nbytes)
    trace.save(tmp_path / "trace.npz")
    return trace, tmp_path / "trace.npz"


def test_large_arrays_are_not_compressed_and_the_same(large):
    trace, file = large
    read = RankTrace.load(file)
    assert trace.ranks.tobytes() in file.read_bytes()
    assert not read.ranks.flags.writeable
    assert (read.ranks == trace.ranks).all()
    with np.load(file) as archive:  # and any reader of the format has them
        assert (archive["ranks"] == trace.ranks).all()
    first = file.read_bytes()
    read.save(file)
    assert file.read_bytes() == first


def test_a_large_file_that_is_damaged_or_cut_is_refused_at_every_place(large):
    _, file = large
    data = file.read_bytes()
    with np.load(file) as archive:
        ranks = archive["ranks"].tobytes()
    begin = data.index(ranks)
    for place in (begin, begin + len(ranks) // 2, begin + len(ranks) - 1):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(InvalidInput, match="was it cut off"):
            RankTrace.load(file)
    for length in (begin, begin + len(ranks) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(InvalidInput):
            RankTrace.load(file)


def test_the_error_of_a_sample_is_as_much_wider_as_is_said():
    """Of many conversations alike, so that the square root holds to a few percent (2000 draws: 1.6 % each)."""
    trace = runs_trace(7, 900, 3, turns=False)
    tree, few = grow(trace, Limits(6)).tree(6), trace.select(np.arange(0, 900, 9))
    errors = [source_of(one).rates(tree).estimate.stderr for one in (trace, few)]
    assert errors[1] / errors[0] == pytest.approx(3.0, rel=0.25)
