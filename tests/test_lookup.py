"""Prompt lookup guesses what its definition says, read off the whole text anew for every node."""

import dataclasses
from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.records.trace import End
from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.runtime.drafters.protocol import GivenText, TreeTensors
from treeopt.trees.tree import Tree

from .conftest import DATA, VOCABULARY, examples, trees
from .slow_drafters import check_proposals, check_ranks

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


def slow_lookup(lookup: PromptLookup, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The same behind a path; below a child that is not kept there is nothing, though the text has it."""
    kept = all(token in followers(lookup, [*text, root], path[:i]) for i, token in enumerate(path))
    return followers(lookup, [*text, root], path) if kept else []


@examples(25)
@given(
    lookup=LOOKUPS, tree=trees(most_nodes=14, depth=5, ranks=4), seed=st.integers(0, 10**6), letters=st.integers(1, 4)
)
def test_guesses_follow_the_definition(lookup, tree, seed, letters):
    check_proposals(lookup, slow_lookup, seed=seed, trees=[tree], letters=letters)


@given(lookup=LOOKUPS, seed=st.integers(0, 10**6), letters=st.integers(1, 4), top_k=st.integers(1, 5))
def test_ranks_are_places_in_what_would_be_proposed(lookup, seed, letters, top_k):
    check_ranks(lookup, slow_lookup, seed=seed, top_k=top_k, letters=letters, enough=-1)


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


def test_shorter_matches_behind_the_longest_accept_more():
    """Why the trie takes them: top-4 guesses on Shakespeare's letters, with and without."""
    text = list((DATA / "shakespeare.txt").read_bytes())
    answer = GivenText(text[:2000], text[2000:], End.LIMIT, torch.zeros(0))
    with_shorter, longest_only = (
        int((PromptLookup(256, num_heads=1, shortest=n).ranks([answer], 4)[0] >= 0).sum()) for n in (1, 3)
    )
    assert with_shorter > 1.2 * longest_only
