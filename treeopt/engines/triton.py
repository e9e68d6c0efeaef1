"""Triton's TensorRT-LLM backend: ``medusa_choices`` in config.pbtxt, as a string of paths in braces.

A string that its parser cannot read is logged as a warning, and the default tree of 63 nodes is served. What
it can read only in part is cut silently; `vectors` is a port of the parser.
"""

import re

from treeopt.engines import tensorrt_trees
from treeopt.engines.base import COMMANDS, Method, Request, ServingEngine, Written
from treeopt.errors import InvalidInput, quoted
from treeopt.files.shell import shell_word
from treeopt.trees.tree import Tree

TITLE = "Triton's TensorRT-LLM backend"
CONFIG = "config.pbtxt"


def write(request: Request) -> Written:
    """The parameters for tensorrt_llm/config.pbtxt, and the command that fills them into its template."""
    tree = request.tree_of("triton")
    built = tensorrt_trees.write(request)
    text = braces(tree)
    parameters = "".join(
        f'parameters: {{ key: "{key}"  value: {{ string_value: "{value}" }} }}\n'
        for key, value in (("decoding_mode", "medusa"), ("medusa_choices", text))
    )
    escaped = text.replace(",", "\\,")
    command = (
        "python3 tools/fill_template.py -i tensorrt_llm/config.pbtxt "
        f"{shell_word(f'decoding_mode:medusa,medusa_choices:{escaped}')}"
    )
    build = built.files[COMMANDS].split("# Run (greedy")[0]
    return Written(files={CONFIG: parameters, COMMANDS: f"{build}{command}\n"}, command=command, notes=built.notes)


def braces(tree: Tree) -> str:
    """The choices as the backend writes them.

    >>> braces(Tree.from_choices([[0], [0, 1]]))
    '{0},{0, 1}'
    """
    return ",".join("{" + ", ".join(map(str, path)) + "}" for path in tree.choices)


def vectors(text: str) -> list[list[int]]:
    """Paths that ``csvStrToVecVecInt`` (inflight_batcher_llm/src/utils.cc) reads in a string.

    It goes from brace to brace: what stands behind a closing one is skipped up to the next comma, and a path
    without its closing brace is dropped. InvalidInput where it throws, and the default tree is served.

    >>> vectors("{0},{0, 0"), vectors("{0}{1},{2}")  # both lose a path
    ([[0]], [[0], [2]])
    >>> vectors("[[0],[0,0]]")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: Triton's backend cannot read '[[0],[0,0]]' and would serve its default tree.
    """
    refusal = InvalidInput(f"Triton's backend cannot read {quoted(text)} and would serve its default tree.")
    found: list[list[int]] = []
    begin = 0
    while (end := text.find("}", begin)) > begin:
        path = []
        for part in text[begin:end].removeprefix("{").split(","):
            if not part:
                break  # an empty number ends the path
            number = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", part)
            if number is None or len(number[1]) > 20 or not -(2**31) <= int(number[1]) < 2**31:
                raise refusal
            path.append(int(number[1]))
        found.append(path)
        comma = text.find(",", end)
        if comma < 0:
            break
        begin = next((i for i in range(comma + 1, len(text)) if text[i] not in " \t\n\v\f\r"), len(text))
    if not found:
        raise refusal
    return found


def filled_in(argument: str) -> dict[str, str]:
    """Values that tools/fill_template.py takes from its argument, by key: pairs between commas that no backslash escapes.

    Raises InvalidInput for what is no pair, on which it fails with a ValueError.

    >>> filled_in(r"a:1,b:{0}\\,{1}")
    {'a': '1', 'b': '{0},{1}'}
    >>> filled_in("b:{0},{1}")
    Traceback (most recent call last):
    treeopt.errors.InvalidInput: fill_template.py fails on '{1}', which is no pair: put a backslash before its comma.
    """
    found = {}
    for pair in re.split(r"(?<!\\),", argument):
        if pair.count(":") != 1:
            raise InvalidInput(
                f"fill_template.py fails on {quoted(pair)}, which is no pair: put a backslash before its comma."
            )
        key, value = pair.replace("\\", "").split(":")
        found[key] = value
    return found


ENGINE = ServingEngine(
    name="triton", title="Triton, TensorRT-LLM backend", readers={TITLE: tensorrt_trees.read_cpp}, counting=(TITLE,),
    methods=(
    Method(name="medusa", checked="main before PR #858", drafters=("medusa",), shape="any",
           max_rank=tensorrt_trees.FOUR_BITS, max_depth=tensorrt_trees.SAFE_DEPTH,
           carrier="medusa_choices in tensorrt_llm/config.pbtxt", syntax="{0},{1},{0, 0}",
           derived=("max_draft_len = choices",), built_for_size=True, versions="TensorRT engines, up to 1.2",
           status="removed upstream in PR #858",
           source="triton-inference-server/tensorrtllm_backend inflight_batcher_llm/src/utils.cc, docs/model_config.md",
           write=write),
))  # fmt: skip
