"""Prompt lookup guesses what its definition says, read off the whole text anew for every node."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.runtime.drafters.lookup import PromptLookup

from .conftest import VOCABULARY, examples, trees
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
