"""Prompt lookup guesses what its definition says, read off the whole text anew for every node."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.records.trace import MISS, NO_TRIAL, End
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.trees.tree import Tree

from .conftest import DATA, VOCABULARY, trees
from .test_draft_model import guesses, play

LOOKUPS = st.builds(
    lambda shortest, more, children, matches: PromptLookup(
        VOCABULARY, longest=shortest + more, shortest=shortest, most_children=children, most_matches=matches
    ),
    st.integers(1, 2),
    st.integers(0, 5),  # longer than short texts
    st.integers(1, 4),
    st.integers(1, 8),
)


def followers(lookup: PromptLookup, text: list[int], path: list[int]) -> list[int]:
    """Guesses below a path of guesses, best first, by the definition and over the whole text.

    match : (length, end)  the text up to ``end`` ends in the last ``length`` tokens of all of it
    """
    matches = []
    for end in range(1, len(text)):
        fitting = [
            length
            for length in range(lookup.shortest, lookup.longest + 1)
            if length <= end and text[end - length : end] == text[-length:]
        ]
        if fitting:
            matches.append((max(fitting), end))
    matches = sorted(matches, reverse=True)[: lookup.most_matches]
    passing: dict[int, list[tuple[int, int]]] = {}
    for length, end in matches:
        at = end + len(path)
        if text[end:at] == path and at < len(text):
            passing.setdefault(text[at], []).append((length, end))

    def order(token: int) -> tuple[list[int], tuple[int, int]]:
        count = Counter(length for length, _ in passing[token])
        lengths = range(lookup.longest, lookup.shortest - 1, -1)
        return [count[length] for length in lengths], max(passing[token])

    return sorted(passing, key=order, reverse=True)[: lookup.most_children]


@given(
    lookup=LOOKUPS, tree=trees(most_nodes=14, depth=5, ranks=4), seed=st.integers(0, 10**6), letters=st.integers(1, 4)
)
def test_guesses_follow_the_definition(lookup, tree, seed, letters):
    for text, tokens, _ in play(lookup, seed, tree, vocab_size=letters, rounds=12):

        def ranked(texts: list[list[int]], text: list[int] = text) -> list[list[int]]:
            return [followers(lookup, text, path[len(text) :]) for path in texts]

        assert [tokens] == guesses(tree, [text], ranked)


@given(
    lookup=LOOKUPS,
    seed=st.integers(0, 10**6),
    letters=st.integers(1, 4),
    end=st.sampled_from(End),
    top_k=st.integers(1, 5),
)
def test_ranks_are_places_in_what_would_be_proposed(lookup, seed, letters, end, top_k):
    rng = random.Random(seed)
    answers = []
    for _ in range(2):
        prompt, tokens = ([rng.randrange(letters) for _ in range(rng.randint(1, 15))] for _ in range(2))
        answers.append(GivenText(prompt, tokens, end, torch.zeros(0)))
    for answer, ranks in zip(answers, lookup.ranks(answers, top_k), strict=True):
        expected = answer.labels(lookup.num_heads).tolist()
        for t, row in enumerate(expected):
            text, path = [*answer.prompt, *answer.tokens[: t + 1]], []
            for k, label in enumerate(row):
                if label >= 0:
                    found = followers(lookup, text, path)
                    row[k] = found.index(label) if label in found[:top_k] else MISS
                    # Below a child that is not kept there is nothing, though the text has it.
                    path = [*path, label] if label in found else [-1]
        assert ranks.dtype == "int16"
        assert ranks.tolist() == expected


@given(seed=st.integers(0, 10**6), letters=st.integers(2, 4))
def test_the_ranks_along_the_text_are_those_of_the_proposal(seed, letters):
    """Without the definition: every state's proposal on a full tree against the trace."""
    rng = random.Random(seed)
    lookup = PromptLookup(VOCABULARY, num_heads=3, longest=2)
    prompt, tokens = ([rng.randrange(letters) for _ in range(12)] for _ in range(2))
    (ranks,) = lookup.ranks([GivenText(prompt, tokens, End.LIMIT, torch.zeros(0))], 4)
    tree = Tree.dense([4, 4, 4])
    plan, draft = TreeTensors.of(tree, torch.device("cpu")), lookup.start(1, 0)
    draft.prefill([prompt], torch.zeros(1, 12, 3))
    for t, root in enumerate(tokens[:-1]):
        (found,) = draft.propose(plan, torch.tensor([root]), lambda part: None).tolist()
        node = 0
        for k, true in enumerate(tokens[t + 1 : t + 4]):
            children = [c for c in range(len(tree)) if node >= 0 and tree.parents[c] == node]
            node = next((c for c in children if found[c] == true), -1)
            assert ranks[t, k] == (tree.ranks[node] if node >= 0 else MISS)
        draft.extend([[root]], torch.zeros(1, 1, 3), [[0]])


def proposed(lookup: PromptLookup, text: list[int], tree: Tree) -> list[int]:
    draft = lookup.start(1, 0)
    draft.prefill([text[:-1]], torch.zeros(1, len(text) - 1, 3))
    plan = TreeTensors.of(tree, torch.device("cpu"))
    return draft.propose(plan, torch.tensor(text[-1:]), lambda part: None)[0, 1:].tolist()


def test_a_guess_is_what_followed():
    a, b, c, d, e = range(5)
    lookup = PromptLookup(9)
    assert proposed(lookup, [a, b, c, d, e, a, b], Tree.chain(4)) == [c, d, e, a]
    assert proposed(lookup, [a, b, c, a], Tree.chain(4)) == [b, c, a, -1]  # no further than the root
    assert proposed(lookup, [a, b, c], Tree.chain(2)) == [-1, -1]


def test_more_longer_and_later_matches_come_first():
    x, y = 7, 8
    lookup, two = PromptLookup(9, longest=2), Tree.dense([2])
    assert proposed(lookup, [x, 1, x, 2, x], two) == [2, 1]  # the later
    assert proposed(lookup, [x, 1, x, 1, 0, x, 2, x], two) == [1, 2]  # the more
    assert proposed(lookup, [y, x, 1, x, 2, x, 2, y, x], two) == [1, 2]  # the longer
    longest_only = dataclasses.replace(lookup, shortest=2)
    assert proposed(longest_only, [y, x, 1, x, 2, x, 2, y, x], two) == [1, -1]


def test_only_so_many_matches_and_children_are_read():
    x = 7
    text, three = [x, 1, x, 1, x, 2, x, 3, x], Tree.dense([3])
    assert proposed(PromptLookup(9, longest=1), text, three) == [1, 3, 2]
    assert proposed(PromptLookup(9, longest=1, most_matches=2), text, three) == [3, 2, -1]
    assert proposed(PromptLookup(9, longest=1, most_children=2), text, three) == [1, 3, -1]
    assert PromptLookup(9, most_children=2).draft_vocab_size == 2


def test_guesses_past_eos_are_misses_and_past_the_limit_no_trials():
    for end, beyond in ((End.EOS, MISS), (End.LIMIT, NO_TRIAL), (End.CONTEXT, NO_TRIAL), (End.LOOP, NO_TRIAL)):
        (ranks,) = PromptLookup(9, num_heads=2).ranks([GivenText([1, 2, 3], [1, 2, 3], end, torch.zeros(0))], 4)
        assert ranks.tolist() == [[0, 0], [0, beyond], [NO_TRIAL, NO_TRIAL]]


def test_shorter_matches_behind_the_longest_accept_more():
    """Why the trie takes them: top-4 guesses on Shakespeare's letters, with and without."""
    text = list((DATA / "shakespeare.txt").read_bytes())
    answer = GivenText(text[:2000], text[2000:], End.LIMIT, torch.zeros(0))
    with_shorter, longest_only = (
        int((PromptLookup(256, num_heads=1, shortest=n).ranks([answer], 4)[0] >= 0).sum()) for n in (1, 3)
    )
    assert with_shorter > 1.2 * longest_only
