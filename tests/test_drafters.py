"""One contract for all drafters, on trained ones: any tree decodes the plain text, and the teacher-forced trace is
the trace of decoding."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.errors import InvalidInput
from treeopt.growth.replay import accepted_lengths, length_counts, record_for, replay
from treeopt.records.drafters import DRAFTERS, RECIPES, kind_of_layout
from treeopt.records.trace import End
from treeopt.runtime.acceptance.rules import Greedy, Sampling
from treeopt.runtime.decode import Decoder, decode
from treeopt.runtime.drafters import part_of
from treeopt.runtime.drafters.dflash import DFlashHeads
from treeopt.runtime.drafters.draft_model import DraftModel
from treeopt.runtime.drafters.eagle3 import Form
from treeopt.runtime.drafters.layer import EagleHeads, layer_config
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.drafters.parallel import PardModel, PEagleHeads
from treeopt.runtime.drafters.paths import DFlash2Heads, DSparkHeads
from treeopt.runtime.drafters.protocol import Drafter
from treeopt.runtime.measure.ranks import Counts, collect_trace, rank_answers
from treeopt.runtime.setup import Setup
from treeopt.runtime.stepper import PLAIN
from treeopt.runtime.stop import StopRule
from treeopt.runtime.target import Target
from treeopt.runtime.training.batches import Text, common_tokens, make_batch
from treeopt.runtime.training.losses import count
from treeopt.runtime.training.opening import make_heads
from treeopt.runtime.training.recipe import Recipe
from treeopt.trees.draft import DDTree, DynamicTree
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, HEADS, VOCABULARY, asked, examples, random_prompts, some_long, tiny_model, trees
from .test_mtp import drafting
from .test_train import states_of

TEXTS, STEPS = 12, 60  # answers that heads are trained on, and for how long
NEVER = StopRule(frozenset(), 24, at_loops=False)
PROMPTS = [[9], [4, 5, 4, 5, 4], *([(i * step) % VOCABULARY for i in range(60)] for step in (13, 22, 25))]
RULES = [Greedy(), Sampling(0.7, top_p=0.9)]
DYNAMIC = [DynamicTree(*numbers) for numbers in ((1, 3, 3), (2, 2, 4), (3, 1, 4), (3, 2, 8), (4, 4, 16), (4, 3, 9))]
MARGINAL = [DDTree(*numbers) for numbers in ((1, 3, 3), (2, 2, 4), (3, 1, 4), (4, 4, 16), (4, 31, 32), (4, 31, 9))]


def trained(target: Target, *, make: Callable[[Target, list[Text]], torch.nn.Module]) -> Drafter:
    """A few steps of Adam in float64 on the target's answers, so that guesses are often right."""
    rows = decode(target, None, random_prompts(99, most=TEXTS), batch_size=4, stop=NEVER)
    texts = [Text(np.array([*row.prompt, *row.tokens]), len(row.prompt), "") for row in rows]
    heads, batch = make(target, texts), make_batch(texts, HEADS, "cpu")
    hidden = states_of(target, batch)
    optimiser = torch.optim.Adam(heads.requires_grad_(True).parameters(), lr=0.02)
    for _ in range(STEPS):
        optimiser.zero_grad()
        count(heads, hidden, batch)[0].sum().backward()
        optimiser.step()
    return heads.eval().requires_grad_(False)


def recipe(kind: str, **options: int) -> Callable[[Target], Drafter]:
    """Heads as `treeopt train` begins them."""
    wanted = Recipe(kind, HEADS, num_layers=1, **options)
    return partial(trained, make=lambda target, texts: make_heads(target, wanted, texts))


def untrained_eagle(target: Target, texts: list[Text]) -> EagleHeads:
    embedding, lm_head = target.model.get_input_embeddings().weight, target.lm_head.weight
    config = layer_config(target.config, target.width)
    heads = EagleHeads(config, embedding=embedding, lm_head=lm_head, num_heads=HEADS, dtype=target.dtype)
    torch.manual_seed(0)
    for name, weight in heads.named_parameters():
        torch.nn.init.normal_(weight, float("layernorm" in name), 0.2 * (weight.ndim == 2))
    return heads


def draft_model(target: Target) -> Drafter:
    """A disturbed copy of the target, which is right about as often as a good draft model."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return DraftModel(Target(model), target.vocab_size, num_heads=HEADS)


def untrained_peagle(target: Target, texts: list[Text]) -> PEagleHeads:
    """Three layers, which guess most of the tokens."""
    target.read_layers((0, 2, 3))
    heads = PEagleHeads(
        layer_config(target.config, target.width, layers=3),
        Form(target.width, target.vocab_size, layers=(0, 2, 3), mask_id=8),
        embedding=target.model.get_input_embeddings().weight,
        token_ids=common_tokens(texts, target.vocab_size, 33),
        num_heads=HEADS,
        dtype=target.dtype,
    )
    torch.manual_seed(0)
    for name, weight in heads.named_parameters():
        torch.nn.init.normal_(weight, float("norm" in name), 0.2 * (weight.ndim > 1))
    return heads


def pard(target: Target) -> Drafter:
    """The disturbed copy, which was never told what a mask is."""
    return PardModel(draft_model(target).model, target.vocab_size, mask_id=8, num_heads=HEADS)


def causal_dflash(target: Target, texts: list[Text]) -> DFlashHeads:
    """Two layers whose rows see those before them alone, one of them 7 places back; the newest token's own row guesses too."""
    made = make_heads(target, Recipe("dflash", HEADS, num_layers=2), texts)
    form = replace(made.form, from_anchor=True, block=HEADS, causal=(True, True), windows=(7, None))
    other = DFlashHeads(
        made.config, form, embedding=made.embedding, lm_head=made.lm_head, num_heads=HEADS, dtype=made.dtype
    )
    other.load_state_dict(made.state_dict())
    return other


def shaken(made: DFlashHeads, kind: Callable[..., DFlashHeads], **sizes: object) -> DFlashHeads:
    """DFlash's layers, with small random weights of what another kind has beside them."""
    other = kind(
        made.config,
        made.form,
        embedding=made.embedding,
        lm_head=made.lm_head,
        num_heads=HEADS,
        dtype=made.dtype,
        rank=6,
        **sizes,
    )
    generator, own = torch.Generator().manual_seed(2), made.state_dict()
    for name, weight in other.state_dict().items():
        if name not in own:
            own[name] = 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        if name.endswith("base_kernel"):
            own[name][:, 0] += 1
    other.load_state_dict(own)
    return other


def untrained_dspark(target: Target, texts: list[Text]) -> DFlashHeads:
    return shaken(make_heads(target, Recipe("dflash", HEADS, num_layers=1), texts), DSparkHeads)


def dflash2(target: Target) -> Drafter:
    """Convolutions and selector are not trained: the loss would be infinite where the true token is not among those kept."""
    return shaken(recipe("dflash")(target), DFlash2Heads, kept=9, group=8).requires_grad_(False)


@dataclass(frozen=True)
class Row:
    """A drafter under the contract: how one is made that is often right.

    own  : makes a target and the drafter, where the usual target has none of this kind
    deep : whether it is right at depth 2 and beyond, too
    """

    make: Callable[[Target], Drafter] | None = None
    own: Callable[[], tuple[Target, Drafter]] | None = None
    deep: bool = False


CONTRACT = {
    "medusa": Row(recipe("medusa-1"), deep=True),
    "hydra": Row(recipe("hydra"), deep=True),
    "eagle": Row(partial(trained, make=untrained_eagle), deep=True),
    "eagle3": Row(recipe("eagle3", draft_vocab=33), deep=True),
    "p-eagle": Row(partial(trained, make=untrained_peagle), deep=True),
    "dflash": Row(recipe("dflash"), deep=True),
    "dflash, causal": Row(partial(trained, make=causal_dflash), deep=True),
    "dflash2": Row(dflash2, deep=True),
    "dspark": Row(partial(trained, make=untrained_dspark), deep=True),
    "mtp": Row(own=partial(drafting, "deepseek_v3")),
    "mtp, eager": Row(own=partial(drafting, "glm4_moe", attention="eager")),
    "draft-model": Row(draft_model),
    "pard": Row(pard),
    "ngram": Row(lambda target: PromptLookup(target.vocab_size, num_heads=HEADS)),
}


SUITE = ("medusa", "hydra", "eagle3", "dflash, causal", "dspark", "mtp", "draft-model", "ngram")
SAMPLED = ("medusa", "draft-model")  # under the other rule, too


def in_suite(name: str, rule: Greedy = RULES[0]) -> list[pytest.MarkDecorator]:
    return [] if name in (SUITE if rule is RULES[0] else SAMPLED) else [pytest.mark.long]


KINDS = [pytest.param(name, id=name, marks=in_suite(name)) for name in CONTRACT]
PAIRS = [
    pytest.param(name, rule, id=f"{name}-{rule.record['rule']}", marks=in_suite(name, rule))
    for name in CONTRACT
    for rule in RULES
]


def fitting(drafter: Drafter, tree: Tree) -> Tree:
    """The nodes of a tree whose ranks the drafter has: of a look-up one chain."""
    return tree.cut(max_depth=tree.depth, max_rank=drafter.draft_vocab_size - 1)


def test_every_kind_is_under_the_contract():
    assert {name.partition(",")[0] for name in CONTRACT} == set(DRAFTERS)


def test_every_function_that_a_row_names_is_there_and_names_are_not_shared():
    for kind, row in DRAFTERS.items():
        for part in ("opens", "recognises", "writes", "begins"):
            assert not getattr(row, part) or callable(part_of(kind, part))
        assert bool(row.recognises) == bool(row.layouts)
        assert row.recognises or not row.writes
        assert bool(row.begins) == bool(row.recipes)
        assert bool(row.opens) == bool(row.argument)
        assert row.about
    for shared in ("layouts", "recipes"):
        names = [name for row in DRAFTERS.values() for name in getattr(row, shared)]
        assert len(names) == len(set(names))
    assert all(kind_of_layout(recipe.layout) in DRAFTERS for recipe in RECIPES.values())


@cache
def made(name: str) -> tuple[Target, Drafter]:
    """A drafter of the contract with its target, made once for a process."""
    row = CONTRACT[name]
    if row.own is not None:
        return row.own()
    assert row.make is not None
    target = Target(tiny_model())
    return target, row.make(target)


@pytest.fixture(scope="module")
def both(request) -> tuple[Target, Drafter]:
    return made(request.param)


@pytest.mark.parametrize(("both", "rule"), PAIRS, indirect=["both"])
class TestContract:
    @examples(2)
    @given(
        tree=trees(), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 2, 17, 40]), batch_size=st.integers(1, 4)
    )
    def test_decoding_with_any_tree_is_plain_decoding(self, both, rule, tree, seed, limit, batch_size):
        target, drafter = both
        tree = fitting(drafter, tree)
        prompts, stop = random_prompts(seed), StopRule(target.eos_ids, limit, at_loops=False)
        plain = decode(target, None, prompts, batch_size=1, stop=stop, acceptance=rule)
        ours = decode(target, drafter, prompts, tree, batch_size=batch_size, stop=stop, acceptance=rule)
        assert [(row.tokens, row.end) for row in ours] == [(row.tokens, row.end) for row in plain]

    @examples(2)
    @given(tree=trees(), seed=st.integers(0, 10**6), limit=st.sampled_from([1, 2, 17, 40]), loops=st.booleans())
    def test_the_teacher_forced_trace_is_that_of_decoding(self, both, rule, tree, seed, limit, loops):
        target, drafter = both
        tree = fitting(drafter, tree)
        prompts, stop = random_prompts(seed), StopRule(target.eos_ids, limit, at_loops=loops)
        trace = collect_trace(Setup(target, drafter, stop, rule), asked(prompts), batch_size=3, counts=Counts(10))
        rows = decode(target, drafter, prompts, tree, batch_size=2, stop=stop, acceptance=rule)
        assert [t for row in rows for t in row.tokens] == trace.tokens.tolist()
        assert [row.end for row in rows] == trace.end.tolist()
        assert [row.steps for row in rows] == replay(trace, tree).steps.tolist()
        accepted = np.bincount([a for row in rows for a in row.accepted], minlength=tree.depth + 1)
        assert accepted.tolist() == length_counts(trace, accepted_lengths(trace, tree), tree.depth).tolist()

    @pytest.mark.parametrize("most", [1, *some_long(None)], ids=["some", "every"])
    def test_an_end_token_inside_an_accepted_path_ends_the_text_there(self, both, rule, most):
        """Tokens of some answers are made the end token once: in the suite one a text that is in the middle of an
        accepted path, else every token."""
        target, drafter = both
        tree, inside = fitting(drafter, Tree.dense([6, 2, 1])), 0
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
        decoder = Decoder(Setup(target, drafter, NEVER, rule))
        drafts = [PLAIN, Tree.chain(2), PLAIN, PLAIN, fitting(drafter, Tree.dense([2, 3]))]
        decoder.prepare(prompts, drafts, 3)
        passes = decoder.answer(prompts, PLAIN, 3)
        next(passes)
        with suppress(StopIteration):
            for i in range(200):
                passes.send(drafts[i % 5])
        plain = decode(target, None, prompts, batch_size=1, stop=NEVER, acceptance=rule)
        finished = sorted(decoder.finished, key=lambda row: row.id)
        assert [row.tokens for row in finished] == [row.tokens for row in plain]

    def test_the_context_ends_a_sequence(self, both, rule):
        target, drafter = both
        prompt = [1 + i % 30 for i in range(CONTEXT - 10)]
        stop = StopRule(frozenset(), 50, at_loops=False)
        tree = fitting(drafter, Tree.dense([3, 2]))
        (row,) = decode(target, drafter, [prompt], tree, batch_size=1, stop=stop, acceptance=rule)
        (plain,) = decode(target, None, [prompt], batch_size=1, stop=stop, acceptance=rule)
        assert row.end is End.CONTEXT
        assert row.tokens == plain.tokens

    @pytest.mark.parametrize("every", [4, *some_long(1)], ids=["some", "all"])
    def test_trees_that_are_built_anew_decode_the_plain_text_and_are_replayed(self, both, rule, every):
        """In the suite each rule has a quarter of them."""
        (target, drafter), accepted = both, dict[str, list[int]]()
        if not drafter.has_probabilities:
            return
        drafts = [(tree, 2) for tree in DYNAMIC]
        drafts += [(tree, batch_size) for tree in MARGINAL for batch_size in (1, 4)] * drafter.has_marginals
        setup, prompts = Setup(target, drafter, StopRule(target.eos_ids, 30), rule), random_prompts(5)
        plain = decode(target, None, prompts, batch_size=3, stop=setup.stop, acceptance=rule)
        counts = record_for([tree for tree, _ in drafts])
        trace = rank_answers(setup, prompts, [row.tokens for row in plain], batch_size=4, counts=counts)
        for tree, batch_size in drafts[RULES.index(rule) % every :: every]:
            rows = decode(target, drafter, prompts, tree, batch_size=batch_size, stop=setup.stop, acceptance=rule)
            assert [row.tokens for row in rows] == [row.tokens for row in plain]
            assert replay(trace, tree).steps.tolist() == [row.steps for row in rows], tree
            accepted.setdefault(tree.kind, []).extend(n for row in rows for n in row.accepted)
        assert all(
            max(lengths) > (drafter.kind == "medusa") for lengths in accepted.values()
        )  # which is right at depth 2, too

    def test_trees_over_marginals_are_refused_where_guesses_depend_on_others(self, both, rule):
        target, drafter = both
        if not drafter.has_marginals:
            with pytest.raises(InvalidInput, match=re.escape(drafter.kind)):
                decode(target, drafter, PROMPTS, MARGINAL[0], batch_size=2, stop=NEVER, acceptance=rule)


@pytest.mark.parametrize("both", KINDS, indirect=True)
def test_trained_guesses_are_accepted(both, request):
    """Else the contract is about nothing: of 100 steps at least 5 accept a guess, some at depth 2 and beyond."""
    target, drafter = both
    tree = fitting(drafter, Tree.dense([4, 2, 1]))
    rows = decode(target, drafter, random_prompts(99), tree, batch_size=2, stop=NEVER)
    accepted = [a for row in rows for a in row.accepted]
    assert np.mean(np.array(accepted) > 0) > 0.05
    assert drafter.kind == request.node.callspec.params["both"].partition(",")[0]
    if CONTRACT[request.node.callspec.params["both"]].deep:
        assert max(accepted) >= 2
