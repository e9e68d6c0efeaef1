"""A draft model's guesses and ranks are those of its whole passes without a cache, one per guess."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt import demo
from treeopt.errors import InvalidInput, Unsupported
from treeopt.records.trace import MISS, End
from treeopt.runtime.drafters import states
from treeopt.runtime.drafters.draft_model import (
    DraftModel,
    check_same_tokenizer,
    early_exit,
    first_layers,
    load_draft_model,
)
from treeopt.runtime.drafters.open import open_drafter
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.runtime.target import Target
from treeopt.trees.tree import Tree

from .conftest import CONTEXT, VOCABULARY, examples, tiny_model, trees

CPU = torch.device("cpu")
KINDS = ["llama", "llama-eager", "qwen3", "mistral"]


def other_model(vocab_size: int = VOCABULARY, context: int = CONTEXT, layers: int = 2) -> torch.nn.Module:
    """A random draft model of another width, and without a list of layers: GPT-2, whose places are learned."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=context,
        n_embd=24,
        n_layer=layers,
        n_head=3,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=3,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config).double().eval().requires_grad_(False)


def shallow(kind: str) -> DraftModel:
    return early_exit(Target(tiny_model(kind)), 2)


def seeded(kind: str) -> DraftModel:
    return DraftModel(Target(tiny_model(kind, seed=7)), VOCABULARY)


DRAFTERS: dict[str, Callable[[], DraftModel]] = {
    **{kind: lambda kind=kind: seeded(kind) for kind in KINDS},
    "early exit": lambda: shallow("qwen3"),
    "early exit, windows": lambda: shallow("mistral"),
    "other": lambda: DraftModel(Target(other_model()), VOCABULARY),
    "fewer tokens": lambda: DraftModel(Target(other_model(vocab_size=30)), VOCABULARY),
    "more tokens": lambda: DraftModel(Target(other_model(vocab_size=45)), VOCABULARY),
    "short context": lambda: DraftModel(Target(other_model(context=13)), VOCABULARY),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request) -> DraftModel:
    return DRAFTERS[request.param]()


Ranked = Callable[[list[list[int]]], list[list[int]]]  # tokens after each of some texts, best first


def likeliest(drafter: DraftModel) -> Ranked:
    """By one pass over whole texts, without a cache; none after a text beyond the context."""
    model = drafter.model

    def ranked(texts: list[list[int]]) -> list[list[int]]:
        if not texts:
            return []
        longest = min(max(map(len, texts)), model.context)
        ids = torch.tensor([[*text, *[0] * longest][:longest] for text in texts]).clamp_max(model.vocab_size - 1)
        states = model.decoder(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(states)[..., : drafter.vocab_size].float()
        best = logits.sort(dim=-1, descending=True, stable=True).indices  # of equal ones the smaller id first
        return [
            row[len(text) - 1].tolist() if len(text) <= longest else [] for text, row in zip(texts, best, strict=True)
        ]

    return ranked


def guesses(tree: Tree, texts: list[list[int]], ranked: Ranked) -> list[list[int]]:
    """The token of every node after texts whose last tokens are the roots; -1 for none, and below none."""
    tokens = [[text[-1]] + [-1] * (len(tree) - 1) for text in texts]
    paths = [{0: text} for text in texts]  # of the nodes that have a token
    for depth in range(tree.depth):
        asked = [(i, node) for i, known in enumerate(paths) for node in known if tree.depths[node] == depth]
        for (i, node), found in zip(asked, ranked([paths[i][node] for i, node in asked]), strict=True):
            for child in [c for c in range(1, len(tree)) if tree.parents[c] == node]:
                if tree.ranks[child] < len(found):
                    tokens[i][child] = found[tree.ranks[child]]
                    paths[i][child] = [*paths[i][node], tokens[i][child]]
    return tokens


def play(
    drafter, seed: int, tree: Tree, *, vocab_size: int = VOCABULARY, rounds: int = 5
) -> Iterator[tuple[list[int], list[int], list[str]]]:
    """The life of a decoder with text that does not depend on any model: rows come, grow by more than a plain step
    or less than they were guessed, and go. Yields a row's text with its root, its proposal, and the parts marked.
    """
    rng = random.Random(seed)
    draft, plan, texts = drafter.start(4, 100), TreeTensors.of(tree, CPU), []

    def some(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    for round_ in range(rounds):
        new = [some(rng.randint(1, 9)) for _ in range(rng.randint(0 if texts else 1, 4 - len(texts)))]
        if new:
            draft.prefill(new, torch.zeros(len(new), max(map(len, new)), 5))
            texts += new
        roots = torch.tensor(some(len(texts)))
        if round_ == 0 or rng.random() < 0.7:
            marks: list[str] = []
            proposal = draft.propose(plan, roots, marks.append).tolist()
            for text, root, tokens in zip(texts, roots.tolist(), proposal, strict=True):
                yield [*text, root], tokens, marks
        counts = [rng.randint(1, 3) for _ in texts]
        committed = [[root, *some(n - 1)] for root, n in zip(roots.tolist(), counts, strict=True)]
        draft.extend(committed, torch.zeros(len(texts), max(counts), 5), [list(range(n)) for n in counts])
        texts = [text + new for text, new in zip(texts, committed, strict=True)]
        order = list(range(len(texts)))  # as rows end, the last ones take their places
        for row in reversed(range(len(texts))):
            if rng.random() < 0.2:
                order[row] = order[-1]
                order.pop()
        draft.keep(order)
        texts = [texts[i] for i in order]


@examples(4)
@given(tree=trees(most_nodes=9, depth=5), seed=st.integers(0, 10**6))
def test_guesses_are_those_of_whole_passes(drafter, tree, seed):
    texts, proposals, marks = zip(*play(drafter, seed, tree), strict=True)
    assert list(proposals) == guesses(tree, list(texts), likeliest(drafter))
    assert all(parts == [f"draft {depth}" for depth in range(tree.depth)] for parts in marks)


def answer_of(seed: int, end: End = End.LIMIT, vocab_size: int = VOCABULARY) -> GivenText:
    rng = random.Random(seed)
    prompt, tokens = ([rng.randrange(vocab_size) for _ in range(rng.randint(1, 12))] for _ in range(2))
    return GivenText(prompt, tokens, end, torch.zeros(len(tokens), 5))


def expected_ranks(answers: list[GivenText], num_heads: int, top_k: int, ranked: Ranked) -> list[list[list[int]]]:
    tables = [answer.labels(num_heads).tolist() for answer in answers]
    asked = [
        (i, t, k)
        for i, table in enumerate(tables)
        for t, row in enumerate(table)
        for k in range(num_heads)
        if row[k] >= 0
    ]
    texts = [[*answers[i].prompt, *answers[i].tokens[: t + k + 1]] for i, t, k in asked]
    for (i, t, k), found in zip(asked, ranked(texts), strict=True):
        label = tables[i][t][k]
        tables[i][t][k] = found.index(label) if label in found[:top_k] else MISS
    return tables


@examples(4)
@given(
    seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
    end=st.sampled_from(End),
    top_k=st.sampled_from([1, 6, 50]),
)
def test_ranks_are_places_among_the_guesses_of_whole_passes(drafter, seeds, end, top_k):
    answers = [answer_of(seed, end) for seed in seeds]
    found = drafter.ranks(answers, top_k)
    assert [table.tolist() for table in found] == expected_ranks(answers, drafter.num_heads, top_k, likeliest(drafter))
    assert {str(table.dtype) for table in found} == {"int16"}


def test_a_text_beyond_the_context_has_misses_and_no_guesses():
    drafter = DRAFTERS["short context"]()
    known = DRAFTERS["other"]()  # the same weights but for the places
    answer = GivenText([7] * 10, list(range(10, 20)), End.LIMIT, torch.zeros(10, 5))
    (ranks,) = drafter.ranks([answer], VOCABULARY)
    # Token i of the answer is guessed after the one at place 10 + i - 1, of 13 places.
    assert [(rank >= 0) for rank in ranks[:, 0].tolist()] == [True] * 3 + [False] * 7
    assert ranks[0].tolist()[3:] == [MISS, MISS]
    assert (known.ranks([answer], VOCABULARY)[0][:5] >= 0).all()
    draft, plan = drafter.start(2, 40), TreeTensors.of(Tree.dense([2, 1, 1]), CPU)
    draft.prefill([[7] * 11, [7] * 20], torch.zeros(2, 20, 5))
    inside, beyond = draft.propose(plan, torch.tensor([1, 2]), lambda part: None).tolist()
    assert [token >= 0 for token in inside] == [True] * 5 + [False] * 2  # the root is at place 11
    assert beyond == [2, -1, -1, -1, -1, -1, -1]


def test_tokens_beyond_the_targets_are_neither_proposed_nor_counted():
    model = other_model(vocab_size=45)
    with torch.no_grad():  # the draft would say nothing but its padding
        model.transformer.wte.weight[VOCABULARY:] *= 50
    drafter = DraftModel(Target(model), VOCABULARY)
    assert drafter.draft_vocab_size == VOCABULARY
    tree = Tree.dense([VOCABULARY])
    for _, tokens, _ in play(drafter, 3, tree):
        assert sorted(tokens[1:]) == list(range(VOCABULARY))
    assert max(r.max() for r in drafter.ranks([answer_of(s) for s in range(9)], 99)) < VOCABULARY
    assert DRAFTERS["fewer tokens"]().draft_vocab_size == 30


def test_tokens_that_the_draft_lacks_are_misses():
    drafter = DRAFTERS["fewer tokens"]()
    answer = GivenText([1, 2], [5, 33, 6, 36], End.LIMIT, torch.zeros(4, 5))
    (ranks,) = drafter.ranks([answer], VOCABULARY)
    assert (ranks[:3, 0] >= 0).tolist() == [False, True, False]


def test_a_proposal_takes_one_pass_per_level():
    drafter = seeded("llama")
    draft, tree = drafter.start(2, 60), Tree.dense([3, 2, 1])
    draft.prefill([[1, 2, 3], [4]], torch.zeros(2, 3, 5))
    drafter.model.passes = 0
    for _ in range(3):  # plain steps cost nothing
        draft.extend([[5], [6]], torch.zeros(2, 1, 5), [[0], [0]])
    assert drafter.model.passes == 0
    draft.propose(TreeTensors.of(tree, CPU), torch.tensor([7, 8]), lambda part: None)
    assert drafter.model.passes == tree.depth


def test_a_long_row_beside_one_with_more_to_feed_stays_in_its_room():
    """Once all that waited was written behind every row, past the end of a new row that was nearly full."""
    drafter, tree = seeded("llama"), Tree.chain(2)
    draft, long = drafter.start(2, 40 + len(tree)), [1 + i % 30 for i in range(39)]
    draft.prefill([[1, 2]], torch.zeros(1, 2, 5))
    texts = [[1, 2], long]
    for i in range(30):
        draft.extend([[i]], torch.zeros(1, 1, 5), [[0]])
        texts[0].append(i)
    draft.prefill([long], torch.zeros(1, 39, 5))
    for root in (33, 34):
        found = draft.propose(TreeTensors.of(tree, CPU), torch.tensor([root, root]), lambda part: None)
        assert found.tolist() == guesses(tree, [[*text, root] for text in texts], likeliest(drafter))
        draft.extend([[root], [root]], torch.zeros(2, 1, 5), [[0], [0]])
        texts = [[*text, root] for text in texts]
        draft.keep([0, 1] if root == 33 else [0])


def test_memory_for_ranks_is_bounded(monkeypatch):
    drafter, answers = seeded("llama"), [answer_of(seed, End.EOS) for seed in range(12)]
    at_once = [ranks.tolist() for ranks in drafter.ranks(answers, 10)]
    passed: list[tuple[int, ...]] = []
    projected: list[int] = []
    monkeypatch.setattr(states, "TOKENS_AT_ONCE", 30)
    monkeypatch.setattr(states, "states_at_once", lambda vocab_size: 4)
    hook = drafter.model.decoder.register_forward_hook(
        lambda module, args, kwargs, out: passed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    project = drafter.model.lm_head.register_forward_hook(lambda module, args, out: projected.append(len(args[0])))
    try:
        assert [ranks.tolist() for ranks in drafter.ranks(answers, 10)] == at_once
    finally:
        hook.remove()
        project.remove()
    assert max(rows * longest for rows, longest in passed if rows > 1) <= 30
    assert sum(rows for rows, _ in passed) == len(answers)
    assert max(projected) == 4
    assert drafter.ranks([], 10) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_an_early_exit_says_what_the_head_says_of_that_layer(kind, layer):
    target = Target(tiny_model(kind))
    cut = first_layers(target, layer)
    text = torch.arange(20)[None] % VOCABULARY
    exits: list[torch.Tensor] = []
    hook = target.decoder.layers[layer - 1].register_forward_hook(lambda module, args, out: exits.append(out))
    try:
        own = target.model(text, use_cache=False).logits
    finally:
        hook.remove()
    expected = target.lm_head(target.decoder.norm(exits[0]))
    found = cut.logits(cut.decoder(input_ids=text, use_cache=False).last_hidden_state)
    assert torch.equal(found, expected)
    assert torch.equal(found, own) == (layer == target.num_layers)
    assert cut.num_layers == len(cut.decoder.layers) == layer
    assert cut.config.num_hidden_layers == cut.decoder.config.num_hidden_layers == layer


@pytest.mark.parametrize("kind", KINDS)
def test_an_early_exit_shares_all_weights_and_leaves_the_target_as_it_was(kind):
    target = Target(tiny_model(kind))
    before = target.config.to_dict()
    cut = early_exit(target, 1).model
    assert target.config.to_dict() == before
    assert len(target.decoder.layers) == target.num_layers == 3
    owned = {weight.data_ptr() for weight in target.model.parameters()}
    used = [*cut.decoder.parameters(), *cut.lm_head.parameters()]
    assert {weight.data_ptr() for weight in used} <= owned
    assert len(list(cut.decoder.parameters())) < len(list(target.decoder.parameters()))
    if before.get("layer_types"):
        assert cut.config.layer_types == before["layer_types"][:1]


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_an_exit_outside_the_layers_is_refused(target, layer):
    with pytest.raises(InvalidInput, match=f"needs a layer of 1 to 2, but got '{layer}'"):
        open_drafter(f"early-exit:{layer}", target)


def test_models_that_cannot_be_cut_are_refused():
    from accelerate.hooks import ModelHook, add_hook_to_module

    with pytest.raises(Unsupported, match="GPT2LMHeadModel has none"):
        early_exit(Target(other_model()), 1)
    spread = Target(tiny_model())
    add_hook_to_module(spread.decoder, ModelHook())
    with pytest.raises(Unsupported, match="on one device"):
        early_exit(spread, 1)


def test_a_draft_that_guesses_nothing_is_refused(target):
    with pytest.raises(InvalidInput, match="at least 1, but got 0"):
        open_drafter("early-exit:1", target, depth=0)


class Vocabulary:
    eos_token_id = 3

    def __init__(self, **ids: int) -> None:
        self.ids = ids

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)


def named(name: str, **ids: int) -> Target:
    return Target(tiny_model(), Vocabulary(**ids), name=name)


def test_only_a_draft_with_the_targets_tokens_is_taken():
    target = named("big", a=0, b=1, c=2)
    check_same_tokenizer(target, named("small", c=2, b=1, a=0))
    check_same_tokenizer(target, Target(other_model(vocab_size=45), Vocabulary(a=0, b=1, c=2)))
    for ids, said in (
        ({"a": 0, "b": 2, "c": 1}, "'b' is 1 in big and 2 in small"),
        ({"a": 0, "b": 1, "d": 2}, "'c' is 2 in big and None in small"),
        ({"a": 0, "b": 1}, "'c' is 2 in big and None in small"),
        ({"a": 0, "b": 1, "c": 2, "d": 3}, "'d' is None in big and 3 in small"),
    ):
        with pytest.raises(InvalidInput, match=said):
            check_same_tokenizer(target, named("small", **ids))
    with pytest.raises(InvalidInput, match="bare has no tokenizer"):
        check_same_tokenizer(target, Target(tiny_model(), name="bare"))


def test_a_draft_model_is_loaded_as_the_target_is(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, tmp_path)
    from transformers import AutoTokenizer

    target = Target(tiny_model(), AutoTokenizer.from_pretrained(tmp_path), name="big")
    drafter = load_draft_model(str(tmp_path), target, num_heads=2)
    assert (drafter.model.dtype, drafter.model.device) == (torch.float64, CPU)
    assert (drafter.kind, drafter.num_heads, drafter.vocab_size) == ("draft-model", 2, VOCABULARY)
    with pytest.raises(InvalidInput, match="must have the target's tokens"):
        load_draft_model(str(tmp_path), named("big", a=0))
