"""The inputs of the book, each with the commands that decide something of it.

A case is a name, the folder of `inputs/` that the run directory begins with ("" for an empty one), and commands.
In a command ``@NAME`` is the file of `inputs/`. What the last command prints as JSON is part of the answer.
"""

from typing import NamedTuple

A100 = "--profile a100-80gb--llama-33b-linear-layers --budget 64 --batch-size 1,4,32"
H200 = "--profile llama-7b--nvidia-h200-bfloat16-graphs --budget 64 --batch-size 1,4,16"
SMALL_H200 = "--profile llama-1b--nvidia-h200-bfloat16-graphs --budget 64 --batch-size 1,4"
STEPS = "profile --from-csv @steps/chains.csv --runtime"
ROWS = "profile --from-csv @steps/rows.csv --runtime"
CHAINS = "--budget 7 --batch-size 1,8,32"


class Case(NamedTuple):
    """Commands on a run directory."""

    inputs: str
    commands: tuple[str, ...]


CASES = {
    # The user's line, from what calibrate and profile measured.
    "line": Case("medusa", ("search --budget 64 --batch-size 4", "export --to tensorrt-llm", "export --to tgi", "show --json")),
    # Shipped calibrations with shipped profiles.
    "vicuna-7b-a100": Case("", (f"search --calibration vicuna-7b-medusa1 {A100}", "export --to medusa")),
    "vicuna-13b-a100": Case("", (f"search --calibration vicuna-13b-medusa1 {A100}", "export --to tensorrt-llm --batch-size 4")),
    "vicuna-33b-a100": Case("", (f"search --calibration vicuna-33b-medusa1 {A100}", "export --to modelopt --batch-size 1")),
    "vicuna-7b-h200": Case("", (f"search --calibration vicuna-7b-medusa1 {H200}", "export --to tensorrt-llm --batch-size 1")),
    "vicuna-13b-h200": Case("", (f"search --calibration vicuna-13b-medusa1 {H200}",)),
    "vicuna-7b-small-h200": Case("", (f"search --calibration vicuna-7b-medusa1 {SMALL_H200}",)),
    "vicuna-7b-chain": Case("", (f"search --calibration vicuna-7b-medusa1 {A100} --shape chain",)),
    "vicuna-7b-untimed": Case("", ("search --calibration vicuna-7b-medusa1 --budget 39", "export --to neuron-medusa")),
    "demo": Case("", ("search --calibration demo --profile demo--amd-epyc-2-cores-bfloat16 --budget 32 --batch-size 1,4",)),
    # Traces of the demo's drafters.
    "medusa": Case("medusa", ("search --budget 32", "export --to medusa", "export --to modelopt")),
    "medusa-neuron": Case("medusa", ("search --budget 16 --for neuron-medusa", "export --to neuron-medusa")),
    "medusa-tgi": Case("medusa", ("search --budget 16 --for tgi --batch-size 1", "export --to tgi")),
    "medusa-one-for-all": Case("medusa", ("search --budget 16 --batch-size 1:0.7,4:0.3", "export --to medusa")),
    "hydra": Case("hydra", ("search --budget 24 --for hydra", "export --to hydra")),
    "eagle3": Case("eagle3", ("search --budget 24", "export --to eagle2", "export --to vllm")),
    "eagle3-vllm": Case("eagle3", ("search --for vllm --budget 8", "export --to vllm")),
    "eagle3-sglang": Case("eagle3", ("search --for sglang --method dynamic-tree --budget 24", "export --to sglang")),
    "eagle3-openvino": Case("eagle3", ("search --for openvino --budget 16 --batch-size 1", "export --to openvino")),
    "eagle3-tensorrt": Case("eagle3", ("search --for tensorrt-llm --budget 8", "export --to tensorrt-llm")),
    "mtp": Case("mtp", ("search --for sglang --budget 8", "export --to sglang", "export --to vllm")),
    "mtp-llama": Case("mtp", ("search --for llama-cpp --budget 8 --batch-size 1", "export --to llama-cpp")),
    "dflash": Case("dflash", ("search --budget 24",)),
    "dflash-vllm": Case("dflash", ("search --for vllm --budget 8", "export --to vllm")),
    "dflash-sglang": Case("dflash", ("search --for sglang --budget 8 --batch-size 4", "export --to sglang")),
    # A log of requests, for drafters that copy text.
    "log-vllm": Case("log", ("search --for vllm", "export --to vllm")),
    "log-vllm-timed": Case("log", (f"{ROWS} vllm", "search --for vllm --batch-size 1,8", "export --to vllm")),
    "log-llama": Case("log", ("search --for llama-cpp", "export --to llama-cpp")),
    "log-transformers": Case("log", (f"{ROWS} transformers", "search --for transformers", "export --to transformers")),
    "log-openvino": Case("log", ("search --for openvino", "export --to openvino")),
    "log-exllamav3": Case("log", ("search --for exllamav3", "export --to exllamav3")),
    # What engines counted.
    "vllm-scrapes": Case("", ("import @counters/vllm-before.txt @counters/vllm-after.txt --drafter eagle3", f"{STEPS} vllm",
                              f"search --for vllm {CHAINS}", "export --to vllm",
                              "compare . @counters/vllm-responses.jsonl --json")),
    "vllm-log": Case("", ("import @counters/vllm.log --drafter mtp", f"{STEPS} vllm", f"search --for vllm {CHAINS}", "export --to vllm")),
    "vllm-responses": Case("", ("import @counters/vllm-responses.jsonl --drafter eagle3", f"{STEPS} vllm",
                                f"search --for vllm {CHAINS}", "export --to vllm")),
    "sglang": Case("", ("import @counters/sglang.jsonl --drafter eagle3", f"{STEPS} sglang", f"search --for sglang {CHAINS}",
                        "export --to sglang")),
    "tensorrt-scrapes": Case("", ("import @counters/trtllm-before.prom @counters/trtllm-after.prom --drafter eagle3",
                                  f"{STEPS} tensorrt-llm", f"search --for tensorrt-llm {CHAINS}", "export --to tensorrt-llm")),
    "tensorrt-responses": Case("", ("import @counters/trtllm-responses.jsonl --drafter mtp", f"{STEPS} tensorrt-llm",
                                    f"search --for tensorrt-llm {CHAINS}", "export --to tensorrt-llm")),
    "llama": Case("", ("import @counters/llama.log --drafter draft-model", f"{STEPS} llama-cpp",
                       "search --for llama-cpp --budget 7 --batch-size 1", "export --to llama-cpp")),
    "steps-then-rates": Case("", ("profile --from-csv @steps/order.csv --runtime vllm", "import @counters/rates.csv --drafter eagle3",
                                  "search --for vllm --batch-size 1", "export --to vllm")),
    "rates-then-steps": Case("", ("import @counters/rates.csv --drafter eagle3", "profile --from-csv @steps/order.csv --runtime vllm",
                                  "search --for vllm --batch-size 1", "export --to vllm")),
    "table-of-heads": Case("", ("import @counters/heads.csv --drafter medusa", "profile --from-csv @steps/trees.csv",
                                "search --budget 32 --batch-size 1,4", "export --to medusa")),
    # Trees that users bring.
    "score-published": Case("", ("score mc_sim_7b_63 --calibration vicuna-7b-medusa1 --json",)),
    "score-on-a-trace": Case("medusa", ("score mc_sim_7b_63 --json",)),
    "import-python": Case("", ("import @trees/widths.py --json",)),
    "import-json": Case("", ("import @trees/eagle.json --json",)),
    "import-command": Case("", ("import @trees/vllm.txt --json",)),
    "export-published": Case("", ("export --to medusa --tree mc_sim_7b_63", "export --to neuron-medusa --tree mc_sim_7b_63")),
}  # fmt: skip
