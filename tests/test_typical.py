"""Typical acceptance: the rule, decoding by it, probing, and what the text loses."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.probed import AcceptedNodes
from treeopt.records.contender import Prompt
from treeopt.records.probe import Probe
from treeopt.records.trace import End
from treeopt.runtime.acceptance import rules
from treeopt.runtime.acceptance.rules import Greedy, Typical
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.protocol import top_candidates
from treeopt.runtime.measure.probe import collect_probe, ends_of
from treeopt.runtime.measure.quality import measure_quality
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, VOCABULARY, trees
from .test_coverage import replay_probe
from .test_trace import sequence_end

RULE = Typical(temperature=3.0, epsilon=0.02)  # loose: the tiny model's random heads are rarely right
TREE = Tree.dense([6, 4, 2])
POLICY = Tree.from_choices([[0], [1], [2], [0, 0], [1, 0], [1, 1], [0, 0, 0]])


def prompts_of(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(6, VOCABULARY, rng.integers(2, 12)).tolist() for _ in range(n)]


def slow_verdict(rule: Typical, tree: Tree, tokens, logits) -> tuple[list[bool], list[float], float]:
    """Node by node in float64; last how close the nearest call was."""
    accepted, likelihood, margin = [True], [0.0], math.inf
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        scaled = logits[parent].astype(np.float64) / rule.temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        bound = min(rule.epsilon, rule.record["delta"] * math.exp(-entropy))
        chance = p[tokens[node]] if tokens[node] >= 0 else 0.0
        margin = min(margin, abs(chance / bound - 1))
        accepted.append(bool(accepted[parent] and chance > bound))
        likelihood.append(likelihood[parent] + math.log(max(chance, 1e-300)))
    return accepted, likelihood, margin


@given(trees(), st.floats(0.2, 4), st.floats(0.01, 0.9), st.floats(0.05, 2), st.integers(0, 2**32))
def test_the_rule_is_medusas(tree, temperature, epsilon, delta, seed):
    rng = np.random.default_rng(seed)
    rule = Typical(temperature, epsilon, delta)
    tokens = rng.integers(-1, 9, (2, len(tree)))
    logits = rng.normal(0, 2, (2, len(tree), 9)).astype(np.float32)
    assume(len(tree) > 1)
    accepted, likelihood = rule.judge(tree, tokens, torch.tensor(logits))
    last = rule.accept(tree, tokens.tolist(), [], torch.tensor(logits))
    for row in range(2):
        want, paths, margin = slow_verdict(rule, tree, tokens[row], logits[row])
        assume(margin > 1e-4)
        assert accepted[row].tolist() == want
        nodes = [node for node, passed in enumerate(want) if passed]
        assert likelihood[row, nodes] == pytest.approx([paths[node] for node in nodes], abs=1e-4)
        deepest = max(int(tree.depths[node]) for node in nodes)
        assert deepest == tree.depths[last[row]]
        longest_ones = [paths[node] for node in nodes if tree.depths[node] == deepest]
        assert paths[last[row]] == pytest.approx(max(longest_ones), abs=1e-4)


def test_equally_likely_paths_go_by_their_order():
    """Two siblings of equal logits, and the same guess twice."""
    tree = Tree.from_choices([[0], [1], [2]])
    logits = torch.tensor([[[0.0, 1.0, 1.0]] * 4])
    for tokens, want in (([9, 2, 1, 0], 1), ([9, 0, 2, 1], 2), ([9, 1, 1, 1], 1), ([9, 0, 0, 0], 0)):
        assert Typical(1.0, 0.3).accept(tree, [tokens], [], logits) == [want]


def test_tokens_that_the_target_rules_out_leave_the_entropy_finite():
    logits = torch.tensor([[[0.0, -math.inf, 0.0]] * 3])
    accepted, _ = Typical(1.0, 0.4).judge(Tree.chain(2), np.array([[0, 2, 1]]), logits)
    assert accepted.tolist() == [[True, True, False]]


def test_the_verdict_does_not_depend_on_how_many_rows_are_taken_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    tokens, logits = rng.integers(0, 9, (3, len(TREE))), torch.tensor(rng.normal(size=(3, len(TREE), 9)))
    accepted, likelihood = RULE.judge(TREE, tokens, logits)
    monkeypatch.setattr(rules, "rows_at_once", lambda vocab_size: 4)
    again, same = RULE.judge(TREE, tokens, logits)
    assert (again == accepted).all()
    assert same.tolist() == likelihood.tolist()


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"epsilon": 0}, {"epsilon": 1}, {"delta": 0}, {"temperature": math.nan}]
)
def test_rules_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidInput, match=f"{next(iter(options))} must be"):
        Typical(**options)


def slow_answer(target, heads, prompt, tree, rule, stop) -> list[int]:
    """Decode by the definition: a whole forward without a cache for every path of every step."""

    def forward(tokens):
        with torch.no_grad():
            hidden = target.decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]
            return hidden, target.lm_head(hidden)

    hidden, logits = forward(prompt)
    text = [int(logits[-1].argmax())]
    while sequence_end(text, stop)[1] is End.LIMIT and len(text) < stop.max_new_tokens:
        # Heads guess from the state before the root.
        candidates = [top_candidates(heads.logits(hidden[-1:], k), 10)[0].tolist() for k in range(tree.depth)]
        guesses = [text[-1], *(candidates[len(path) - 1][path[-1]] for path in tree.paths[1:])]
        after, states = [], []
        for path in tree.paths:
            route = [candidates[d][rank] for d, rank in enumerate(path)]
            states.append(forward([*prompt, *text, *route]))
            after.append(states[-1][1][-1])
        accepted, likelihood, _ = slow_verdict(rule, tree, guesses, torch.stack(after).numpy())
        best = max((len(p), likelihood[i], -i) for i, p in enumerate(tree.paths) if accepted[i])
        winner = -best[2]
        route = [candidates[d][rank] for d, rank in enumerate(tree.paths[winner])]
        text += [*route, int(after[winner].argmax())]
        text = text[: sequence_end(text, stop)[0]][: stop.max_new_tokens]
        hidden = states[winner][0]
    return text


def test_decoding_by_the_rule_is_what_the_definition_says(target, heads):
    """The tree decoder with its cache and batches, against whole forwards; some texts differ from greedy ones."""
    prompts, stop, tree = prompts_of(4), StopRule(target.eos_ids, 10), Tree.dense([3, 2])
    rows = decode(target, heads, prompts, tree, batch_size=4, stop=stop, acceptance=RULE)
    greedy = decode(target, heads, prompts, batch_size=4, stop=stop, acceptance=Greedy())
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.tokens == slow_answer(target, heads, prompt, tree, RULE, stop)
    assert any(row.tokens != other.tokens for row, other in zip(rows, greedy, strict=True))
    assert max(max(row.accepted, default=0) for row in rows) > 1


def probed(target, heads, prompts, policy, *, most=30, batch_size=5, **options) -> Probe:
    asked = [Prompt(tuple(p), f"{i:064}", f"group {i % 2}", i // 2) for i, p in enumerate(prompts)]
    setup = Setup(target, heads, StopRule(target.eos_ids, most), RULE)
    return collect_probe(setup, asked, tree=TREE, policy=policy, batch_size=batch_size, **options)


@pytest.fixture(scope="module")
def prompts():
    """Answers that end for every reason: one falls into a loop, some are cut by the context."""
    rng, drawn = np.random.default_rng(1), prompts_of(85, 1)
    return [*drawn[:9], drawn[84], *(rng.integers(6, VOCABULARY, CONTEXT - k).tolist() for k in (1, 2, 4, 9))]


@pytest.fixture(scope="module")
def probe(target, heads, prompts):
    return probed(target, heads, prompts, POLICY)


def test_replaying_the_policy_gives_exactly_what_was_emitted(target, heads, prompts, probe):
    """Whatever ended the answers; and probing changes nothing of what decoding with the policy alone does."""
    assert replay_probe(probe, POLICY).tokens.tolist() == (probe.lengths - 1).tolist()
    assert set(probe.end.tolist()) == set(End)
    rows = decode(target, heads, prompts, POLICY, batch_size=3, stop=StopRule(target.eos_ids, 30), acceptance=RULE)
    assert probe.lengths.tolist() == [len(row.tokens) for row in rows]
    assert np.diff(probe.starts).tolist() == [row.steps for row in rows]
    assert probe.end.tolist() == [row.end for row in rows]
    accepted = AcceptedNodes.of(probe)
    winner = accepted.winners(probe, ())
    accepted.add(winner, [TREE.paths.index(path) for path in POLICY.paths])
    assert accepted.guesses[winner].tolist() == [guesses for row in rows for guesses in row.accepted]
    assert (probe.first_end > 0).any()


def test_any_tree_is_scored_as_decoding_goes_where_its_step_begins_alike(target, heads, prompts, probe):
    """The first step of an answer begins at the same state whatever the tree."""
    some = np.flatnonzero(np.diff(probe.starts) > 0)
    first = probe.starts[some]
    likelihood = np.zeros(probe.accepted.shape, np.float32)
    likelihood[:, 1:][probe.accepted[:, 1:]] = probe.log_likelihood
    accepted = probe.accepted[first]
    likely, starts = likelihood[first][:, 1:][accepted[:, 1:]], np.arange(len(some) + 1)
    firsts = Probe(TREE, POLICY, accepted, probe.ends[first], likely, starts, np.zeros(len(some)))
    for tree in (TREE, Tree.from_choices([[0], [3], [3, 1], [5]])):
        rows = decode(target, heads, prompts, tree, batch_size=8, stop=StopRule(target.eos_ids, 30), acceptance=RULE)
        tokens = [
            row.accepted[0] + (row.steps > 1 or len(row.tokens) > 1 + row.accepted[0]) for row in rows if row.steps
        ]
        assert replay_probe(firsts, tree).tokens.tolist() == tokens


@pytest.mark.parametrize("policy", [TREE, Tree.from_choices([])], ids=["probe tree", "lone root"])
def test_the_policy_may_be_all_of_the_probe_tree_or_none(target, heads, prompts, policy):
    probe = probed(target, heads, prompts[:6], policy, most=16)
    assert replay_probe(probe, policy).tokens.tolist() == (probe.lengths - 1).tolist()
    if len(policy) == 1:  # whose text is the greedy one
        rows = decode(target, heads, prompts[:6], batch_size=4, stop=StopRule(target.eos_ids, 16))
        assert probe.lengths.tolist() == [len(row.tokens) for row in rows]
        assert np.diff(probe.starts).tolist() == (probe.lengths - 1).tolist()


def test_a_probe_says_where_it_comes_from(target, heads, prompts):
    ended = []
    probe = probed(target, heads, prompts[:5], POLICY, most=6, meta={"seed": 4}, progress=ended.append)
    assert sum(ended) == 5
    assert probe.meta["acceptance"] == RULE.record
    assert probe.meta["seed"] == 4
    assert probe.clusters.tolist() == [0, 0, 1, 1, 2]
    assert probe.group_names == ["group 0", "group 1"]
    assert probe.prompt_tokens.tolist() == [len(p) for p in prompts[:5]]
    with pytest.raises(InvalidInput, match="all nodes of the policy among them"):
        probed(target, heads, prompts[:5], Tree.from_choices([[9]]))


@given(st.integers(0, 2**32), trees(), st.integers(1, 6))
def test_where_a_path_would_end_an_answer_is_where_its_text_ends(seed, tree, room):
    """Of a few tokens, so that loops complete; against the whole text read from its beginning."""
    rng = np.random.default_rng(seed)
    text = rng.integers(1, 3, 60).tolist()
    text = text[: sequence_end(text, StopRule(frozenset({0}), 99))[0] - 1]
    tokens = rng.integers(0, 3, len(tree))
    passes = rng.random(len(tree)) < 0.7
    accepted = np.array([node == 0 or passes[tree.mask[node]][1:].all() for node in range(len(tree))])
    found = ends_of(tree, accepted, tokens.tolist(), text, StopRule(frozenset({0}), 99), room)
    for node in np.flatnonzero(accepted):
        path = np.flatnonzero(tree.mask[node])[1:]
        whole = [*text, *tokens[path].tolist()]
        end, reason = sequence_end(whole, StopRule(frozenset({0}), len(text) + room))
        ended = found[path]
        if end == len(whole) and reason is End.LIMIT and len(path) < room:
            assert not ended.any()
        else:
            assert ended.argmax() + 1 == end - len(text)


def test_quality_is_the_targets_own_likelihood(target, heads):
    prompts, stop = prompts_of(8, 2), StopRule(target.eos_ids, 12)
    greedy = [row.tokens for row in decode(target, heads, prompts, batch_size=4, stop=stop)]
    rows = decode(target, heads, prompts, TREE, batch_size=4, stop=stop, acceptance=RULE)
    texts = [row.tokens for row in rows]
    found = measure_quality(target, prompts, texts, greedy, batch_size=3)
    total = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = target.model(torch.tensor([[*prompt, *text]])).logits[0].double()
        log_p = logits.log_softmax(-1)
        total += sum(float(log_p[len(prompt) - 1 + t, token]) for t, token in enumerate(text))
    n = sum(map(len, texts))
    assert found.log_likelihood_nats_per_token == pytest.approx(total / n, abs=1e-5)
    assert found.tokens == n
    assert found.difference_nats_per_token == pytest.approx(
        found.log_likelihood_nats_per_token - found.reference_log_likelihood_nats_per_token
    )
    assert found.log_likelihood_nats_per_token.stderr > 0
    assert 0 < found.changed_tokens_share < 1
    assert 0 < found.changed_answers_share <= 1


def test_changed_tokens_are_those_outside_what_both_texts_have_in_order(target):
    found = measure_quality(target, [[7]] * 2, [[8, 9, 10, 11], [8]], [[8, 20, 10, 11], [8]])
    assert found.changed_tokens_share == pytest.approx(2 / 10)
    assert found.changed_answers_share == 0.5
