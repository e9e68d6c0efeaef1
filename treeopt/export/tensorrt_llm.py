"""TensorRT-LLM (TensorRT engine path, releases up to 1.2): LLM API options, trtllm-bench, build flags.

For Medusa ``max_draft_len`` is the number of choices, root left out, and every step verifies
max_draft_len + 1 rows: build and tree must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from treeopt.plan import PlanEntry


def write(entry: PlanEntry, num_heads: int, num_layers: int) -> Mapping[str, str]:
    """The YAML of --extra_llm_api_options, the bare list of trtllm-bench, and the commands."""
    choices, n = entry.medusa_choices, len(entry.medusa_choices)
    if n == 0:
        return _plain(entry)
    literal = json.dumps(choices)
    commands = f"""\
# Build for exactly this tree: a step costs max_draft_len + 1 rows, used or not.
python examples/medusa/convert_checkpoint.py --model_dir MODEL --medusa_model_dir HEADS \\
    --num_medusa_heads {num_heads} --num_medusa_layers {num_layers} --max_medusa_token_len {n} \\
    --output_dir CHECKPOINT
trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE \\
    --speculative_decoding_mode medusa --max_batch_size {entry.batch_size}
# Run (greedy: temperature 1.0 and num_beams 1 are what the example asserts).
python examples/run.py --engine_dir ENGINE --tokenizer_dir MODEL --temperature 1.0 \\
    --medusa_choices "{literal}"
# Or time it; trtllm-bench decodes one request at a time with Medusa.
trtllm-bench --model MODEL latency --engine_dir ENGINE --medusa_choices medusa_choices.yml
"""
    return {
        "llm_api_options.yml": (
            "speculative_config:\n"
            "  decoding_type: Medusa\n"
            f"  max_draft_len: {n}\n"
            f"  num_medusa_heads: {num_heads}\n"
            "  speculative_model_dir: HEADS\n"
            f"  medusa_choices: {literal}\n"
        ),
        "medusa_choices.yml": "".join(f"- {json.dumps(choice)}\n" for choice in choices),
        "commands.sh": commands,
    }


def _plain(entry: PlanEntry) -> Mapping[str, str]:
    """The same files for serving without speculation."""
    return {
        "llm_api_options.yml": f"# No tree pays at batch size {entry.batch_size}: no speculative_config.\n{{}}\n",
        "commands.sh": (
            "# No tree pays at this batch size: build the model without its heads, by its own convert script.\n"
            "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
            f"--max_batch_size {entry.batch_size}\n"
        ),
    }
