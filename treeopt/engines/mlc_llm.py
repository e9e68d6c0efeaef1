"""MLC-LLM: the length of a chain in ``--overrides``. It makes trees only if spec_tree_width is above 1, its default.

max_num_sequence must be at least the rows of all sequences with a draft model. Fewer than those of one sequence end the server.
"""

from treeopt.engines.base import Method, ServingEngine
from treeopt.engines.templates import Templates

MODE = "--additional-models DRAFTER --speculative-mode"
write = Templates(
    command="mlc_llm serve MODEL",
    options={
        "draft-model": f"{MODE} small_draft --overrides 'spec_draft_length={{length}};max_num_sequence={{batch_rows}}'",
        "eagle": f"{MODE} eagle --overrides spec_draft_length={{length}}",
        "medusa": f"{MODE} medusa --overrides spec_draft_length={{length}}",
    },
    notes_of={
        "draft-model": (
            "max_num_sequence is {batch_size} sequences x {rows} rows: with fewer MLC-LLM leaves sequences "
            "out of a step, and ends where not even one fits.",
        )
    },
)

ENGINE = ServingEngine(name="mlc-llm", title="MLC-LLM", server="mlc_llm serve", methods=(
    Method(name="draft-length", checked="main 1ca8b28", drafters=tuple(write.options), rules=("greedy", "reject"),
           carrier="--speculative-mode, spec_draft_length in --overrides",
           source="mlc-ai/mlc-llm python/mlc_llm/cli/serve.py, cpp/serve/engine_actions/batch_draft.cc, "
                  "cpp/serve/sampler/cpu_sampler.cc",
           write=write),
))  # fmt: skip
