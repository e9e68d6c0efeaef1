"""What a trace keeps of pools: kept by its file, by selection and by joining, and refused where it contradicts itself."""

import json
import re

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.growth.replay import steps_by_place
from treeopt.records.pools import Counts
from treeopt.records.trace import RankTrace
from treeopt.trees.draft import MOST_LEVELS, MOST_TOPK

from .test_dynamic import with_pools

LENGTHS, LEVELS, TOPKS = [4, 1, 9, 3], 3, (1, 2, 4)
POOLS = {"levels": LEVELS, "topks": list(TOPKS)}


def trace_with(seed=0, lengths=LENGTHS) -> RankTrace:
    return with_pools(np.random.default_rng(seed), lengths, LEVELS, TOPKS)


def same(one: RankTrace, other: RankTrace) -> bool:
    assert one.pools is not None
    assert other.pools is not None
    arrays = ("ranks", "starts", "pool_places")
    assert (one.pools.levels, one.pools.topks) == (other.pools.levels, other.pools.topks)
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


def test_pools_survive_their_file_and_selection_and_joining(tmp_path):
    trace, more = trace_with(), trace_with(1, [2, 8])
    trace.save(tmp_path / "t.npz")
    loaded = RankTrace.load(tmp_path / "t.npz")
    assert same(loaded, trace)
    with np.load(tmp_path / "t.npz") as file:
        assert file["pool_places"].dtype == np.uint8
    whole = RankTrace.concatenate([trace, more], {"pools": POOLS})
    assert whole.num_sequences == 6
    assert same(whole.select(np.arange(4)), trace)
    assert same(whole.select(np.array([4, 5])), more)
    picked = whole.select(np.array([5, 0, 2]))
    steps, picked_steps = (steps_by_place(trace, trace.pools.places_in(3, 4), [2, 5, 16]) for trace in (whole, picked))
    assert (picked_steps == steps[:, [5, 0, 2]]).all()


def test_a_trace_without_pools_loads_and_has_none(tmp_path):
    trace = trace_with()
    RankTrace(trace.ranks, trace.starts, meta={"pools": POOLS}).save(tmp_path / "t.npz")
    assert RankTrace.load(tmp_path / "t.npz").pools is None
    bare = RankTrace(trace.ranks, trace.starts)
    assert RankTrace.concatenate([trace, bare], {"pools": POOLS}).pools is None
    assert Counts().record == {"top_k": 32}
    assert Counts(levels=3, topks=TOPKS).record["pools"] == POOLS


def of(*place, dtype=np.uint8):
    """Keep a part of the places, as another type."""
    return lambda arrays: arrays.update(pool_places=arrays["pool_places"][place].astype(dtype))


def moved(by):
    """Add a number to the places, as numbers of more bits."""
    return lambda arrays: arrays.update(pool_places=arrays["pool_places"].astype(np.int64) + by)


def says(**pools):
    """Have the file's meta say this of its pools."""
    return lambda arrays: arrays.update(meta=np.array(json.dumps({"pools": POOLS | pools})))


DAMAGES = {
    "no meta": (lambda a: a.pop("meta"), "must have the levels and topks of the pools, but has none"),
    "meta of a list": (lambda a: a.update(meta=np.array('{"pools": [3, [1]]}')), "at pools"),
    "a state less of places": (of(slice(1, None)), "pool_places must have 17 entries"),
    "a column less of places": (of(..., slice(1, None)), r"places of the pools must be \(17, 3, 6\)"),
    "places with a point": (of(..., dtype=float), "pool_places must be whole numbers"),
    "places beyond bytes": (of(..., dtype=np.int64), None),
    "places below bytes": (moved(-256), "pool_places must fit into uint8"),
    "places above bytes": (moved(256), "pool_places must fit into uint8"),
    "other levels": (says(levels=2), "places of the pools must be"),
    "no levels": (says(levels=0), r"at pools\.levels"),
    "levels with a point": (says(levels=3.5), r"at pools\.levels"),
    "too many levels": (says(levels=9), r"at pools\.levels"),
    "no topk": (says(topks=[]), r"at pools\.topks"),
    "other topks": (says(topks=[1, 2]), "places of the pools must be"),
    "topk none": (says(topks=[0, 1, 2]), r"at pools\.topks\.0"),
    "topks of a text": (says(topks="124"), r"at pools\.topks"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_pools_are_refused_in_plain_words(tmp_path, damage):
    change, message = DAMAGES[damage]
    file = tmp_path / "t.npz"
    trace_with().save(file)
    with np.load(file) as saved:
        arrays = dict(saved)
    change(arrays)
    np.savez(file, **arrays)
    if message is None:
        assert same(RankTrace.load(file), trace_with())
        return
    with pytest.raises(InvalidInput, match=message) as refused:
        RankTrace.load(file)
    assert str(file) in str(refused.value)
    assert len(str(refused.value)) < 400
    assert re.search(r"[.)]$", str(refused.value))


def test_every_pool_that_can_be_recorded_is_taken():
    rng = np.random.default_rng(4)
    for levels in (1, MOST_LEVELS):
        for topks in ((1,), (MOST_TOPK,), tuple(range(1, MOST_TOPK + 1))):
            pools = with_pools(rng, [12], levels, topks).pools
            assert all(pools.places_in(levels, topk).shape == (12, levels) for topk in topks)
