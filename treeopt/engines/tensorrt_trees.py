"""TensorRT-LLM's TensorRT engines, releases up to 1.2: Medusa's and EAGLE's trees.

A list goes three ways: in the YAML of the LLM API, as trtllm-bench's bare list, or literally on a command line.
For Medusa ``max_draft_len`` is the number of choices, root left out, and every step verifies max_draft_len + 1
rows: build and tree must agree. For EAGLE it is the depth.
"""

import json
from functools import partial

from treeopt.engines.base import COMMANDS, About, Written
from treeopt.engines.chains import launch, plain
from treeopt.engines.lists import listed
from treeopt.files.shell import shell_word
from treeopt.records.plan import Ranges, only
from treeopt.trees.limits import EngineLimits
from treeopt.trees.tree import Tree

OPTIONS, BENCH = "llm_api_options.yml", "medusa_choices.yml"
FOUR_BITS = 15  # it packs a rank into four bits; `MAX_RANK` is of those that look at ten candidates a head
WORD = 32  # rows of a word of its packed mask
SAFE_DEPTH = 8  # ranks are shifted as 32-bit numbers, so that those eight levels up come round again

limits = partial(EngineLimits, max_rank=FOUR_BITS, max_depth=SAFE_DEPTH)


def write(served: Ranges[Tree], about: About) -> Written:
    """The YAML of --extra_llm_api_options, the bare list of trtllm-bench, and the commands to build and run."""
    tree = only(served)
    if tree.depth == 0:
        return plain(
            f"trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --max_batch_size {about.batch_size}", "tree"
        )
    built, notes = _draft_len(about, tree)
    literal = listed(tree)
    build = f"""\
# Build for exactly this tree: a step costs max_draft_len + 1 rows, used or not.
python examples/medusa/convert_checkpoint.py --model_dir MODEL --medusa_model_dir HEADS \\
    --num_medusa_heads {about.num_heads} --num_medusa_layers {about.num_layers} --max_medusa_token_len {built} \\
    --output_dir CHECKPOINT
trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE \\
    --speculative_decoding_mode medusa --max_batch_size {about.batch_size}
"""
    run = (
        "python examples/run.py --engine_dir ENGINE --tokenizer_dir MODEL --temperature 1.0 "
        f"--medusa_choices {shell_word(literal)}"
    )
    commands = f"""\
{build if about.max_draft_len is None else ""}# Run (greedy: temperature 1.0 and num_beams 1 are what the example asserts).
{run}
# Or time it; trtllm-bench decodes one request at a time with Medusa.
trtllm-bench --model MODEL latency --engine_dir ENGINE --medusa_choices {BENCH}
"""
    options = f"""\
speculative_config:
  decoding_type: Medusa
  max_draft_len: {built}
  num_medusa_heads: {about.num_heads}
  speculative_model_dir: HEADS
  medusa_choices: {literal}
"""
    listed_alone = "".join(f"- {json.dumps(choice)}\n" for choice in tree.choices)
    notes.append("It reads the heads from medusa_lm_head.pt: treeopt convert DRAFTER --to medusa-pt --output HEADS")
    return Written(files={OPTIONS: options, BENCH: listed_alone, COMMANDS: commands}, command=run, notes=tuple(notes))


def refuses(served: Ranges[Tree], about: About) -> str | None:
    """Why a Medusa engine refuses a tree: ranks with a gap at depth 1, or more choices than it was built for."""
    first = [path[0] for path in only(served).paths[1:] if len(path) == 1]
    if first != list(range(len(first))):
        return (
            f"needs ranks without gaps at depth 1, but the tree has {first} there, and two of these would get one place"
        )
    return too_many(served, about)


def too_many(served: Ranges[Tree], about: About) -> str | None:
    """Why an engine that was built already refuses a larger tree."""
    n, built = len(only(served)) - 1, about.max_draft_len
    if built is None or n <= built:
        return None
    return (
        f"takes as many choices as its engine's max_draft_len, {built}, but this one has {n}; build the engine anew, or keep "
        f"within `budget={built + 1}`"
    )


def _draft_len(about: About, tree: Tree) -> tuple[int, list[str]]:
    """The max_draft_len that is built, and notes."""
    n = len(tree) - 1
    built = about.max_draft_len or n
    note = f"Every step costs max_draft_len + 1 rows, whatever the tree: build the engine with max_draft_len {n}."
    if n < built:
        note = f"The engine was built for {built} choices and pays for all: this tree's {n} save nothing."
    return built, [note, *mask_note(n, built)]


def mask_note(n: int, built: int) -> list[str]:
    """A warning if the packed mask has no bit for the last node; empty if it has one."""
    note = (
        f"With {n} choices and the same max_draft_len, the packed mask of the C++ runtime has no bit for "
        f"the last node: take one choice less, or build for one more (`max_draft_len={n + 1}`)."
    )
    return [note] * (n == built and built % WORD == 0)


def write_eagle(served: Ranges[Tree], about: About) -> Written:
    """``eagle_choices`` of the two-model EAGLE, in the YAML of the LLM API and on the command line."""
    tree = only(served)
    if tree.depth == 0:
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
