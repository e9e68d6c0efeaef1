"""TensorRT-LLM (TensorRT engine path, releases up to 1.2): LLM API options, trtllm-bench, build flags.

For Medusa ``max_draft_len`` is the number of choices, root left out, and every step verifies
max_draft_len + 1 rows: build and tree must agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from treeopt.plan import PlanEntry

PLAIN = "# No tree pays at batch size"  # begins the files for serving without speculation


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


def read(text: str) -> list[Any] | None:
    """The choices of LLM API options, of trtllm-bench's list, or of a command; None for other text.

    >>> read("- [0]\\n- [0, 0]\\n"), read('run.py --medusa_choices "[[0]]"')
    ([[0], [0, 0]], [[0]])
    """
    if text.startswith(PLAIN):
        return []
    inline = re.search(r"medusa_choices[:=\s]+[\"']?(\[\s*\[[\d\s,\[\]]*\])", text)
    listed = re.findall(r"^\s*-\s*(\[[\d\s,]*\])\s*$", text, re.M)
    if not inline and not listed:
        return None
    try:
        choices: list[Any] = json.loads(inline[1] if inline else f"[{', '.join(listed)}]")
    except json.JSONDecodeError:
        return None
    return choices


def _plain(entry: PlanEntry) -> Mapping[str, str]:
    """The same files for serving without speculation."""
    return {
        "llm_api_options.yml": f"{PLAIN} {entry.batch_size}: no speculative_config.\n{{}}\n",
        "commands.sh": (
            f"{PLAIN} {entry.batch_size}: build the model without its heads, by its own convert script.\n"
            "trtllm-build --checkpoint_dir CHECKPOINT --output_dir ENGINE "
            f"--max_batch_size {entry.batch_size}\n"
        ),
    }
