"""The record of a probing run: its file, what it refuses, and parts of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from treeopt.errors import InvalidInput
from treeopt.growth.probed import probe_tree
from treeopt.records.calibration import Calibration
from treeopt.records.inputs import load_result
from treeopt.records.probe import FORMS, Probe
from treeopt.trees.shapes import sibling_closed
from treeopt.trees.tree import Tree

from .conftest import random_trace
from .test_coverage import probes, random_probe, replay_probe

TREE = Tree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2], [3], [4]])


@pytest.fixture
def probe():
    return random_probe(np.random.default_rng(1), TREE, 60, policy=Tree.chain(2))


def same(one: Probe, other: Probe) -> bool:
    arrays = ("accepted", "ends", *FORMS)
    return (one.tree, one.policy, one.meta) == (other.tree, other.policy, other.meta) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


@given(probes())
def test_a_probe_survives_its_file(tmp_path_factory, probe):
    path = tmp_path_factory.mktemp("probe") / "probe.npz"
    probe.save(path)
    assert same(Probe.load(path), probe)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["accepted"].nbytes <= probe.accepted.size / 8 + len(probe.accepted)


def test_a_probe_without_steps_survives_its_file(tmp_path, probe):
    """Answers of one token have none."""
    empty = probe.select(np.flatnonzero(np.diff(probe.starts) == 0))
    assert len(empty.accepted) == 0
    empty.save(tmp_path / "probe.npz")
    assert same(Probe.load(tmp_path / "probe.npz"), empty)
    assert replay_probe(empty, TREE).tokens_per_step == 1.0


@given(probes())
def test_sequences_can_be_taken_apart_and_put_together(probe):
    n = probe.num_sequences
    assert same(probe.select(np.arange(n)), probe)
    order = np.random.default_rng(0).permutation(n)
    back = probe.select(order).select(np.argsort(order))
    assert same(back, probe)
    parts = [replay_probe(probe.select(np.array([s])), probe.tree).tokens[0] for s in range(n)]
    assert parts == replay_probe(probe, probe.tree).tokens.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"starts": [*p.starts[:-1], 9]}, "rise from 0 to the number of steps"),
        (lambda p: {"starts": p.starts[::-1]}, "rise from 0"),
        (lambda p: {"lengths": p.lengths[1:]}, "lengths must have"),
        (lambda p: {"group": p.group[1:]}, "group must have"),
        (lambda p: {"accepted": p.accepted[:, 1:]}, "along nodes"),
        (lambda p: {"accepted": ~p.accepted}, "only where its parent is"),
        (lambda p: {"ends": ~p.accepted}, "Only an accepted guess"),
        (lambda p: {"ends": p.accepted}, "Only an accepted guess"),
        (lambda p: {"log_likelihood": p.log_likelihood[1:]}, "one for each accepted node"),
        (lambda p: {"log_likelihood": -p.log_likelihood + 1}, "at most 0"),
        (lambda p: {"log_likelihood": p.log_likelihood * np.nan}, "at most 0"),
        (lambda p: {"policy": Tree.chain(4)}, "every node of the policy"),
        (lambda p: {"tree": Tree.from_choices([])}, "nodes, but have"),
    ],
)
def test_bad_probes_are_refused_by_rule(probe, change, message):
    with pytest.raises(InvalidInput, match=message):
        replace(probe, **change(probe))


def rewrite(path, **changes):
    """Change arrays of a file, or with None take them out."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": None}, "must hold the array 'accepted'"),
        ({"meta": None}, "must hold the array 'meta'"),
        ({"meta": np.array("{")}, "cut off"),
        ({"meta": np.array('{"schema": "treeopt.trace/1"}')}, "schema treeopt.probe/1"),
        ({"meta": np.array(json.dumps({"tree": TREE.choices}))}, "paths of tree and policy"),
        ({"meta": np.array(json.dumps({"tree": [[1, 0]], "policy": []}))}, "needs its parent"),
        ({"meta": np.array(json.dumps({"tree": [["a"]], "policy": []}))}, "non-empty list of ranks"),
        ({"ends": np.zeros((60, 3), np.uint8)}, "bytes per step"),
    ],
)
def test_bad_files_are_refused_by_rule(tmp_path, probe, changes, message):
    path = tmp_path / "probe.npz"
    probe.save(path)
    rewrite(path, **changes)
    with pytest.raises(InvalidInput, match=message):
        Probe.load(path)


def test_a_probe_is_told_from_a_trace(tmp_path, probe):
    for record in (probe, random_trace(np.random.default_rng(0), [9, 9], 2, 3)):
        record.save(tmp_path / "x.npz")
        assert type(load_result(tmp_path / "x.npz")) is type(record)


@pytest.mark.parametrize("size", [2, 40, 256])
def test_a_probe_tree_has_the_size_the_policy_and_no_gaps(size):
    trace = random_trace(np.random.default_rng(0), [40] * 30, 3, 10)
    calibration = Calibration.from_trace(trace)
    policy = Tree.from_choices([[0], [1], [2], [3], [4], [5], [5, 0], [5, 0, 0]])
    tree = probe_tree(calibration, size=size)
    assert len(tree) == size
    assert sibling_closed(tree)
    joined = probe_tree(calibration, size=size, policy=policy)
    assert set(joined.paths) == set(tree.paths) | set(policy.paths)


def test_guesses_that_come_before_the_truth_are_probed_too():
    """The truth is always at rank 1 here, and what the drafter puts before it may pass as well."""
    calibration = Calibration(np.array([[0, 10, 0], [0, 10, 0]]), np.array([10, 10]))
    assert probe_tree(calibration, size=7) == Tree.dense([2, 2])
