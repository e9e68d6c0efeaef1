"""TensorRT-LLM's SA with its global pool: the longest suffix of a text, up to 64 tokens, that stood in any of the pool's texts.

The pool has the prompts and answers of the requests that run and of the last that finished, in slots; without a free one the
request that finished first goes. Of equally long matches the request's own is copied, then the one behind which most tokens stand; which
of others that are equal in this, too, depends on slots, and here it is the first. Each text has a suffix automaton, whose state
is a set of n-grams that end at the same places of the text.

states  : (rows, 5) of all automata, in columns; row 0 stands for none
edges   : from a state (PARENT) by a token to another (TARGET); the edges of a state are a list (LATER)
texts   : (slots, 5) in columns; a slot is free where BORN is 0
cursors : (slots, 4) of a request: where its last tokens lead in each text (STATE, MATCHED), and which text that was (SEEN, SINCE)

Source: TensorRT-LLM ecd0a15, cpp/tensorrt_llm/kernels/speculativeDecoding/suffixAutomaton/, _torch/speculative/suffix_automaton.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from treeopt.errors import InvalidInput
from treeopt.text import tries
from treeopt.text.rules import Draft, TextDrafter
from treeopt.text.tries import Ints

LENGTH, LINK, END, EDGES, BEFORE = range(
    5
)  # longest n-gram, state of shorter ones, first place behind it, edges, older state
ROOT, LAST, SIZE, NEWEST, BORN = range(5)  # states of a text, its tokens, its newest state, and when it came
STATE, MATCHED, SEEN, SINCE = range(4)
TARGET, LATER = tries.A, tries.B
MOST = 64  # tokens of a suffix


class Automata(NamedTuple):
    """states, edges, spare (2,) states that were ever used and the first free one of them, texts"""

    states: Ints
    edges: tries.Trie
    spare: Ints
    texts: Ints


@tries.compiled
def new_state(automata: Automata, slot: int, length: int, end: int) -> int:
    """A state of a text without link and edges."""
    states, spare, texts = automata.states, automata.spare, automata.texts
    state = int(spare[1] or spare[0])
    if spare[1]:
        spare[1] = states[state, BEFORE]
    else:
        spare[0] += 1
    states[state] = 0
    states[state, LENGTH], states[state, END], states[state, BEFORE] = length, end, texts[slot, NEWEST]
    texts[slot, NEWEST] = state
    return state


@tries.compiled
def connect(automata: Automata, state: int, token: int, target: int) -> None:
    """Add an edge."""
    edge = tries.add(automata.edges, state, token)
    automata.edges.nodes[edge, TARGET], automata.edges.nodes[edge, LATER] = target, automata.states[state, EDGES]
    automata.states[state, EDGES] = edge


@tries.compiled
def extend(automata: Automata, slot: int, tokens: Ints) -> None:
    """Lengthen a text."""
    states, edges, text = automata.states, automata.edges, automata.texts[slot]
    for token in tokens:
        text[SIZE] += 1
        new, state = new_state(automata, slot, text[SIZE], text[SIZE]), int(text[LAST])
        while state and tries.find(edges, state, token) == 0:
            connect(automata, state, token, new)
            state = int(states[state, LINK])
        text[LAST], states[new, LINK] = new, text[ROOT]
        if state == 0:
            continue
        old = int(edges.nodes[tries.find(edges, state, token), TARGET])
        if states[old, LENGTH] == states[state, LENGTH] + 1:
            states[new, LINK] = old
            continue
        split = new_state(automata, slot, states[state, LENGTH] + 1, states[old, END])
        edge = int(states[old, EDGES])
        while edge:
            connect(automata, split, edges.nodes[edge, tries.TOKEN], edges.nodes[edge, TARGET])
            edge = int(edges.nodes[edge, LATER])
        states[split, LINK] = states[old, LINK]
        states[old, LINK] = states[new, LINK] = split
        edge = tries.find(edges, state, token)
        while edge and edges.nodes[edge, TARGET] == old:
            edges.nodes[edge, TARGET], state = split, int(states[state, LINK])
            edge = tries.find(edges, state, token) if state else 0


@tries.compiled
def free(automata: Automata, slot: int) -> None:
    """Take a text out."""
    states, state = automata.states, int(automata.texts[slot, NEWEST])
    while state:
        edge = int(states[state, EDGES])
        while edge:
            gone, edge = edge, int(automata.edges.nodes[edge, LATER])
            tries.drop(automata.edges, gone)
        gone, state = state, int(states[state, BEFORE])
        states[gone, BEFORE], automata.spare[1] = automata.spare[1], gone
    automata.texts[slot] = 0


@tries.compiled
def follow(automata: Automata, cursor: Ints, text: Ints, window: Ints, new: int, most: int) -> None:
    """Take a cursor along the new tokens at the end of a window, or all of it if the text is not what it was."""
    states, edges = automata.states, automata.edges
    if cursor[SEEN] != text[SIZE] or cursor[SINCE] != text[BORN]:
        cursor[STATE], cursor[MATCHED], cursor[SEEN], cursor[SINCE], new = (
            text[ROOT],
            0,
            text[SIZE],
            text[BORN],
            len(window),
        )
    for token in window[max(len(window) - new, 0) :]:
        state, edge = int(cursor[STATE]), tries.find(edges, int(cursor[STATE]), token)
        while edge == 0 and states[state, LINK]:
            state = int(states[state, LINK])
            cursor[MATCHED], edge = states[state, LENGTH], tries.find(edges, state, token)
        if edge:
            state = int(edges.nodes[edge, TARGET])
            cursor[MATCHED] = min(cursor[MATCHED] + 1, most)
        while states[states[state, LINK], LENGTH] >= max(cursor[MATCHED], 1):
            state = int(states[state, LINK])
        cursor[STATE] = state


@tries.compiled
def search(automata: Automata, own: int, window: Ints, new: int, cursors: Ints, most: int) -> tuple[int, int]:
    """The slot of the match, and the place behind it; 0 for none."""
    states, texts, best, found = automata.states, automata.texts, (0, 0, 0), (0, 0)
    for slot in range(len(texts)):
        text, matched = texts[slot], most
        if text[BORN] == 0:
            continue
        if slot == own:
            state = int(text[LAST])
        else:
            follow(automata, cursors[slot], text, window, new, most)
            state, matched = int(cursors[slot, STATE]), int(cursors[slot, MATCHED])
        while states[state, END] == text[SIZE] and state != text[ROOT]:
            state = int(states[state, LINK])
        matched = min(matched, int(states[state, LENGTH]))
        while states[states[state, LINK], LENGTH] >= max(matched, 1):
            state = int(states[state, LINK])
        value = (matched, int(slot == own), int(text[SIZE] - states[state, END]))
        if matched and value > best:
            best, found = value, (slot, int(states[state, END]))
    return found


@dataclass(eq=False)
class PoolText:
    """A request's text: its slot, how many tokens came since it was looked up, and cursors."""

    slot: int
    new: int
    cursors: Ints


@dataclass
class TextPool(TextDrafter):
    """A drafter by SA's global pool.

    length, longest : K, and most tokens of a match
    slots           : texts of the pool
    finished        : slots of requests that finished, the oldest first
    """

    length: int
    longest: int | None = None
    slots: int = 64
    finished: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.most = min(self.longest or MOST, MOST)
        if min(self.length, self.most, self.slots) < 1:
            raise InvalidInput(
                "SA's pool drafts at least 1 token behind matches of at least 1 from at least 1 text, but got "
                f"{self.length} behind {self.longest} from {self.slots}."
            )
        self.texts: list[list[int]] = [[] for _ in range(self.slots)]
        arrays = (np.zeros((1, 5), np.int32), tries.new_trie(1), np.array([1, 0], np.int32))
        self.automata, self.born = Automata(*arrays, np.zeros((self.slots, 5), np.int32)), 0

    def start(self, prompt: Sequence[int]) -> PoolText:
        born = self.automata.texts[:, BORN]
        if born.all():
            if not self.finished:
                raise InvalidInput(
                    f"SA's pool has {self.slots} slots, but more requests ran at once: set `global_pool_size` higher."
                )
            free(self.automata, self.finished.pop(0))
        slot, self.born = int(born.argmin()), self.born + 1
        self.texts[slot] = []
        self._make_room(len(prompt) + 1)
        root = new_state(self.automata, slot, 0, 0)
        self.automata.texts[slot] = root, root, 0, root, self.born
        state = PoolText(slot, 0, np.zeros((self.slots, 4), np.int32))
        self.commit(state, prompt, 0)
        return state

    def _make_room(self, tokens: int) -> None:
        """Room for more tokens: a text has at most 2 states and 3 edges for each."""
        automata, size = self.automata, sum(map(len, self.texts)) + tokens
        if 2 * size + self.slots + 1 > len(automata.states):
            automata.states.resize((4 * size + self.slots, 5), refcheck=False)
            self.automata = automata._replace(edges=tries.grown(automata.edges, 6 * size))

    def draft(self, state: PoolText, left: int) -> Draft:
        window = np.array(self.texts[state.slot][-self.most :], np.int32)
        slot, end = search(self.automata, state.slot, window, state.new, state.cursors, self.most)
        state.new = 0
        return Draft(self.texts[slot][end : end + self.length] if end else [], 1 + self.length)

    def commit(self, state: PoolText, tokens: Sequence[int], accepted: int) -> None:
        self._make_room(len(tokens))
        extend(self.automata, state.slot, np.array(tokens, np.int32))
        self.texts[state.slot] += tokens
        state.new += len(tokens)

    def stop(self, state: PoolText) -> None:
        self.finished.append(state.slot)
