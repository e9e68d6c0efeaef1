"""One contract for all drafters, on trained ones: any tree decodes the plain text, and the teacher-forced trace is
the trace of decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from treeopt.growth.replay import accepted_lengths, length_counts, replay, replay_dynamic
from treeopt.records.drafters import DRAFTERS, RECIPES, kind_of_layout
from treeopt.records.trace import End
from treeopt.runtime.acceptance.greedy import Greedy
from treeopt.runtime.acceptance.sampling import Sampling
from treeopt.runtime.decode import AnswerRow, Decoder, Setup, decode
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.draft_model import DraftModel, early_exit
from treeopt.runtime.drafters.eagle import EagleHeads
from treeopt.runtime.drafters.eagle3 import Eagle3Heads, Form
from treeopt.runtime.drafters.hydra import HydraHeads
from treeopt.runtime.drafters.layer import layer_config
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.drafters.medusa import MedusaHeads
from treeopt.runtime.drafters.protocol import Drafter, GivenText
from treeopt.runtime.measure.ranks import Counts, collect_trace, rank_answers, write_answers
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.trees.dynamic import DynamicTree
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, HEADS, VOCABULARY, asked, examples, random_prompts, tiny_model, trees
from .test_mtp import drafting

TEXTS, STEPS = 12, 120  # answers that heads are trained on, and for how long
NEVER = StopRule(frozenset(), 24, at_loops=False)
PROMPTS = [[9], [4, 5, 4, 5, 4], *([(i * step) % VOCABULARY for i in range(60)] for step in (13, 22, 25))]
RULES = [Greedy(), Sampling(0.7, top_p=0.9)]
EAGLE_3_READS = (0, 3, 1)
DYNAMIC = [DynamicTree(*numbers) for numbers in ((1, 3, 3), (2, 2, 4), (3, 1, 4), (3, 2, 8), (4, 4, 16), (4, 3, 9))]


def answers_of(target: Target, prompts: list[list[int]]) -> list[GivenText]:
    """The target's answers with all hidden states."""
    found: list[GivenText] = []

    def done(row: AnswerRow) -> None:
        hidden = torch.stack([hidden[i] for hidden, i in row.states[: len(row.tokens)]])
        assert row.prompt_states is not None
        assert row.end is not None
        found.append(GivenText(row.prompt, row.tokens, row.end, torch.cat([row.prompt_states, hidden])))

    reads_prompt: Any = SimpleNamespace(reads_prompt=True)
    write_answers(Setup(target, reads_prompt, NEVER), prompts, batch_size=4, done=done)
    return [GivenText(a.prompt, a.tokens, a.end, a.hidden.clone()) for a in found]


def trained(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> torch.nn.Module:
    """A few steps of Adam in float64, so that guesses are often right."""
    module.train().requires_grad_(True)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    return module.eval().requires_grad_(False)


def medusa(target: Target, texts: list[GivenText]) -> Drafter:
    heads = MedusaHeads.like_lm_head(target.lm_head.weight, HEADS)
    hidden, labels = torch.cat([a.state_hidden for a in texts]), torch.cat([a.labels(HEADS) for a in texts])

    def loss() -> torch.Tensor:
        parts = [F.cross_entropy(heads.logits(hidden, k), labels[:, k], ignore_index=-2) for k in range(HEADS)]
        return torch.stack(parts).sum()

    return trained(heads, loss)


def hydra(target: Target, texts: list[GivenText], *, prefix: bool = False) -> Drafter:
    heads = HydraHeads.untrained(
        target.model.get_input_embeddings().weight, target.lm_head.weight, HEADS, like=target.config if prefix else None
    )

    def loss() -> torch.Tensor:
        parts = []
        for a in texts:
            hidden = heads.prefix(a.hidden[None])[0, -len(a.tokens) :]
            tokens, n = torch.tensor(a.tokens), len(a.tokens)
            for k in range(HEADS):
                states = n - 1 - k  # at which head k has a token to guess
                path = torch.stack([tokens[i : i + states] for i in range(k + 1)], dim=1)
                parts.append(F.cross_entropy(heads.logits(hidden[:states], path, k), tokens[k + 1 :]))
        return torch.stack(parts).sum()

    return trained(heads, loss)


def eagle(target: Target, texts: list[GivenText]) -> Drafter:
    """Trained on the true states, as the first level reads them, to say the next state and so the next token."""
    heads = EagleHeads(
        layer_config(target.config, target.width),
        embedding=target.model.get_input_embeddings().weight,
        lm_head=target.lm_head.weight,
        num_heads=HEADS,
        dtype=target.dtype,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.2, generator=generator)
            elif "layernorm" in name:
                weight.fill_(1.0)

    def loss() -> torch.Tensor:
        parts = []
        for a in texts:
            text = torch.tensor([*a.prompt, *a.tokens])
            states = heads.predict(text[None, 1:], a.hidden[None])[0, :-1]  # of tokens 1...; the next state
            parts.append(F.cross_entropy(states @ target.lm_head.weight.T, text[2:]))
        return torch.stack(parts).sum()

    return trained(heads, loss)


def eagle3(target: Target, texts: list[GivenText]) -> Drafter:
    """Trained on the target's states before its layers, as the first level reads them, to say the next token but one."""
    form = Form(target.width, target.vocab_size, layers=EAGLE_3_READS)
    heads = Eagle3Heads(
        layer_config(target.config, target.width),
        form,
        embedding=target.model.get_input_embeddings().weight,
        token_ids=torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 9 != 8],
        num_heads=HEADS,
        dtype=target.dtype,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.normal_(0, 0.2, generator=generator) if weight.ndim == 2 else weight.fill_(1.0)

    def loss() -> torch.Tensor:
        parts = []
        for a in texts:
            text = torch.tensor([*a.prompt, *a.tokens])
            states = heads.predict(text[None, 1:], heads.fused(a.hidden[None]))[0, :-1]
            labels = torch.where(text[2:] % 9 != 8, text[2:] - text[2:] // 9, -1)  # places among its tokens
            parts.append(F.cross_entropy(heads.logits(states), labels, ignore_index=-1))
        return torch.stack(parts).sum()

    return trained(heads, loss)


def draft_model(target: Target, texts: list[GivenText]) -> Drafter:
    """A disturbed copy of the target, which is right about as often as a good draft model."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return DraftModel(Target(model), target.vocab_size, num_heads=HEADS)


@dataclass(frozen=True)
class Row:
    """A drafter under the contract: how one is made that is often right.

    reads : layers of the target at whose inputs it reads; 3 is behind the last one
    own   : makes a target and the drafter, where the usual target has none of this kind
    deep  : whether it is right at depth 2 and beyond, too
    """

    make: Callable[[Target, list[GivenText]], Drafter] | None = None
    reads: tuple[int, ...] = ()
    own: Callable[[], tuple[Target, Drafter]] | None = None
    deep: bool = False


CONTRACT = {
    "medusa": Row(medusa, deep=True),
    "hydra": Row(hydra, deep=True),
    "hydra++": Row(partial(hydra, prefix=True)),
    "eagle": Row(eagle, deep=True),
    "eagle3": Row(eagle3, EAGLE_3_READS, deep=True),
    "mtp": Row(own=partial(drafting, "deepseek_v3")),
    "mtp, eager": Row(own=partial(drafting, "glm4_moe", attention="eager")),
    "draft-model": Row(draft_model),
    "early-exit": Row(lambda target, texts: early_exit(target, 2, num_heads=HEADS)),
    "ngram": Row(lambda target, texts: PromptLookup(target.vocab_size, num_heads=HEADS)),
}


def test_every_kind_is_under_the_contract():
    assert {name.partition(",")[0] for name in CONTRACT} == set(DRAFTERS)


def test_every_function_that_a_row_names_is_there_and_names_are_not_shared():
    for kind, row in DRAFTERS.items():
        for part in ("opens", "recognises", "writes", "begins"):
            assert not getattr(row, part) or callable(part_of(kind, part))
        assert bool(row.recognises) == bool(row.writes) == bool(row.layouts)
        assert bool(row.begins) == bool(row.recipes)
        assert bool(row.opens) == bool(row.asked)
        assert row.about
    for shared in ("layouts", "recipes"):
        names = [name for row in DRAFTERS.values() for name in getattr(row, shared)]
        assert len(names) == len(set(names))
    assert all(kind_of_layout(recipe.layout) in DRAFTERS for recipe in RECIPES.values())


@pytest.fixture(scope="module", params=CONTRACT)
def both(request, target) -> Iterator[tuple[Target, Drafter]]:
    row = CONTRACT[request.param]
    if row.own is not None:
        yield row.own()
        return
    target.read_layers(row.reads)
    assert row.make is not None
    yield target, row.make(target, answers_of(target, random_prompts(99, most=TEXTS)))
    target.read_layers(())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.record["rule"])
class TestContract:
    @examples(2)
    @given(
        tree=trees(), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 2, 17, 40]), batch_size=st.integers(1, 4)
    )
    def test_decoding_with_any_tree_is_plain_decoding(self, both, rule, tree, seed, limit, batch_size):
        target, drafter = both
        prompts, stop = random_prompts(seed), StopRule(target.eos_ids, limit, at_loops=False)
        plain = decode(target, None, prompts, batch_size=1, stop=stop, acceptance=rule)
        ours = decode(target, drafter, prompts, tree, batch_size=batch_size, stop=stop, acceptance=rule)
        assert [(row.tokens, row.end) for row in ours] == [(row.tokens, row.end) for row in plain]

    @examples(2)
    @given(tree=trees(), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 2, 17, 40]), loops=st.booleans())
    def test_the_teacher_forced_trace_is_that_of_decoding(self, both, rule, tree, seed, limit, loops):
        target, drafter = both
        prompts, stop = random_prompts(seed), StopRule(target.eos_ids, limit, at_loops=loops)
        trace = collect_trace(Setup(target, drafter, stop, rule), asked(prompts), batch_size=3, counts=Counts(10))
        rows = decode(target, drafter, prompts, tree, batch_size=2, stop=stop, acceptance=rule)
        assert [t for row in rows for t in row.tokens] == trace.tokens.tolist()
        assert [row.end for row in rows] == trace.end.tolist()
        assert [row.steps for row in rows] == replay(trace, tree).steps.tolist()
        accepted = np.bincount([a for row in rows for a in row.accepted], minlength=tree.depth + 1)
        assert accepted.tolist() == length_counts(trace, accepted_lengths(trace, tree), tree.depth).tolist()

    @pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.long)], ids=["some", "every"])
    def test_an_end_token_inside_an_accepted_path_ends_the_text_there(self, both, rule, most):
        """Tokens of some answers are made the end token once: in the suite two a text that are in the middle of
        accepted paths, else every token."""
        target, drafter = both
        tree, inside = Tree.dense([6, 2, 1]), 0
        rows = decode(target, drafter, PROMPTS, tree, batch_size=1, stop=NEVER, acceptance=rule)
        for row in rows:
            emitted = np.cumsum([1, *(1 + a for a in row.accepted)])  # where steps end
            first_of = {row.tokens.index(token): token for token in row.tokens[1:]}
            chosen = [at for at in first_of if at + 1 not in emitted][:most] if most else range(1, len(row.tokens))
            for at in chosen:
                stop = StopRule(frozenset([row.tokens[at]]), NEVER.max_new_tokens, at_loops=False)
                (ours,) = decode(target, drafter, [row.prompt], tree, batch_size=1, stop=stop, acceptance=rule)
                first = row.tokens.index(row.tokens[at]) + 1
                assert (ours.tokens, ours.end) == (row.tokens[:first], End.EOS)
                inside += first not in emitted
        assert inside > 0

    def test_the_tree_may_change_from_step_to_step(self, both, rule):
        target, drafter = both
        prompts = PROMPTS
        decoder = Decoder(Setup(target, drafter, NEVER, rule), batch_size=3, capacity=90, most_nodes=9)
        decoder.start(enumerate(prompts))
        for i in range(200):
            if decoder.is_done:
                break
            decoder.refill()
            decoder.step([None, Tree.chain(2), None, None, Tree.dense([2, 3])][i % 5])
        plain = decode(target, None, prompts, batch_size=1, stop=NEVER, acceptance=rule)
        finished = sorted(decoder.finished, key=lambda row: row.id)
        assert [row.tokens for row in finished] == [row.tokens for row in plain]

    def test_the_context_ends_a_sequence(self, both, rule):
        target, drafter = both
        prompt = [1 + i % 30 for i in range(CONTEXT - 10)]
        stop = StopRule(frozenset(), 50, at_loops=False)
        (row,) = decode(target, drafter, [prompt], Tree.dense([3, 2]), batch_size=1, stop=stop, acceptance=rule)
        (plain,) = decode(target, None, [prompt], batch_size=1, stop=stop, acceptance=rule)
        assert row.end is End.CONTEXT
        assert row.tokens == plain.tokens

    def test_dynamic_trees_decode_the_plain_text_and_are_replayed(self, both, rule):
        (target, drafter), accepted = both, 0
        if not drafter.has_probabilities:
            return
        setup, prompts = Setup(target, drafter, StopRule(target.eos_ids, 30), rule), random_prompts(5)
        plain = decode(target, None, prompts, batch_size=3, stop=setup.stop, acceptance=rule)
        counts = Counts(top_k=4, levels=4, topks=(1, 2, 3, 4))
        trace = rank_answers(setup, prompts, [row.tokens for row in plain], batch_size=4, counts=counts)
        for tree in DYNAMIC:
            rows = decode(target, drafter, prompts, tree, batch_size=2, stop=setup.stop, acceptance=rule)
            assert [row.tokens for row in rows] == [row.tokens for row in plain]
            replayed = replay_dynamic(trace, tree.levels, tree.topk, [tree.rows])[0]
            assert replayed.tolist() == [row.steps for row in rows], tree
            accepted += sum(sum(row.accepted) for row in rows)
        assert accepted > 0


def test_trained_guesses_are_accepted(both, request):
    """Else the contract is about nothing: of 100 steps at least 5 accept a guess, some at depth 2 and beyond."""
    target, drafter = both
    rows = decode(target, drafter, random_prompts(99), Tree.dense([4, 2, 1]), batch_size=2, stop=NEVER)
    accepted = [a for row in rows for a in row.accepted]
    assert np.mean(np.array(accepted) > 0) > 0.05
    assert drafter.kind == request.node.callspec.params["both"].partition(",")[0]
    if CONTRACT[request.node.callspec.params["both"]].deep:
        assert max(accepted) >= 2
