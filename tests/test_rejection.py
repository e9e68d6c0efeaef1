"""Rejection keeps the target's distribution, exactly; its loop is the slow way's text; its theory says its rate."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from treeopt.errors import InvalidInput
from treeopt.growth.replay import replay
from treeopt.records.trace import End
from treeopt.runtime.acceptance.rejection import Rejection, SampledChain, accepted_tokens, next_probabilities
from treeopt.runtime.acceptance.rules import NoiseStream, Sampling, gumbel_argmax, sequence_key, stream_states, uniforms
from treeopt.runtime.decode import decode
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.protocol import TreeTensors
from treeopt.runtime.measure.ranks import collect_trace
from treeopt.runtime.session import by_rejection
from treeopt.runtime.setup import Setup
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, asked, examples, tiny_model

LETTERS, TWELFTHS = 3, 12
STANDARD_ERRORS = 3.9  # false alarms: 1e-4 a test, were its seed drawn anew


# The step: every drafted chain and every noise at once.

any_share = st.sampled_from([c for c in itertools.product(range(13), repeat=LETTERS) if sum(c) == TWELFTHS])
# Of these every p/q is a multiple of 1/12, so that the noise (i + 1/2)/12 has each of its sides as often as it should.
drafted_share = st.sampled_from(
    [c for c in itertools.product([0, 1, 2, 3, 4, 6, 12], repeat=LETTERS) if sum(c) == TWELFTHS]
)


@examples(40)
@given(chain=st.sampled_from([1, 2]), data=st.data())
def test_what_is_emitted_is_distributed_as_the_target_says(chain, data):
    """The exact law of one step, over all drafted tokens and all noise.

    With p and q that depend on the tokens before, P(first token = a) is p(a); P(a accepted, then b) is
    min(p, q)(a) p(b | a); and so on. So what follows the tokens that are emitted is always as p says.
    """
    prefixes = [path for d in range(chain + 1) for path in itertools.product(range(LETTERS), repeat=d)]
    tables = {path: np.array(data.draw(any_share)) / TWELFTHS for path in prefixes}
    drafts = {path: np.array(data.draw(drafted_share)) / TWELFTHS for path in prefixes if len(path) < chain}
    grid = (np.arange(TWELFTHS) + 0.5) / TWELFTHS
    cases = [
        (path, noise)
        for path in itertools.product(range(LETTERS), repeat=chain)
        for noise in itertools.product(grid, repeat=chain)
    ]
    p = torch.tensor(np.array([[tables[path[:d]] for d in range(chain + 1)] for path, _ in cases]))
    q = torch.tensor(np.array([[drafts[path[:d]] for d in range(chain)] for path, _ in cases]))
    drafted = torch.tensor([path for path, _ in cases])
    accepted = accepted_tokens(p, q, drafted, torch.tensor(np.array([noise for _, noise in cases])))
    following = next_probabilities(p, q, accepted)
    weights = q.gather(-1, drafted[..., None])[..., 0].prod(1) / TWELFTHS**chain

    law = {path: np.zeros(LETTERS) for path in prefixes}  # of the next token behind each accepted prefix
    for (path, _), n, after, weight in zip(cases, accepted.tolist(), following.numpy(), weights, strict=True):
        for d in range(n):
            law[path[:d]][path[d]] += float(weight)
        law[path[:n]] += float(weight) * after
    for path in prefixes:
        overlaps = [np.minimum(tables[path[:d]], drafts[path[:d]]) for d in range(len(path))]
        reached = math.prod(overlap[token] for overlap, token in zip(overlaps, path, strict=True))
        np.testing.assert_allclose(law[path], reached * tables[path], atol=1e-12)
    rate = float(weights[accepted >= 1].sum())
    assert rate == pytest.approx(np.minimum(tables[()], drafts[()]).sum())  # of the first drafted token


def test_equal_models_leave_no_residual_and_need_none():
    p = torch.full((1, 2, 4), 0.25, dtype=torch.float64)
    assert next_probabilities(p, p[:, :1], torch.tensor([0])).tolist() == [[0.25] * 4]


# Decoding: against one token after the other, without caches.


def decode_by_rejection(target, draft, prompts, *, chain, batch_size, stop, sampling):
    drafter = SampledChain(DraftModel(draft, target.vocab_size, num_heads=chain), target, sampling)
    return decode(
        target, drafter, prompts, Tree.chain(chain), batch_size=batch_size, stop=stop, acceptance=Rejection(drafter)
    )


def overlap_of(target, draft, text, sampling):
    """(n,) sum min(p, q) behind each of n tokens."""
    with torch.inference_mode():
        p, q = (sampling.probabilities(m.model(torch.tensor([text])).logits[0]) for m in (target, draft))
    return torch.minimum(p, q).sum(1).numpy()


def noise(sampling, stream, prompt, position):
    return stream_states(sampling.seed, stream, torch.tensor([sequence_key(prompt)]), torch.tensor([position]))


def slow_decoding(target, draft, prompt, *, chain, limit, sampling):
    """Tokens and accepted counts: whole passes over the whole text for every single distribution."""

    def probabilities(model, tokens):
        return sampling.probabilities(model.model(torch.tensor([tokens])).logits[0, -1])

    def draw(stream, shares, position):
        return int(gumbel_argmax(shares.log()[None], noise(sampling, stream, prompt, position)))

    text, counts = [*prompt], []
    end = len(prompt) + limit
    text.append(draw(NoiseStream.TOKEN, probabilities(target, text), len(text)))
    while len(text) < end:
        guesses, q = [], []
        for _ in range(chain):
            q.append(probabilities(draft, text + guesses))
            guesses.append(draw(NoiseStream.DRAFT, q[-1], len(text + guesses)))
        n, before = 0, len(text)
        while True:
            p = probabilities(target, text)
            if n == chain:
                text.append(draw(NoiseStream.TOKEN, p, len(text)))
                break
            token, place = guesses[n], len(text)
            if float(uniforms(noise(sampling, NoiseStream.ACCEPT, prompt, place), 1)) < p[token] / q[n][token]:
                text.append(token)
                n += 1
                continue
            residual = (p - q[n]).clamp_min(0)
            text.append(draw(NoiseStream.TOKEN, residual / residual.sum(), place))
            break
        text = text[:end]
        counts.append(min(n, len(text) - before))
    return text[len(prompt) :], counts


def shaken(model, spread: float, seed: int = 1):
    """A draft model: the same with other logits."""
    draft = tiny_model(seed=0) if model == "llama" else tiny_model(model, seed=0)
    rng = torch.Generator().manual_seed(seed)
    weight = draft.lm_head.weight
    weight += spread * torch.randn(weight.shape, generator=rng, dtype=weight.dtype)
    return Target(draft)


def random_prompts(seed: int, n: int = 4) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 9]))] for _ in range(n)]


@pytest.mark.parametrize(
    ("kind", "chain", "options"),
    [
        ("llama-eager", 2, {"top_p": 0.9}),
        ("qwen3", 3, {"top_k": 12}),
        pytest.param("llama", 1, {}, marks=pytest.mark.long),
        pytest.param("mistral", 4, {}, marks=pytest.mark.long),
    ],
)
def test_batched_decoding_is_the_slow_way(kind, chain, options):
    target, draft, limit = Target(tiny_model(kind)), shaken(kind, 0.5), 14
    prompts, sampling = random_prompts(chain), Sampling(2.0, seed=chain, **options)
    stop = StopRule(frozenset(), limit, at_loops=False)
    slow = [slow_decoding(target, draft, p, chain=chain, limit=limit, sampling=sampling) for p in prompts]
    for batch_size in (1, 3):
        rows = decode_by_rejection(
            target, draft, prompts, chain=chain, batch_size=batch_size, stop=stop, sampling=sampling
        )
        assert [(row.tokens, row.accepted) for row in rows] == slow
    assert 0 < sum(sum(row.accepted) for row in rows) < chain * sum(len(row.accepted) for row in rows)


def test_a_draft_like_the_target_is_always_accepted(target):
    stop = StopRule(frozenset(), 21, at_loops=False)
    rows = decode_by_rejection(
        target, target, random_prompts(2), chain=4, batch_size=3, stop=stop, sampling=Sampling(1.5)
    )
    assert all(row.accepted == [4, 4, 4, 4] for row in rows)


def test_a_sequence_ends_where_its_tokens_end_it(target):
    """At EOS inside a chain, and at the first token."""
    sampling, prompts = Sampling(1.5), [[7, 8]]
    free = StopRule(frozenset(), 30, at_loops=False)
    (whole,) = decode_by_rejection(target, target, prompts, chain=4, batch_size=1, stop=free, sampling=sampling)
    for eos in set(whole.tokens):
        stop = StopRule(frozenset([eos]), 30, at_loops=False)
        (row,) = decode_by_rejection(target, target, prompts, chain=4, batch_size=1, stop=stop, sampling=sampling)
        assert row.tokens == whole.tokens[: whole.tokens.index(eos) + 1]
        assert row.end is End.EOS
        cut = 1 + sum(row.accepted) + len(row.accepted) - len(row.tokens)
        assert cut in (0, 1)  # the token behind the last chain, where EOS is in the chain
    stop = StopRule(frozenset(), 1)
    (row,) = decode_by_rejection(target, target, prompts, chain=4, batch_size=1, stop=stop, sampling=sampling)
    assert (row.tokens, row.accepted, row.end) == (whole.tokens[:1], [], End.LIMIT)


def test_a_chain_may_reach_beyond_the_context():
    """Learned positions end there, the draft model's even before."""
    models = []
    for context in (20, 16):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=context)
        models.append(Target(GPT2LMHeadModel(config).eval()))
    stop = StopRule(frozenset(), 200, at_loops=False)
    rows = decode_by_rejection(*models, [[1] * 18, [2] * 9], chain=6, batch_size=2, stop=stop, sampling=Sampling())
    assert [(len(row.tokens), row.end) for row in rows] == [(2, End.CONTEXT), (11, End.CONTEXT)]


def test_trees_are_refused(target):
    sampling = Sampling(1.0)
    drafter = SampledChain(DraftModel(target, target.vocab_size), target, sampling)
    with pytest.raises(InvalidInput, match="chains only, but got a tree of 3 rows"):
        drafter.start(1, 9).propose(TreeTensors.of(Tree.dense([2]), target.device), torch.tensor([1]))


def test_the_rule_needs_a_draft_model(target, heads):
    with pytest.raises(InvalidInput, match="the drafter is of the kind medusa"):
        by_rejection(heads, target, Sampling())


def test_the_teacher_forced_trace_has_the_law_of_decoding(target):
    """Steps by replay of a sampled text, and by decoding, which is another text: their means agree."""
    draft, sampling, chain, limit = shaken("llama", 0.5), Sampling(1.5, top_p=0.95), 3, 40
    drafter = SampledChain(DraftModel(draft, VOCABULARY, num_heads=chain), target, sampling)
    prompts = [[i, 5 * j % VOCABULARY] for i in range(VOCABULARY) for j in range(4)]
    stop, tree = StopRule(frozenset(), limit, at_loops=False), Tree.chain(chain)
    trace = collect_trace(Setup(target, drafter, stop, Rejection(drafter)), asked(prompts), batch_size=len(prompts))
    rows = decode(target, drafter, prompts, tree, batch_size=len(prompts), stop=stop, acceptance=Rejection(drafter))
    expected, measured = replay(trace, tree).steps, np.array([row.steps for row in rows])
    assert set(np.unique(trace.ranks)) == {-2, -1, 0}
    error = math.sqrt((expected.var() + measured.var()) / len(prompts))
    assert abs(expected.mean() - measured.mean()) < STANDARD_ERRORS * error < 0.07 * expected.mean()


# The theory: its formulas, and its rate against decoding.


def test_the_overlap_along_a_text_is_the_chance_of_every_trial(target):
    """Accepted tokens less their chances are a martingale, whatever models and texts are: no bias to forgive."""
    draft, sampling, chain, limit = shaken("llama", 0.5), Sampling(2.5, top_k=20, seed=4), 4, 60
    prompts = [[i, 3 * i % VOCABULARY] for i in range(24)]
    stop = StopRule(frozenset(), limit, at_loops=False)
    rows = decode_by_rejection(target, draft, prompts, chain=chain, batch_size=24, stop=stop, sampling=sampling)
    overlaps = [overlap_of(target, draft, [*row.prompt, *row.tokens], sampling) for row in rows]
    chances, successes = [], 0
    for row, overlap in zip(rows, overlaps, strict=True):
        place = len(row.prompt)  # of the root; the first drafted token's chance stands there
        for count in row.accepted:
            trials = min(count + 1, chain, len(row.prompt) + limit - 1 - place)
            chances += overlap[place : place + trials].tolist()
            successes += count
            place += 1 + count
    chances = np.array(chances)
    assert 0.2 < chances.mean() < 0.9
    assert abs(successes - chances.sum()) < STANDARD_ERRORS * math.sqrt((chances * (1 - chances)).sum())
