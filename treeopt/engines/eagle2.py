"""EAGLE-2 and EAGLE-3 in EAGLE's own repository, whose main branch builds dynamic trees.

total-token  rows verified, the root included: the best total-token - 1 nodes of the pool are kept
depth        levels after the first one, so one less than there are
top-k        nodes expanded on each level

``threshold`` of its loader is stored and never used, and --tree-choices is ignored.
"""

from treeopt.engines import chains
from treeopt.engines.base import Method, Request, ServingEngine, Written
from treeopt.errors import InvalidInput

DRAFTERS = {"eagle3": " --use_eagle3", "eagle": ""}
MODELS = "--base-model-path MODEL --ea-model-path DRAFTER"
NOTES = (
    "The script asks by the chat template of MODEL, as Llama 3's are. Those of other models have the same options.",
    "One sequence is decoded at a time. --total-token -1 would choose rows by a timing of its own.",
)


def write(request: Request) -> Written:
    """The three options of the evaluation script, which hands them to ``EaModel.from_pretrained``."""
    flag = DRAFTERS[request.kind]
    tree = chains.only(request.dynamics, "EAGLE's repository takes one dynamic tree")
    temperature = _temperature(request)
    if tree is None:
        command = f"python -m eagle.evaluation.gen_baseline_answer_llama3chat {MODELS}{temperature}"
        return chains.plain(command, "tree")
    options = f"--total-token {tree.rows} --depth {tree.levels - 1} --top-k {tree.topk}"
    command = f"python -m eagle.evaluation.gen_ea_answer_llama3chat {MODELS}{flag} {options}{temperature}"
    return chains.launch(command, NOTES)


def _temperature(request: Request) -> str:
    """The only setting of sampling that the script has."""
    record = request.acceptance or {}
    if request.rule != "greedy" and (asked := [name for name in ("top_p", "top_k") if record.get(name)]):
        raise InvalidInput(
            f"EAGLE's script samples by a temperature alone, but the plan holds for {' and '.join(asked)} too: calibrate "
            "without."
        )
    return f" --temperature {record.get('temperature', 1.0) if request.rule != 'greedy' else 0}"


ENGINE = ServingEngine(name="eagle2", title="EAGLE-2 and EAGLE-3", methods=(
    Method(name="dynamic-tree", checked="main cb7e084 of 2026-02", dynamic=True, fills_levels="none", drafters=tuple(DRAFTERS),
           rules=("greedy", "sample"), max_batch_size=1,
           carrier="--total-token, --depth, --top-k, or EaModel.from_pretrained(total_token=..., depth=..., top_k=...)",
           syntax="--total-token 16 --depth 4 --top-k 4",
           derived=("total-token = rows", "depth = levels - 1", "total-token - 1 <= pool"), versions="branch main",
           source="SafeAILab/EAGLE eagle/model/cnets.py, eagle/model/ea_model.py", write=write),
))  # fmt: skip
