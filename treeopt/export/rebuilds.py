"""TensorRT-LLM builds an engine for one size of tree: a script that builds and times the few worth it.

It writes ``results.csv``, which ``treeopt profile --from-csv`` reads; a second search then chooses among
the sizes that were really timed.

The report of trtllm-bench (tensorrt_llm/bench/dataclasses/reporting.py) has no latency of a step. It follows
from tokens per second and the acceptance length, which counts the target's own token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

RESULTS = "results.csv"


def rebuild_files(
    trees: Sequence[Mapping[str, Any]], *, batch_size: int, num_heads: int, num_layers: int
) -> dict[str, str]:
    """The script and one list of choices a size, in trtllm-bench's YAML.

    trees : {"size", "depth", "medusa_choices"} of each, as ``plan.json`` has them under "rebuilds"

    >>> tree = {"size": 3, "depth": 1, "medusa_choices": [[0], [1]]}
    >>> files = rebuild_files([tree], batch_size=4, num_heads=4, num_layers=1)
    >>> list(files), files["size-3.yml"]
    (['size-3.yml', 'rebuild.sh'], '- [0]\\n- [1]\\n')
    """
    files = {
        f"size-{tree['size']}.yml": "".join(f"- {json.dumps(choice)}\n" for choice in tree["medusa_choices"])
        for tree in trees
    }
    sizes = "\n".join(f"build_and_time {tree['size']} {tree['depth']}" for tree in trees)
    files["rebuild.sh"] = f"""\
#!/bin/sh
# Builds an engine of TensorRT-LLM (releases up to 1.2) for each size and times it at {batch_size} at once.
# Run it in a checkout's folder, with this folder as FOLDER:
#   MODEL=... HEADS=... DATASET=... FOLDER=... sh rebuild.sh
# MODEL and HEADS are folders; DATASET is what trtllm-bench takes (benchmarks/cpp/prepare_dataset.py).
# Releases before 1.0 know no --backend: set BACKEND= (empty) for them.
set -eu
BACKEND="${{BACKEND---backend tensorrt}}"
: "${{MODEL:?the folder of the base model}}" "${{HEADS:?the folder of medusa_lm_head.pt}}"
: "${{DATASET:?a dataset for trtllm-bench}}" "${{FOLDER:?the folder of this script}}"
echo batch_size,size,depth,tokens_per_s,tokens_per_step > "$FOLDER/{RESULTS}"

record() {{ # size depth report
    python3 - "$@" >> "$FOLDER/{RESULTS}" <<'END'
import json, sys
size, depth, path = sys.argv[1:]
report = json.load(open(path))
rate = report["performance"]["system_output_throughput_tok_s"]
steps = report.get("decoding_stats") or {{}}
accepted = 1.0 if size == "1" else steps["acceptance_length_percentiles"]["average"]
print({batch_size}, size, depth, rate, accepted, sep=",")
END
}}

build_and_time() {{ # size depth
    out="$FOLDER/size-$1"
    python3 examples/medusa/convert_checkpoint.py --model_dir "$MODEL" --medusa_model_dir "$HEADS" \\
        --num_medusa_heads {num_heads} --num_medusa_layers {num_layers} --max_medusa_token_len $(($1 - 1)) \\
        --output_dir "$out/checkpoint"
    trtllm-build --checkpoint_dir "$out/checkpoint" --output_dir "$out/engine" \\
        --speculative_decoding_mode medusa --max_batch_size {batch_size}
    trtllm-bench --model "$MODEL" latency $BACKEND --engine_dir "$out/engine" --dataset "$DATASET" \\
        --concurrency {batch_size} --medusa_choices "$FOLDER/size-$1.yml" --report_json "$out/report.json"
    record "$1" "$2" "$out/report.json"
}}

# Plain decoding, which every speedup is against: the model without its heads.
plain="$FOLDER/plain"
python3 examples/llama/convert_checkpoint.py --model_dir "$MODEL" --output_dir "$plain/checkpoint"
trtllm-build --checkpoint_dir "$plain/checkpoint" --output_dir "$plain/engine" --max_batch_size {batch_size}
trtllm-bench --model "$MODEL" latency $BACKEND --engine_dir "$plain/engine" --dataset "$DATASET" \\
    --concurrency {batch_size} --report_json "$plain/report.json"
record 1 0 "$plain/report.json"

{sizes}

echo "Now: treeopt profile --from-csv $FOLDER/{RESULTS} --runtime tensorrt-llm"
echo "     treeopt search --for tensorrt-llm --batch-size {batch_size} --measured-only"
"""
    return files
