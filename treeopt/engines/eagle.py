"""EAGLE's own repository: EAGLE-1's static tree on branch v1, and the dynamic trees of EAGLE-2 and EAGLE-3 on main.

EAGLE-1 takes Medusa's list, and drafts and verifies it by tables of its own. All candidates lie in one row: the root's token,
then ten of every node that expands, in order. A node points at candidate 1 + rank + 10 x (expanding nodes before its parent)
(eagle/model/utils.py). Drafting keeps only the nodes that expand, in a table for each depth (eagle/model/utils_c.py).

Dynamic trees have three options; the loader also stores a ``threshold`` that it never uses:

total-token  rows verified, the root included: the best total-token - 1 nodes of the pool are kept
depth        levels after the first one, so one less than there are
top-k        nodes expanded on each level
"""

from treeopt.engines.base import About, Method, ServingEngine, Written
from treeopt.engines.templates import Templates, launch, no_tree, plain
from treeopt.records.plan import Ranges, only
from treeopt.trees.draft import Draft, DynamicLimits
from treeopt.trees.limits import EngineLimits
from treeopt.trees.tree import MAX_RANK, Tree

STATIC_NOTES = (
    "The tree is heeded on branch v1 of SafeAILab/EAGLE only: git checkout v1. On main, EAGLE-2 and EAGLE-3 make their "
    "trees while they decode, and --tree-choices is ignored.",
    "--temperature is 1 unless it is given, and then EAGLE-1 samples.",
    "It drafts fewer right guesses than planned below a node that follows one whose children have no children. The text stays right.",
)
DRAFTERS = {"eagle3": " --use_eagle3", "eagle": ""}
MODELS = "--base-model-path MODEL --ea-model-path DRAFTER"
DYNAMIC_NOTES = (
    "The script asks by the chat template of MODEL, as Llama 3's are. Those of other models have the same options.",
    "One sequence is decoded at a time. --total-token -1 would choose rows by a timing of its own.",
)


def too_flat(served: Ranges[Tree], about: About) -> str | None:
    """Why EAGLE-1 refuses a tree of depth 1."""
    if only(served).depth == 1:
        return "needs a tree of depth 2 or more, since its buffers have an IndexError on one of depth 1"
    return no_tree(served, about)


write = Templates(
    files={"choices.py": "treeopt_{nodes} = {choices}\n"},
    command="python -m eagle.evaluation.gen_ea_answer_vicuna --base-model-path MODEL --ea-model-path DRAFTER "
    "--tree-choices {word} --temperature 0",
    notes=STATIC_NOTES,
)


def other_sampling(served: Ranges[Draft], about: About) -> str | None:
    """Why EAGLE's script refuses a rule with top_p or top_k."""
    rule = about.acceptance or {}
    options = [name for name in ("top_p", "top_k") if rule.get(name)]
    if about.rule == "greedy" or not options:
        return None
    return f"samples by a temperature alone, but the plan holds for {' and '.join(options)} too; calibrate without"


def write_dynamic(served: Ranges[Draft], about: About) -> Written:
    """Command of the evaluation script, with three options for the tree and one for the temperature."""
    tree, rule = only(served), about.acceptance or {}
    temperature = f" --temperature {0 if about.rule == 'greedy' else rule.get('temperature', 1.0)}"
    if tree.depth == 0:
        command = f"python -m eagle.evaluation.gen_baseline_answer_llama3chat {MODELS}{temperature}"
        return plain(command, "tree")
    options = f"{DRAFTERS[about.drafter]} --total-token {tree.rows} --depth {tree.depth - 1} --top-k {tree.topk or 1}"
    return launch(f"python -m eagle.evaluation.gen_ea_answer_llama3chat {MODELS}{options}{temperature}", DYNAMIC_NOTES)


ENGINES = (
    ServingEngine(name="eagle1", title="EAGLE-1", methods=(
        Method(name="choices", checked="08dc06c, before EAGLE-2", drafters=("eagle",), max_batch_size=1, refuses=too_flat,
               limits=EngineLimits(shape="any", max_rank=MAX_RANK),
               carrier="eagle/model/choices.py, --tree-choices", versions="branch v1; main ignores the tree",
               source="SafeAILab/EAGLE eagle/model/utils_c.py, eagle/model/utils.py", write=write),
    )),
    ServingEngine(name="eagle2", title="EAGLE-2 and EAGLE-3", methods=(
        Method(name="dynamic-tree", checked="main cb7e084 of 2026-02", drafters=tuple(DRAFTERS), rules=("greedy", "sample"), max_batch_size=1,
               limits=EngineLimits(dynamic=DynamicLimits(), fills_levels="none"), refuses=other_sampling,
               carrier="--total-token, --depth, --top-k, or EaModel.from_pretrained(total_token=..., depth=..., top_k=...)",
               versions="branch main",
               source="SafeAILab/EAGLE eagle/model/cnets.py, eagle/model/ea_model.py", write=write_dynamic),
    )),
)  # fmt: skip
