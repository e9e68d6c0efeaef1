"""Every array of every .npz file has the type and the shape that its table says, or one sentence says what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from treeopt.errors import InvalidInput
from treeopt.records import probe, requestlog, trace
from treeopt.records.probe import Probe
from treeopt.records.requestlog import RequestLog
from treeopt.records.trace import RankTrace
from treeopt.runtime.training import opening
from treeopt.trees.tree import Tree

from .test_coverage import random_probe
from .test_ddtree import recorded
from .test_dynamic import with_pools


def whole_trace() -> RankTrace:
    """Two answers of 4 tokens, with all arrays that a trace can have."""
    pools = with_pools(np.random.default_rng(0), [4, 4], 2, (1, 2))
    marginals, _ = recorded(0, [4, 4], (2,), depth=2)
    each = np.array([1, 2])
    return replace(
        pools,
        tokens=np.arange(8),
        prompt_tokens=each,
        end=0 * each,
        group=0 * each,
        cluster=each,
        target_rank=np.arange(8),
        marginal_places=marginals.marginal_places,
        meta={**pools.meta, **marginals.meta, "group_names": ["all"]},
    )


def whole_probe() -> Probe:
    few = random_probe(np.random.default_rng(1), Tree.dense([2, 2]), 20)
    return replace(few, end=np.zeros(few.num_sequences), cluster=np.arange(few.num_sequences))


def whole_log() -> RequestLog:
    """Two requests of 4 tokens, with all arrays that a log can have."""
    each = np.array([1, 2])
    about = {"group": 0 * each, "cluster": each, "limit": each}
    return RequestLog(np.arange(8), np.array([0, 4, 8]), each, **about, meta={"group_names": ["all"]})


RECORDS = {"trace": whole_trace, "probe": whole_probe, "requests": whole_log}
ARRAYS = [("trace", name) for name in trace.FORMS] + [("requests", name) for name in requestlog.FORMS]
ARRAYS += [("probe", name) for name in (*probe.FORMS, *probe.BITS)]
CHANGES = {
    "without axes": lambda array: array.reshape(-1)[0],
    "an axis more": lambda array: array[..., None],
    "an axis more in front": lambda array: array[None],
    "an entry less": lambda array: array[:-1],
    "texts": lambda array: array.astype("U5"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("record", "name"), ARRAYS)
def test_an_array_of_another_form_is_one_sentence(tmp_path, record, name, change):
    whole, path = RECORDS[record](), tmp_path / "x.npz"
    whole.save(path)
    type(whole).load(path)
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    np.savez(path, **{**arrays, name: CHANGES[change](arrays[name])})
    with pytest.raises(InvalidInput, match=r"x\.npz is not a .* must "):
        type(whole).load(path)


@pytest.mark.parametrize("name", opening.ANSWERS)
def test_an_answer_to_learn_from_of_another_form_is_refused(tmp_path, name):
    arrays = {key: np.zeros(2 + ("+1" in form.axes), form.kind) for key, form in opening.ANSWERS.items()}
    np.savez(tmp_path / "x.npz", **{**arrays, name: arrays[name][:, None]})
    with pytest.raises(InvalidInput, match=name):
        list(opening._read_block(tmp_path / "x.npz", [], 9))
