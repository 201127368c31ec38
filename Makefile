# Everything the project does, from nothing but python3, make and a package index. `make help` lists it.
#
# Each target installs what it needs into .venv and leaves a stamp there for it, so that a second run starts at once;
# the stamps are older than a changed pyproject.toml or constraints.txt, which installs again.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
COMPAT := build/compat
COMPAT_TORCH ?= 2.8.0 2.10.0

# Small networks, many tests: one thread for each of the two workers is faster than two threads each, and repeatable.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-gpu lint format docs bench bench-gpu bench-venv compat compat-vision clean clean-all

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: .venv/.stamp-plot  ## linearise a small network, adapt it, draw one figure into out/demo/ (seconds)
	$(BIN)/tangents demo

test: .venv/.stamp-test  ## the tests, without the slow ones and those for a GPU
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(PYTEST_ARGS)

test-all: .venv/.stamp-test  ## the tests, slow ones included
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 -m "not gpu" $(PYTEST_ARGS)

test-gpu: .venv/.stamp-test  ## the tests for a GPU (needs a CUDA build of torch)
	$(TEST_ENV) $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

lint: .venv/.stamp-lint  ## ruff (rules and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

format: .venv/.stamp-lint  ## let ruff put right what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.stamp-docs  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: bench-venv  ## the benchmarks on the CPU, into benchmarks/results/ and docs/benchmarks.md (long)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks --table

bench-gpu: bench-venv  ## the same on a GPU (needs a CUDA build of torch)
	$(BIN)/python -m benchmarks --device cuda
	$(BIN)/python -m benchmarks --table

bench-venv: .venv/.stamp-bench  ## install what the benchmarks compare with, without running them

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The package itself with one extra, editable.
.venv/.stamp-plot .venv/.stamp-test .venv/.stamp-lint .venv/.stamp-docs: .venv/.stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[$*]"
	touch $@

# curvlinops asks for backpack, and backpack for torchvision, which neither imports here. A torchvision that was built for
# another build of torch (the index's default next to a CPU torch) cannot be imported, and then nor can much of
# transformers, which uses any torchvision that is installed: so it stays only if it works.
.venv/.stamp-bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[bench]"
	$(BIN)/python -c "import torchvision" 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchvision
	touch $@

# Other versions of torch, and torchvision and timm: whole environments, gigabytes each with the default builds, so not
# part of the continuous integration. Needs an index that has these builds; COMPAT_TORCH="2.9.1" names others.
compat: $(addprefix compat-torch-,$(COMPAT_TORCH)) compat-vision  ## the tests with other versions of torch, torchvision, timm (long, large)

compat-torch-%: $(COMPAT)/constraints.txt
	test -x $(COMPAT)/torch-$*/bin/python || $(PYTHON) -m venv $(COMPAT)/torch-$*
	$(COMPAT)/torch-$*/bin/python -m pip install --quiet -c $(COMPAT)/constraints.txt "torch==$*" -e ".[test]"
	$(TEST_ENV) $(COMPAT)/torch-$*/bin/python -m pytest -n 2 -m "not slow and not gpu" $(PYTEST_ARGS)

compat-vision:
	test -x $(COMPAT)/vision/bin/python || $(PYTHON) -m venv $(COMPAT)/vision
	$(COMPAT)/vision/bin/python -m pip install --quiet -c constraints.txt torchvision timm -e ".[test]"
	$(TEST_ENV) $(COMPAT)/vision/bin/python -m pytest -n 2 -m "not gpu" $(PYTEST_ARGS)

# What the tests are pinned to, but for torch and what only one version of it accepts.
$(COMPAT)/constraints.txt: constraints.txt
	mkdir -p $(@D)
	grep -vE '^(torch|sympy|networkx|fsspec)==' $< > $@

clean:  ## remove what was built, but not .venv
	rm -rf out site build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

clean-all: clean  ## remove .venv too
	rm -rf .venv
