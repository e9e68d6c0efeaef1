"""The probe: which nodes of a large tree each step of decoding would have accepted.

Under typical acceptance the text depends on the tree, so a trace of ranks does not tell what a tree reaches. Instead answers
are decoded with one tree, the policy, and the same passes verify a larger tree, the probe tree. Every part of the probe tree
is then scored on the same steps. The score of the policy is exact. That of another tree is approximate, because its steps
would begin at other places.

P steps of all sequences · S sequences · T nodes of the probe tree · A accepted nodes of all steps, roots left out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.errors import InvalidInput
from treeopt.files import npz
from treeopt.files.bounds import MOST_ARRAY_BYTES
from treeopt.records.trace import OF_SEQUENCES, Answers
from treeopt.trees.tree import BoolArray, IntArray, Tree, read_only

FORMS = OF_SEQUENCES | {
    "log_likelihood": npz.Form(np.float32, "accepted"),
    "lengths": npz.Form(np.int32, "sequences", least=1),
}
BITS = {"accepted": npz.Form(np.bool_, "steps nodes"), "ends": npz.Form(np.bool_, "steps nodes")}


@dataclass(frozen=True, eq=False, repr=False)
class Probe(Answers):
    """The record of a probing run: ``probe.npz``, where ``accepted`` and ``ends`` are packed bits.

    tree           : the probe tree
    policy         : the tree that decoding followed, a part of the probe tree
    accepted       : (P, T) bool     whether a node and all its ancestors were accepted; the root always is
    ends           : (P, T) bool     whether the token of an accepted node ends its sequence: EOS, the limit, a loop
    log_likelihood : (A,)   float32  of the path to each accepted node, by step and then by node; among paths of one length
                                     decoding takes the likeliest
    starts         : (S+1,) int64    sequence s has the steps starts[s]...starts[s+1]-1; it may have none
    lengths        : (S,)   int32    tokens that each sequence emitted, the first (prefilled) one included
    prompt_tokens, end, group, cluster : (S,)  as in `RankTrace`
    meta           : acceptance, drafter, EOS ids, prompt hashes, provenance, ...

    >>> tree = Tree.from_choices([[0], [1]])
    >>> both = np.array([[True, True, True]])
    >>> Probe(tree, tree, both, ~both, np.array([-0.1, -2.0]), np.array([0, 1]), np.array([3])).num_heads
    1
    """

    file_kind, title, forms = "probe", "probe", FORMS | BITS
    required = (*BITS, "log_likelihood", "starts", "lengths", "meta")
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
        self._take_forms()
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
        count = int(self.accepted[:, 1:].sum())
        if self.log_likelihood.shape != (count,) or not (self.log_likelihood <= 0).all():
            raise InvalidInput(f"log_likelihood must be {count} numbers of at most 0, one for each accepted node.")

    @property
    def num_heads(self) -> int:
        """Depth of the probe tree; deeper trees cannot be scored."""
        return self.tree.depth

    @cached_property
    def sequence(self) -> IntArray:
        """(P,) which sequence each step belongs to."""
        return read_only(np.repeat(np.arange(self.num_sequences), np.diff(self.starts)), np.int64)

    @cached_property
    def first_end(self) -> NDArray[np.int16]:
        """(P, T) depth of the first token on the path to an accepted node that ends the sequence; 0 for none."""
        first = np.zeros(self.ends.shape, dtype=np.int16)
        steps = np.flatnonzero(self.ends.any(1))
        depths = np.where(self.ends[steps], self.tree.depths, 0).astype(np.int16)
        for node in range(1, len(self.tree)):
            above = depths[:, self.tree.parents[node]]
            np.copyto(depths[:, node], above, where=above > 0)
        first[steps] = depths
        return read_only(first, np.int16)

    def select(self, sequences: IntArray) -> Probe:
        """The probe of some of the sequences, in the given order."""
        likelihood = np.zeros(self.accepted.shape, dtype=np.float32)
        likelihood[:, 1:][self.accepted[:, 1:]] = self.log_likelihood
        chosen = self._chosen(sequences)
        likelihood = likelihood[self._rows(sequences)][:, 1:][chosen["accepted"][:, 1:]]
        return Probe(self.tree, self.policy, **chosen, log_likelihood=likelihood, meta=self.meta)

    def _stored(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        bits = {name: np.packbits(self.arrays[name][:, 1:], axis=1, bitorder="little") for name in BITS}
        return self.arrays | bits, {**self.meta, "tree": self.tree.choices, "policy": self.policy.choices}

    @classmethod
    def _of_file(cls, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> Probe:
        tree, policy = _tree(meta.pop("tree", None)), _tree(meta.pop("policy", None))
        accepted, ends = (_unpacked(name, arrays[name], len(tree)) for name in BITS)
        return cls(tree, policy, accepted, ends, **npz.fitting(arrays, FORMS), meta=meta)


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
