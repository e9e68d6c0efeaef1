"""AWS Neuron (NxD Inference): Medusa's list as bare JSON, and EAGLE's tree as lists of children by number.

``speculation_length`` counts the root, so both are the tree's size.
"""

import json
from collections.abc import Mapping
from typing import Any

from treeopt.engines.base import About, Method, ServingEngine, Written
from treeopt.engines.medusa import TOPK
from treeopt.engines.templates import Templates, launch, plain
from treeopt.errors import InvalidInput, quoted
from treeopt.records.plan import Ranges, only
from treeopt.trees.limits import EngineLimits
from treeopt.trees.tree import MAX_RANK, Choice, Tree, check_size

MEDUSA_FILE, TREE_FILE = "medusa_tree.json", "token_tree.json"
RUN = (
    "inference_demo --model-type llama --task-type causal-lm run --model-path MODEL --compiled-model-path COMPILED "
    "--on-device-sampling --batch-size"
)


write_medusa = Templates(
    files={MEDUSA_FILE: "{choices}\n"},
    command=f"{RUN} 1 --is-medusa --medusa-speculation-length {{size}} --num-medusa-heads {{heads}} "
    f"--medusa-tree-json {MEDUSA_FILE} --global-topk {TOPK}",
    alone=f"{RUN} {{batch_size}}",
    notes=(
        "medusa_speculation_length must be {size}, the size of the tree, and differ from every "
        "context-encoding bucket.",
        f"Its buffers have a stride of {TOPK} candidates a head, so global_topk is set to {TOPK}. Greedy only, and not in "
        "async mode.",
        "MODEL must hold medusa_heads.pt: treeopt convert DRAFTER --to neuron --output MODEL",
    ),
)


def write_tree(served: Ranges[Tree], about: About) -> Written:
    """The children of each node for ``--token-tree-json``; nodes are numbered by depth, then by path."""
    tree = only(served)
    if tree.depth == 0:
        return plain(f"{RUN} {about.batch_size}", "tree")
    children: dict[str, list[str]] = {}
    for node in range(1, len(tree)):
        children.setdefault(str(int(tree.parents[node])), []).append(str(node))
    command = (
        f"{RUN} 1 --draft-model-path DRAFTER --enable-eagle-speculation --enable-fused-speculation "
        f"--speculation-length {len(tree)} --token-tree-json {TREE_FILE}"
    )
    notes = [f"speculation_length must be {len(tree)}, the size of the tree. EAGLE-1 drafters only, greedy."]
    if not leaf_last(tree):
        notes.append(
            "In this tree a leaf comes before an inner node of its level. Neuron may gather the wrong tokens "
            "there, as its topk_permute_index reads. Compare its text with plain decoding before you rely on "
            "it."
        )
    return launch(command, notes, {TREE_FILE: f"{json.dumps(children)}\n"})


def token_tree(children: Mapping[Any, Any]) -> Tree:
    """The tree of a token-tree file. Raises InvalidInput where NxD Inference raises ValueError.

    A child's rank is its place in the list. Nodes that the root does not reach are silently left out.

    >>> token_tree({"0": ["1", "2"], "1": ["3", "4"]}).choices
    [[0], [1], [0, 0], [0, 1]]
    >>> len(token_tree({"0": ["1"], "7": ["8"]}))
    2
    """
    check_size(sum(map(len, children.values())))
    below = {int(parent): [int(child) for child in row] for parent, row in children.items()}
    if not below.get(0):
        raise InvalidInput("A token tree must give the root, 0, at least one child.")
    paths: dict[int, Choice] = {0: ()}
    waiting = [0]
    for node in waiting:  # the list grows while the loop goes through it: by breadth
        for rank, child in enumerate(below.get(node, [])):
            if child in paths:
                raise InvalidInput(f"A node of a token tree must have one parent, but {child} has two.")
            paths[child] = (*paths[node], rank)
            waiting.append(child)
    if sorted(waiting, key=lambda node: (len(paths[node]), node)) != list(range(len(waiting))):
        raise InvalidInput(f"The nodes of a token tree must be numbered by breadth, but are {quoted(waiting)}.")
    return Tree.from_choices([path for path in paths.values() if path])


def leaf_last(tree: Tree) -> bool:
    """Whether on every level the nodes with children come before those without.

    >>> leaf_last(Tree.from_choices([[0], [1], [0, 0]])), leaf_last(Tree.from_choices([[0], [1], [1, 0]]))
    (True, False)
    """
    inner = set(tree.parents[1:].tolist())
    places = [(int(tree.depths[node]), node not in inner) for node in range(len(tree))]
    return places == sorted(places)


CHECKED, SOURCE = "main 4bcdc54 of 2026-07", "aws-neuron/neuronx-distributed-inference"
ENGINES = (
    ServingEngine(name="neuron-medusa", title="AWS Neuron, Medusa", methods=(
        Method(name="medusa-tree", checked=CHECKED, drafters=("medusa",), limits=EngineLimits(shape="any", max_rank=MAX_RANK), max_batch_size=1,
               carrier="--medusa-tree-json, NeuronConfig(medusa_tree=...)",
               source=f"{SOURCE} models/config.py, inference_demo.py", write=write_medusa),
    )),
    ServingEngine(name="neuron-token-tree", title="AWS Neuron, EAGLE", methods=(
        Method(name="token-tree", checked=CHECKED, drafters=("eagle",), limits=EngineLimits(shape="sibling-closed"), max_batch_size=1,
               carrier="--token-tree-json, NeuronConfig(token_tree_config=...)", versions="current; not with EAGLE-3",
               source=f"{SOURCE} modules/eagle/token_tree.py", write=write_tree),
    )),
)  # fmt: skip
