"""Engines that build Medusa's buffers from Medusa's list: Medusa itself, its fork Hydra, NVIDIA Model Optimizer's benchmark.

All candidates lie in one row: the root's token, then ten of every head (medusa/model/utils.py). A node points at candidate
1 + rank + 10 x (depth - 1), so that rank 10 of one head is rank 0 of the next. Nothing checks that.

Hydra drafts by how many children a node has and how many of them expand, so that it takes trees in which the likeliest do. Model
Optimizer has no search for trees; its list goes to keyword arguments of SPECBENCH_MEDUSA in examples/specdec_bench.
"""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates, no_tree
from treeopt.trees.limits import EngineLimits
from treeopt.trees.tree import MAX_RANK

TOPK = MAX_RANK + 1  # candidates of a head, and the stride between heads
FILE = "runtime_params.yml"
write = Templates(
    files={"medusa_choices.py": "treeopt_{nodes} = {choices}\n", "medusa_choices.json": "{choices}\n"},
    command="python llm_judge/gen_model_answer_medusa.py --model-path HEADS --model-id treeopt --medusa-choices {word}{flags}",
    notes=(
        "In your own code: model.medusa_generate(input_ids, medusa_choices=treeopt_...{arguments}), one sequence at a time.",
        "The script takes the temperature from each question's category, whatever --temperature says; medusa_generate heeds it.",
    ),
)
write_hydra = Templates(
    files={"hydra_choices.py": "treeopt_{nodes} = {choices}\n"},
    command="python llm_judge/gen_model_answer_hydra.py --model-path HEADS --model-id treeopt --hydra-choices {word}{flags}",
    notes=(
        "In your own code: model.hydra_generate(input_ids, hydra_choices=treeopt_...{arguments}), one sequence at a time.",
    ),
)
write_modelopt = Templates(
    files={FILE: "engine_args:\n  medusa_num_heads: {heads}\n  medusa_choices: {choices}\n"},
    command="python run.py --engine SPECBENCH_MEDUSA --tokenizer MODEL --model_dir MODEL --draft_model_dir HEADS "
    f"--tp_size 1 --concurrency 1 --mtbench QUESTIONS --runtime_params {FILE}",
    notes=("Run it in examples/specdec_bench.",),
)


ENGINES = (
    ServingEngine(name="hydra", title="Hydra", methods=(
        Method(name="choices", checked="main 3f39fbd of 2024-02", drafters=("hydra",), limits=EngineLimits(shape="low-rank-expands", max_rank=MAX_RANK),
               rules=("greedy", "typical"), max_batch_size=1, refuses=no_tree,
               carrier="hydra/model/hydra_choices.py, hydra_generate(hydra_choices=...), --hydra-choices",
               source="zankner/Hydra hydra/model/utils.py", write=write_hydra),
    )),
    ServingEngine(name="medusa", title="Medusa", methods=(
        Method(name="choices", checked="main e2a5d20 of 2024-04", drafters=("medusa",), rules=("greedy", "typical"),
               limits=EngineLimits(shape="any", max_rank=MAX_RANK), max_batch_size=1, refuses=no_tree,
               carrier="medusa/model/medusa_choices.py, medusa_generate(medusa_choices=...), --medusa-choices",
               source="FasterDecoding/Medusa medusa/model/utils.py, llm_judge/gen_model_answer_medusa.py", write=write),
    )),
    ServingEngine(name="modelopt", title="Model Optimizer, specdec_bench", package="nvidia-modelopt", methods=(
        Method(name="specbench-medusa", checked="0.47.0, benchmark a2fbac7 of 2026-08", drafters=("medusa",), max_batch_size=1,
               limits=EngineLimits(shape="any", max_rank=MAX_RANK), refuses=no_tree,
               carrier="engine_args in the YAML of --runtime_params",
               source="NVIDIA/Model-Optimizer examples/specdec_bench/specdec_bench/models/specbench_medusa.py, "
                      "modelopt/torch/speculative/utils.py", write=write_modelopt),
    )),
)  # fmt: skip
