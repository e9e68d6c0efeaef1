"""Dynamic trees: chosen as the engines choose them, decoded without loss, and replayed exactly."""

import numpy as np
import pytest

from treeopt.growth.adaptive import fit_rule
from treeopt.growth.dynamic import lengths_with
from treeopt.growth.replay import replay_dynamic, replay_lengths
from treeopt.runtime.decode import Setup, decode
from treeopt.runtime.measure.ranks import Counts, rank_answers
from treeopt.runtime.stop import StopRule
from treeopt.trees.dynamic import AdaptiveTree, DynamicTree

from .conftest import random_prompts
from .test_drafters import MAKERS, READ, RULES, answers_of

SETTINGS = [DynamicTree(*numbers) for numbers in ((1, 3, 3), (2, 2, 4), (3, 1, 4), (3, 2, 8), (4, 4, 16), (4, 3, 9))]


KINDS = [kind for kind in MAKERS if kind != "ngram"]


@pytest.fixture(scope="module", params=KINDS)
def drafter(request, target):
    target.read_layers(READ.get(request.param, ()))
    yield MAKERS[request.param](target, answers_of(target, random_prompts(99, most=12)))
    target.read_layers(())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.record["rule"])
def test_decoding_with_dynamic_trees_is_plain_decoding_and_is_replayed(target, drafter, rule):
    setup, accepted = Setup(target, drafter, StopRule(target.eos_ids, 30), rule), 0
    prompts = random_prompts(5)
    plain = decode(target, None, prompts, batch_size=3, stop=setup.stop, acceptance=rule)
    counts = Counts(top_k=4, levels=4, topks=(1, 2, 3, 4))
    trace = rank_answers(setup, prompts, [row.tokens for row in plain], batch_size=4, counts=counts)
    for tree in SETTINGS:
        rows = decode(target, drafter, prompts, tree, batch_size=2, stop=setup.stop, acceptance=rule)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
        replayed = replay_dynamic(trace, tree.levels, tree.topk, [tree.rows])[0]
        assert replayed.tolist() == [row.steps for row in rows], tree
        accepted += sum(sum(row.accepted) for row in rows)
    assert accepted > 0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.record["rule"])
def test_decoding_with_adaptive_trees_is_plain_decoding_and_is_replayed(target, drafter, rule):
    setup = Setup(target, drafter, StopRule(target.eos_ids, 30), rule)
    prompts = random_prompts(6)
    plain = decode(target, None, prompts, batch_size=3, stop=setup.stop, acceptance=rule)
    counts = Counts(top_k=4, levels=4, topks=(3,))
    trace = rank_answers(setup, prompts, [row.tokens for row in plain], batch_size=4, counts=counts)
    choices, cost_ms = (4, 7, 13, 20), np.array([2.0, 2.1, 2.25, 2.4])
    fitted = fit_rule(trace, choices, 3, 3, cost_ms, batch_size=1)
    fit = fitted.promise.intercepts, fitted.promise.slopes
    tree = AdaptiveTree(DynamicTree(3, 3, 20), choices, *fit, tuple(cost_ms.tolist()), fitted.rate)
    rows = decode(target, drafter, prompts, tree, batch_size=1, stop=setup.stop, acceptance=rule)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    replayed = replay_lengths(trace, lengths_with(trace, tree))
    assert replayed.steps.tolist() == [row.steps for row in rows]
    together = decode(target, drafter, prompts, tree, batch_size=3, stop=setup.stop, acceptance=rule)
    assert [row.tokens for row in together] == [row.tokens for row in plain]
