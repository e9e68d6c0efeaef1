"""Medusa's trees for TensorRT-LLM's TensorRT engines, in releases up to 1.2.

The list of choices goes three ways: in the YAML of the LLM API, as the bare list that trtllm-bench reads, and literally on a
command line. ``max_draft_len`` is the number of choices, the root left out. A step verifies max_draft_len + 1 rows.
"""

from functools import partial

from treeopt.engines.base import COMMANDS, About
from treeopt.engines.templates import Templates
from treeopt.records.plan import Ranges, only
from treeopt.trees.limits import EngineLimits
from treeopt.trees.tree import Tree

OPTIONS, BENCH = "llm_api_options.yml", "medusa_choices.yml"
FOUR_BITS = 15  # the largest rank that fits into its four bits; `MAX_RANK` is of engines with ten candidates a head
WORD = 32  # rows of a word of its packed mask
SAFE_DEPTH = 8  # below it the bits of a path come round again: ranks are shifted as 32-bit numbers
RUN = "python examples/run.py --engine_dir ENGINE --tokenizer_dir MODEL --temperature 1.0 --medusa_choices {word}"
BUILD_AND_RUN = f"""\
# Build for exactly this tree: a step costs max_draft_len + 1 rows, used or not.
python examples/medusa/convert_checkpoint.py --model_dir MODEL --medusa_model_dir HEADS \\
    --num_medusa_heads {{heads}} --num_medusa_layers {{layers}} --max_medusa_token_len {{nodes}} \\
    --output_dir CHECKPOINT
trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE \\
    --speculative_decoding_mode medusa --max_batch_size {{batch_size}}
# Run (greedy: temperature 1.0 and num_beams 1 are what the example asserts).
{RUN}
# Or time it; trtllm-bench decodes one request at a time with Medusa.
trtllm-bench --model MODEL latency --engine_dir ENGINE --medusa_choices {BENCH}
"""
LLM_API = """\
speculative_config:
  decoding_type: Medusa
  max_draft_len: {nodes}
  num_medusa_heads: {heads}
  speculative_model_dir: HEADS
  medusa_choices: {choices}
"""

limits = partial(EngineLimits, max_rank=FOUR_BITS, max_depth=SAFE_DEPTH)


def mask_warning(tree: Tree, about: About) -> list[str]:
    """A warning if the packed mask has no bit for the last node."""
    if (len(tree) - 1) % WORD > 0:
        return []
    return [
        f"With {len(tree) - 1} choices and the same max_draft_len, the packed mask of the C++ runtime has no bit for "
        "the last node: search again for a tree of another size."
    ]


write = Templates(
    files={OPTIONS: LLM_API, BENCH: "{lines}", COMMANDS: BUILD_AND_RUN},
    command=RUN,
    alone="trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE --max_batch_size {batch_size}",
    notes=(
        "Every step costs max_draft_len + 1 rows, whatever the tree: build the engine with max_draft_len {nodes}.",
        "It reads the heads from medusa_lm_head.pt: treeopt convert DRAFTER --to medusa-pt --output HEADS",
    ),
    warnings=mask_warning,
)


def refuses(served: Ranges[Tree], about: About) -> str | None:
    """Why a Medusa engine refuses a tree whose ranks have a gap at depth 1."""
    first = [path[0] for path in only(served).paths[1:] if len(path) == 1]
    if first == list(range(len(first))):
        return None
    return f"needs ranks without gaps at depth 1, but the tree has {first} there, and two of these would get one place"
