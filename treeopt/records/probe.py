"""The probe: which nodes of a large tree each step of decoding would have accepted.

Under typical acceptance the text depends on the tree, so that no trace of ranks tells what a tree reaches. Instead answers
are decoded with one tree, the policy, while a larger one, the probe tree, is verified in the same passes. Any part of that
is then scored on the same steps: exactly for the policy, approximately for others, whose steps would begin elsewhere.

P steps of all sequences · S sequences · T nodes of the probe tree · A accepted nodes of all steps, roots left out
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import npz, storage
from treeopt.files.bounds import MOST_ARRAY_BYTES
from treeopt.files.fields import within
from treeopt.records.trace import Answers, check_answers, read_meta
from treeopt.trees.tree import BoolArray, IntArray, Tree, read_only

SCHEMA = storage.schema("probe")


@dataclass(frozen=True, eq=False, repr=False)
class Probe(Answers):
    """What a probing run records: ``probe.npz``, where ``accepted`` and ``ends`` are packed bits.

    tree           : the probe tree
    policy         : the tree that decoding followed, a part of it
    accepted       : (P, T) bool     node accepted together with all its ancestors; the root always is
    ends           : (P, T) bool     accepted node whose token would end its sequence: EOS, the limit, a loop
    log_likelihood : (A,)   float32  of the path to each accepted node, by step and then node: of paths of one
                                     length the likeliest wins
    starts         : (S+1,) int64    sequence s has the steps starts[s]...starts[s+1]-1; it may have none
    lengths        : (S,)   int32    tokens that each sequence emitted, the first (prefilled) one included
    prompt_tokens, end, group, cluster : (S,)  as in `RankTrace`
    meta           : acceptance, drafter, EOS ids, prompt hashes, provenance, ...

    >>> tree = Tree.from_choices([[0], [1]])
    >>> both = np.array([[True, True, True]])
    >>> Probe(tree, tree, both, ~both, np.array([-0.1, -2.0]), np.array([0, 1]), np.array([3])).num_heads
    1
    """

    tree: Tree
    policy: Tree
    accepted: BoolArray
    ends: BoolArray
    log_likelihood: NDArray[np.float32]
    starts: IntArray
    lengths: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32] | None = None
    end: NDArray[np.uint8] | None = None
    group: NDArray[np.int16] | None = None
    cluster: NDArray[np.int32] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take_forms(FORMS | BITS)
        (steps, nodes), starts = self.accepted.shape, self.starts
        if nodes != len(self.tree):
            raise InvalidInput(f"accepted and ends must have {len(self.tree)} nodes, but have {nodes}.")
        rises = len(starts) > 1 and (np.diff(starts) >= 0).all()
        if not rises or starts[0] != 0 or starts[-1] != steps:
            raise InvalidInput(f"starts must rise from 0 to the number of steps, {steps}.")
        if nodes < 2 or not set(self.policy.paths) <= set(self.tree.paths):
            raise InvalidInput("A probe tree must have guesses, and hold every node of the policy.")
        above = self.accepted[:, self.tree.parents[1:]]
        if not self.accepted[:, 0].all() or (self.accepted[:, 1:] & ~above).any():
            raise InvalidInput("A node can be accepted only where its parent is, and the root always is.")
        if (self.ends & ~self.accepted).any() or self.ends[:, 0].any():
            raise InvalidInput("Only an accepted guess can end a sequence.")
        wanted = int(self.accepted[:, 1:].sum())
        if self.log_likelihood.shape != (wanted,) or not (self.log_likelihood <= 0).all():
            raise InvalidInput(
                f"log_likelihood must be at most 0 for each of {wanted} accepted nodes, and one for each."
            )

    def check(self) -> None:
        """Raise InvalidInput where a sequence is not as long as its steps with the policy make it."""
        check_answers(self, self.lengths)
        followed = np.isin(np.arange(len(self.tree)), [self.tree.paths.index(path) for path in self.policy.paths])
        guesses = np.where(self.accepted & followed, self.tree.depths, 0).max(1)
        cut = np.where((self.ends & followed).any(1), guesses, 0)  # as many may be left out
        most = 1 + np.bincount(self.sequence, 1 + guesses, self.num_sequences).astype(np.int64)
        least = most - np.bincount(self.sequence, cut, self.num_sequences).astype(np.int64)
        for s in np.flatnonzero((self.lengths > most) | (self.lengths < least))[:1].tolist():
            within(least[s], most[s], **{f"the length of sequence {s}, by its steps,": self.lengths[s]})

    @property
    def num_heads(self) -> int:
        """Depth of the probe tree: no tree beyond it can be scored."""
        return self.tree.depth

    @cached_property
    def sequence(self) -> IntArray:
        """(P,) which sequence each step belongs to."""
        return read_only(np.repeat(np.arange(self.num_sequences), np.diff(self.starts)), np.int64)

    @cached_property
    def first_end(self) -> NDArray[np.int16]:
        """(P, T) depth of the first token on the path to an accepted node that ends the sequence; 0 for none."""
        found = np.zeros(self.ends.shape, dtype=np.int16)
        steps = np.flatnonzero(self.ends.any(1))
        part = np.where(self.ends[steps], self.tree.depths, 0).astype(np.int16)
        for node in range(1, len(self.tree)):
            above = part[:, self.tree.parents[node]]
            np.copyto(part[:, node], above, where=above > 0)
        found[steps] = part
        return read_only(found, np.int16)

    def select(self, sequences: IntArray) -> Probe:
        """The probe of some of the sequences, in the given order."""
        steps = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for s in sequences])
        likelihood = np.zeros(self.accepted.shape, dtype=np.float32)
        likelihood[:, 1:][self.accepted[:, 1:]] = self.log_likelihood
        accepted = self.accepted[steps]
        return Probe(
            self.tree,
            self.policy,
            accepted,
            ends=self.ends[steps],
            log_likelihood=likelihood[steps][:, 1:][accepted[:, 1:]],
            starts=np.cumsum([0, *np.diff(self.starts)[sequences]]),
            **{name: array[sequences] for name, array in self._arrays(*PER_SEQUENCE).items()},
            meta=self.meta,
        )

    def save(self, path: str | Path) -> None:
        meta = {**self.meta, "schema": SCHEMA, "tree": self.tree.choices, "policy": self.policy.choices}
        bits = {n: np.packbits(a[:, 1:], axis=1, bitorder="little") for n, a in self._arrays(*BITS).items()}
        npz.write(path, {**self._arrays(*FORMS), **bits, "meta": np.array(json.dumps(meta, allow_nan=False))})

    @classmethod
    def load(cls, path: str | Path) -> Probe:
        arrays = npz.read(path, (*BITS, "log_likelihood", "starts", "lengths", "meta"), tuple(FORMS))
        meta = read_meta(path, arrays, SCHEMA)
        try:
            tree, policy = (_tree(meta.pop(name, None)) for name in ("tree", "policy"))
            own = npz.fitting(arrays, FORMS) | {name: _unpacked(name, arrays[name], len(tree)) for name in BITS}
            probe = cls(tree, policy, **own, meta={k: v for k, v in meta.items() if k != "schema"})
            probe.check()
            return probe
        except InvalidInput as error:
            raise InvalidInput(f"{path} is not a probe: {error}") from None


def is_probe(path: str | Path) -> bool:
    """Whether an .npz file holds a probe, by the names of its arrays; not where it cannot be read."""
    try:
        return {"accepted", "ends"} <= npz.names(path)
    except InvalidInput:
        return False


def _tree(choices: Any) -> Tree:
    if not isinstance(choices, list) or not all(isinstance(choice, list) for choice in choices):
        raise InvalidInput("its meta must list the paths of tree and policy.")
    return Tree.from_choices(choices)


def _unpacked(name: str, packed: NDArray[Any], n_nodes: int) -> BoolArray:
    """(P, T) bits of a file, the root's put in front."""
    width = -(-(n_nodes - 1) // 8)
    if packed.dtype != np.uint8 or packed.ndim != 2 or packed.shape[1] != width:
        raise InvalidInput(f"its {name} must be {width} bytes per step for {n_nodes} nodes, but are {packed.shape}.")
    if packed.size * 8 > MOST_ARRAY_BYTES:
        raise InvalidInput(f"its {name} may have {MOST_ARRAY_BYTES:,} bits, but have {packed.size * 8:,}.")
    bits = np.unpackbits(packed, axis=1, count=n_nodes - 1, bitorder="little").astype(bool)
    root = np.full((len(bits), 1), name == "accepted")
    return np.concatenate([root, bits], axis=1)


BITS = {"accepted": npz.Form(np.bool_, "steps nodes"), "ends": npz.Form(np.bool_, "steps nodes")}
FORMS = {
    "log_likelihood": npz.Form(np.float32, "accepted"),
    "starts": npz.Form(np.int64, "sequences+1"),
    "lengths": npz.Form(np.int32, "sequences"),
    "prompt_tokens": npz.Form(np.int32, "sequences"),
    "end": npz.Form(np.uint8, "sequences"),
    "group": npz.Form(np.int16, "sequences"),
    "cluster": npz.Form(np.int32, "sequences"),
}
PER_SEQUENCE = tuple(name for name, form in FORMS.items() if form.axes == "sequences")
