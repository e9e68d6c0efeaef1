# Two commands for users, the others for CI; each sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
# Compiling all that is installed takes longer than the installation; Python compiles what it imports, once.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# `make gpu` takes the PYTHON that it is given, which may be one beside a driver; else that of .venv where there is one.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

# Tests in OpenVINO convert their models by the optimum-cli that `make .venv/.openvino` installs, and skip without it.
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test answers test-long test-all engines engines-start gpu gpu-dry lint docs pages wheel clean

demo: .venv/.installed ## Find the best tree for the built-in demo model, here, and prove it
	$(BIN)/treeopt run

test: .venv/.test ## Run the test suite, doctests included: some four minutes on two cores
	$(PYTEST)

answers: .venv/.test ## Say which answers of tests/answers moved, and by how many errors; WRITE=1 writes them anew
	$(BIN)/python -m tests.answers $(if $(WRITE),--write)

test-long: .venv/.test ## Run the long contracts, and every property on four times as many examples
	$(PYTEST) -m '(long or hypothesis) and not slow' --hypothesis-profile long

test-all: .venv/.test ## Run everything, campaigns included
	$(PYTEST) -m '' --hypothesis-profile campaign

engines: .venv/.test ## Look up in the newest engines all that is written for them and read of them (some 300 MB once)
	$(BIN)/python -m tests.engines_live

engines-start: .venv/.test ## Start the engines that run on a CPU with what is exported for them (builds llama.cpp once)
	$(BIN)/python -m pytest -m slow -s tests/engines_live/test_*_runs.py

gpu: ## Measure on the GPU here, in 25 minutes and without a network, and write its profiles and docs/gpu.md
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(DRY),--dry)

gpu-dry: .venv/.test ## Run all of that on a CPU in miniature, into build/gpu-dry
	$(BIN)/python benchmarks/gpu.py --dry

lint: .venv/.test ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.test ## Build the documentation into build/site, every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

pages: .venv/.test ## Write what README and docs show anew: outputs of commands and pictures, some ten minutes on a quiet machine
	$(BIN)/python -m tests.test_pages

wheel: .venv/.test ## Build the wheel, and test it with the sources gone
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .
	sh tests/wheel.sh

.venv/.installed: pyproject.toml constraints.txt
	began=$$(date +%s); $(PYTHON) -m venv .venv && $(PIP) --editable '.[models]' && echo "install $$(($$(date +%s) - began)) s"
	touch $@

.venv/.test: .venv/.installed
	$(PIP) --editable '.[docs,lint,test]'
	touch $@

# optimum-intel converts what OpenVINO reads, and needs other versions than treeopt. Its EAGLE-3 imports einops and diffusers
# without asking for them; torchvision is of another torch, and openvino-telemetry reports what is converted.
.venv/.openvino: .venv/.test
	$(PYTHON) -m venv --clear .venv/openvino
	.venv/openvino/bin/python -m pip install --quiet --no-compile 'optimum-intel[openvino]==2.2.0' openvino==2026.4.1 torch==2.13.0
	.venv/openvino/bin/python -m pip install --quiet --no-compile --no-deps einops 'diffusers<0.38'
	.venv/openvino/bin/python -m pip uninstall --quiet --yes torchvision openvino-telemetry
	ln -sf ../openvino/bin/optimum-cli $(BIN)/optimum-cli
	touch $@

clean:
	rm -rf .venv dist build treeopt-run
