"""Prompt lookup guesses what its definition says, read off the whole text anew for every node."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from treeopt.runtime.drafters.lookup import PromptLookup
from treeopt.trees.tree import Tree

from .conftest import VOCABULARY, examples
from .helpers.slow_drafters import check_proposals, check_ranks

LOOKUPS = st.builds(lambda longest: PromptLookup(VOCABULARY, longest=longest), st.integers(1, 6))


def slow_lookup(lookup: PromptLookup, text: list[int], hidden: torch.Tensor, root: int, path: list[int]) -> list[int]:
    """The guess behind a path: what followed the earliest place of the longest n-gram that the text with its root ends in."""
    text = [*text, root]
    for length in range(min(lookup.longest, len(text) - 1), 0, -1):
        for end in range(length, len(text)):
            if text[end - length : end] == text[-length:]:
                copied = text[end:]
                return copied[len(path) :][:1] if copied[: len(path)] == path else []
    return []


@examples(25)
@given(lookup=LOOKUPS, depth=st.integers(0, 5), seed=st.integers(0, 10**6), letters=st.integers(1, 4))
def test_guesses_follow_the_definition(lookup, depth, seed, letters):
    check_proposals(lookup, slow_lookup, seed=seed, trees=[Tree.chain(depth)], letters=letters)


@given(lookup=LOOKUPS, seed=st.integers(0, 10**6), letters=st.integers(1, 4), top_k=st.integers(1, 5))
def test_ranks_are_places_in_what_would_be_proposed(lookup, seed, letters, top_k):
    check_ranks(lookup, slow_lookup, seed=seed, top_k=top_k, letters=letters, enough=-1)
