"""TensorRT-LLM's TensorRT engines, releases up to 1.2: Medusa's and EAGLE's trees.

A list goes three ways: in the YAML of the LLM API, as trtllm-bench's bare list, or literally on a command line.
For Medusa ``max_draft_len`` is the number of choices, root left out, and every step verifies max_draft_len + 1
rows: build and tree must agree. For EAGLE it is the depth.
"""

import json
from collections.abc import Sequence
from functools import reduce
from operator import or_

from treeopt.engines.base import COMMANDS, Choices, Request, Unknown, Written
from treeopt.engines.chains import launch, plain
from treeopt.engines.lists import as_lists, listed
from treeopt.errors import InvalidInput
from treeopt.files.shell import shell_word
from treeopt.trees.tree import Choice, Tree

OPTIONS, BENCH = "llm_api_options.yml", "medusa_choices.yml"
FOUR_BITS = 15  # it packs a rank into four bits; `MAX_RANK` is of those that look at ten candidates a head
WORD = 32  # rows of a word of its packed mask
MOST_DEPTH, RANK_BITS = 16, 4  # of a path, four bits a rank
SAFE_DEPTH = 8  # ranks are shifted as 32-bit numbers, so that those eight levels up come round again


def write(request: Request) -> Written:
    """The YAML of --extra_llm_api_options, the bare list of trtllm-bench, and the commands to build and run."""
    if (tree := request.paying_tree) is None:
        return plain(
            f"trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --max_batch_size {request.batch_size}",
            "tree",
        )
    built, notes = _draft_len(request, tree)
    literal = listed(tree)
    heads, layers, rows = map(shell_word, (request.num_heads, request.num_layers, built))
    build = f"""\
# Build for exactly this tree: a step costs max_draft_len + 1 rows, used or not.
python examples/medusa/convert_checkpoint.py --model_dir MODEL --medusa_model_dir HEADS \\
    --num_medusa_heads {heads} --num_medusa_layers {layers} --max_medusa_token_len {rows} \\
    --output_dir CHECKPOINT
trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE \\
    --speculative_decoding_mode medusa --max_batch_size {shell_word(request.batch_size)}
"""
    run = (
        "python examples/run.py --engine_dir ENGINE --tokenizer_dir MODEL --temperature 1.0 "
        f"--medusa_choices {shell_word(literal)}"
    )
    commands = f"""\
{build if request.max_draft_len is None else ""}# Run (greedy: temperature 1.0 and num_beams 1 are what the example asserts).
{run}
# Or time it; trtllm-bench decodes one request at a time with Medusa.
trtllm-bench --model MODEL latency --engine_dir ENGINE --medusa_choices {BENCH}
"""
    options = f"""\
speculative_config:
  decoding_type: Medusa
  max_draft_len: {built}
  num_medusa_heads: {request.num_heads}
  speculative_model_dir: HEADS
  medusa_choices: {literal}
"""
    listed_alone = "".join(f"- {json.dumps(choice)}\n" for choice in tree.choices)
    notes.append("It reads the heads from medusa_lm_head.pt: treeopt convert DRAFTER --to medusa-pt --output HEADS")
    return Written(files={OPTIONS: options, BENCH: listed_alone, COMMANDS: commands}, command=run, notes=tuple(notes))


def _draft_len(request: Request, tree: Tree) -> tuple[int, list[str]]:
    """The max_draft_len that is built, and notes; InvalidInput for a built engine that is too small."""
    n, built = len(tree) - 1, request.max_draft_len or len(tree) - 1
    if n > built:
        raise InvalidInput(
            f"A tree may have as many choices as the engine's max_draft_len, {built}, but this one has {n}: "
            f"search again with `budget={built + 1}`, or build the engine anew."
        )
    note = f"Every step costs max_draft_len + 1 rows, whatever the tree: build the engine with max_draft_len {n}."
    if n < built:
        note = f"The engine was built for {built} choices and pays for all: this tree's {n} save nothing."
    return built, [note, *mask_note(n, built)]


def mask_note(n: int, built: int) -> list[str]:
    """A warning where the last node's bit falls out of the packed mask, which has no word for it."""
    note = (
        f"With {n} choices and the same max_draft_len, the packed mask of the C++ runtime has no bit for "
        f"the last node: take one choice less, or build for one more (`max_draft_len={n + 1}`)."
    )
    return [note] * (n == built and built % WORD == 0)


def write_eagle(request: Request) -> Written:
    """``eagle_choices`` of the two-model EAGLE, in the YAML of the LLM API and on the command line."""
    if (tree := request.paying_tree) is None:
        return plain("trtllm-serve MODEL", "tree")
    literal, n = listed(tree), len(tree) - 1
    text = f"""\
speculative_config:
  decoding_type: Eagle
  eagle3_one_model: false
  max_draft_len: {tree.depth}
  speculative_model_dir: DRAFTER
  eagle_choices: {literal}
"""
    run = f"python examples/run.py --engine_dir ENGINE --tokenizer_dir MODEL --eagle_choices {shell_word(literal)}"
    notes = (
        "eagle_choices works with two-model EAGLE only, and was removed in PR #18210 of August 2026.",
        f"For EAGLE max_draft_len is the depth, {tree.depth}; the number of choices is max_total_draft_tokens, {n}.",
        f"The C++ runtime of examples/eagle needs an engine of num_eagle_layers {tree.depth}, --max_draft_len "
        f"{n} and every path to go down to that depth.",
        *mask_note(n, n),
    )
    return launch(run, notes, {OPTIONS: text})


def in_cpp(choices: Sequence[Sequence[int]], max_draft_len: int, num_heads: int) -> Tree:
    """The tree that the C++ runtime decodes with (cpp/tensorrt_llm/runtime/utils/speculativeChoicesUtils.cpp).

    Paths are packed four bits a rank. A node whose parent is missing is silently put below the root; rank 16
    passes its check but not its bits, and paths longer than 8 share them. InvalidInput where it fails a check of
    its own.

    >>> in_cpp([[0], [1], [0, 1]], 63, 4).choices
    [[0], [1], [0, 1]]
    >>> in_cpp([[0, 0], [1, 1]], 63, 4).choices  # no parents
    [[0], [1]]
    """
    if len(choices) > max_draft_len:
        raise InvalidInput(f"TensorRT-LLM checks numChoices <= {max_draft_len}, but there are {len(choices)}.")

    def packed(path: Sequence[int]) -> int:
        return reduce(or_, (rank << (RANK_BITS * i % 32) for i, rank in enumerate(reversed(path))), 0)

    before: dict[int, Choice] = {0: ()}
    level: dict[int, Choice] = {}
    found: list[Choice] = []
    depth = 0
    for path in sorted(choices, key=lambda path: (len(path), packed(path))):
        if max(path) > 2**RANK_BITS or len(path) > MOST_DEPTH:
            raise InvalidInput(f"TensorRT-LLM checks ranks and depths up to 16, but there is {list(path)}.")
        if len(path) > max(depth, 1) + 1:  # a list may begin at depth 2, all the same
            raise InvalidInput(f"TensorRT-LLM checks that no depth is left out, but {max(depth, 1) + 1} is.")
        if len(path) > num_heads:
            raise InvalidInput(f"TensorRT-LLM checks depths up to the heads, {num_heads}, but there is {list(path)}.")
        if len(path) != depth:
            before, level, depth = (level if depth else {0: ()}), {}, len(path)
        node = (*before.get(packed(path[:-1]), ()), path[-1])
        level[packed(path)] = node
        found.append(node)
    if len(set(found)) < len(found) == len({tuple(path) for path in choices}):
        raise InvalidInput("TensorRT-LLM's C++ packs paths into bits, and two of these paths share theirs.")
    return Tree.from_choices(found)


def in_python(choices: Sequence[Sequence[int]]) -> Tree:
    """The tree of the Python runtime (tensorrt_llm/runtime/medusa_utils.py), which adds parents that are missing.

    It numbers nodes of depth 1 by rank, so a gap there gives two nodes one number: InvalidInput.

    >>> in_python([[0, 0], [1]]).choices  # leaves alone
    [[0], [1], [0, 0]]
    """
    if len(first := {path[0] for path in choices}) <= max(first):
        raise InvalidInput("TensorRT-LLM's Python runtime gives two nodes one place: ranks have a gap at depth 1.")
    return Tree.from_choices({tuple(path[:depth]) for path in choices for depth in range(1, len(path) + 1)})


def read_cpp(choices: Choices, _: Tree) -> Tree:
    """The tree of a user's list in the C++ runtime; InvalidInput for another than was meant, ValueError where it fails."""
    lists = as_lists(choices)
    if not all(lists):
        raise Unknown
    orphans = sum(len(choice) > 1 and choice[:-1] not in lists for choice in lists)
    try:
        read = in_cpp(lists, len(lists), MOST_DEPTH)
    except InvalidInput as error:
        if str(error).startswith("TensorRT-LLM checks"):
            raise ValueError(str(error).rstrip(".")) from None
        if not orphans:
            raise
    if orphans:
        raise InvalidInput(f"{orphans} of them have no parent, and it silently puts these below the root.")
    return read


def read_python(choices: Choices, _: Tree) -> Tree:
    """The tree of a user's list in the Python runtime."""
    if not all(choices):
        raise Unknown
    return in_python(as_lists(choices))
