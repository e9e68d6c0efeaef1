"""Where a text ends in a corpus: its suffix automaton, in flat arrays, as SGLang keeps one for each external corpus.

state : texts that end at the same places of the corpus, so the same follows them; 0 is that of the empty text
edge  : from a state by a token to the next one; rows of a trie's arrays, so that drafts grow from them as from a trie

Of an edge PARENT is the state it leaves and A the one it reaches; FIRST and NEXT lead through the edges behind it, the token that
was copied last first, without those over the end of a document; COUNT says how often it stands in the corpus.

Source: SGLang 0.5.23, kernels/jit/csrc/ngram_corpus/suffix_automaton.cpp and srt/speculative/cpp_ngram/external_corpus.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from treeopt.text import tries
from treeopt.text.tries import Ints

END_OF_DOCUMENT = -1  # no token
# Columns of states: the next shorter one, most tokens, places, the last of these, an edge to it.
LINK, LENGTH, COUNT, LAST, ENTRY = range(5)


class Automaton(NamedTuple):
    """edges, states (S, 5)"""

    edges: tries.Trie
    states: Ints


def joined(documents: Iterable[Sequence[int]]) -> Ints:
    """The tokens of all documents that have some, one behind the other, with an end of document between two."""
    tokens = [token for one in documents if len(one) for token in (END_OF_DOCUMENT, *one)]
    return np.array(tokens[1:], np.int32)


def automaton_of(corpus: Ints) -> Automaton:
    """The automaton of a corpus, as `joined` makes it.

    >>> automaton = automaton_of(joined([[5, 6, 7], [6, 7, 8]]))
    >>> int(automaton.states[1:, COUNT].max())  # of 6 7, and so of 6 and of 7
    2
    """
    edges, states = tries.new_trie(3 * len(corpus) + 2), np.zeros((2 * len(corpus) + 1, 5), np.int32)
    states = states[: _extend(edges, states, corpus)]
    _add_up(states, np.argsort(-states[:, LENGTH]).astype(np.int32))
    nodes = edges.nodes[: int(edges.spare[0])]
    reached = nodes[:, tries.A]
    nodes[:, tries.COUNT], nodes[:, tries.NEXT] = states[reached, COUNT], 0
    states[reached, ENTRY] = np.arange(len(nodes))
    kept = np.flatnonzero(nodes[:, tries.TOKEN] != END_OF_DOCUMENT)[1:]  # row 0 is none
    order = kept[np.lexsort((-states[reached[kept], LAST], nodes[kept, tries.PARENT]))]
    left, first = nodes[order, tries.PARENT], np.zeros(len(states), np.int32)
    nodes[order[:-1], tries.NEXT] = np.where(left[:-1] == left[1:], order[1:], 0)
    first[left[::-1]] = order[::-1]
    nodes[:, tries.FIRST] = first[reached]
    return Automaton(edges._replace(nodes=nodes), states)


@tries.compiled
def _extend(edges: tries.Trie, states: Ints, corpus: Ints) -> int:
    """Take in the corpus token by token (Blumer et al. 1985); how many states there are. ENTRY lists a state's edges meanwhile."""
    nodes, last, size = edges.nodes, 0, 1
    states[0, LINK] = -1
    for place in range(len(corpus)):
        token, state, new = int(corpus[place]), last, size
        states[new, LENGTH], states[new, COUNT], states[new, LAST] = place + 1, 1, place
        last, size = new, size + 1
        while state >= 0 and tries.find(edges, state, token) == 0:
            _connect(edges, states, state, token, new)
            state = int(states[state, LINK])
        if state < 0:
            continue
        other = int(nodes[tries.find(edges, state, token), tries.A])
        states[new, LINK] = other
        if states[other, LENGTH] == states[state, LENGTH] + 1:
            continue
        clone, size = size, size + 1
        states[clone, LINK], states[clone, LENGTH] = states[other, LINK], states[state, LENGTH] + 1
        edge = int(states[other, ENTRY])
        while edge:
            _connect(edges, states, clone, int(nodes[edge, tries.TOKEN]), int(nodes[edge, tries.A]))
            edge = int(nodes[edge, tries.NEXT])
        states[other, LINK] = states[new, LINK] = clone
        while state >= 0 and nodes[tries.find(edges, state, token), tries.A] == other:
            nodes[tries.find(edges, state, token), tries.A] = clone
            state = int(states[state, LINK])
    return size


@tries.compiled
def _connect(edges: tries.Trie, states: Ints, state: int, token: int, reached: int) -> None:
    edge = tries.add(edges, state, token)
    edges.nodes[edge, tries.A], edges.nodes[edge, tries.NEXT] = reached, states[state, ENTRY]
    states[state, ENTRY] = edge


@tries.compiled
def _add_up(states: Ints, longest_first: Ints) -> None:
    for state in longest_first[: len(states) - 1]:
        link = states[state, LINK]
        states[link, COUNT] += states[state, COUNT]
        states[link, LAST] = max(states[link, LAST], states[state, LAST])


@tries.compiled
def match(automaton: Automaton, window: Ints, anchors: Ints) -> None:
    """Put edges to where a window's endings stand in the corpus into anchors (D+1, 2), by length; 0 for none.

    Of endings that stand at the same places the longest alone is one.
    """
    edges, states = automaton
    state, length, anchors[:] = 0, 0, 0
    for token in window:
        edge = tries.find(edges, state, int(token))
        while edge == 0 and state:
            state = int(states[state, LINK])
            length = int(states[state, LENGTH])
            edge = tries.find(edges, state, int(token))
        state, length = int(edges.nodes[edge, tries.A]), length + (edge > 0)
    while state:
        anchors[length, 0] = states[state, ENTRY]
        state = int(states[state, LINK])
        length = int(states[state, LENGTH])
