"""Triton's TensorRT-LLM backend: ``medusa_choices`` in config.pbtxt, as a string of paths in braces.

A string that its parser cannot read is logged as a warning, and the default tree of 63 nodes is served. What
it can read only in part is cut silently.
"""

from treeopt.engines import tensorrt_trees
from treeopt.engines.base import COMMANDS, About, Method, ServingEngine, Written
from treeopt.engines.lists import no_tree
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges, only
from treeopt.trees.tree import Tree

CONFIG = "config.pbtxt"


def write(served: Ranges[Tree], about: About) -> Written:
    """The parameters for tensorrt_llm/config.pbtxt, and the command that fills them into its template."""
    tree, built = only(served), tensorrt_trees.write(served, about)
    text = ",".join("{" + ", ".join(map(str, path)) + "}" for path in tree.choices)
    parameters = "".join(
        f'parameters: {{ key: "{key}"  value: {{ string_value: "{value}" }} }}\n'
        for key, value in (("decoding_mode", "medusa"), ("medusa_choices", text))
    )
    argument = "decoding_mode:medusa,medusa_choices:" + text.replace(",", "\\,")
    command = f"python3 tools/fill_template.py -i tensorrt_llm/config.pbtxt {shell_word(argument)}"
    build = built.files[COMMANDS].split("# Run (greedy")[0]
    return Written(files={CONFIG: parameters, COMMANDS: f"{build}{command}\n"}, command=command, notes=built.notes)


def refuses(served: Ranges[Tree], about: About) -> str | None:
    """Why Triton refuses to decode without a tree, or with one that its engine was not built for."""
    return no_tree(served, about) or tensorrt_trees.too_many(served, about)


ENGINE = ServingEngine(
    name="triton", title="Triton, TensorRT-LLM backend", methods=(
    Method(name="medusa", checked="main before PR #858", drafters=("medusa",), limits=tensorrt_trees.limits(shape="any"),
           refuses=refuses,
           carrier="medusa_choices in tensorrt_llm/config.pbtxt", syntax="{0},{1},{0, 0}",
           derived=("max_draft_len = choices",), heeds=("max_draft_len",), versions="TensorRT engines, up to 1.2",
           status="removed upstream in PR #858",
           source="triton-inference-server/tensorrtllm_backend inflight_batcher_llm/src/utils.cc, docs/model_config.md",
           write=write),
))  # fmt: skip
