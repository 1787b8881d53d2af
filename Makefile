# Every target sets itself up: a bare machine needs Python 3.11, gcc, make and pip.
.DEFAULT_GOAL := help
.PHONY: help setup setup-runtime check fmt test soak test-gpu bench proto demo demo-tiny clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP_INPUTS := pyproject.toml constraints-dev.txt
# The runtime for `make demo` is a part of what development needs; each stamp says what the environment holds.
DEV := $(VENV)/.stamp-dev
RUNTIME := $(VENV)/.stamp-runtime
GENERATED := proto/target_wire/v1
PROTO := target_wire/v1/target.proto
SOURCES := proto target_server drafter_trainer demo bench tests

# Bytecode is written, whatever the caller's environment says: without it each of the many processes that tests and demo
# start compiles torch anew, which doubles the time of a start.
export PYTHONDONTWRITEBYTECODE :=

# torch takes all cores for each process; tests run several processes on them, which then only fight.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(DEV) ## Make the development environment in .venv
setup-runtime: $(RUNTIME) ## Make only what `make demo` needs

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d: give PYTHON=..." % sys.version_info[:2])'
	@# Debian's python3 without python3-venv has no ensurepip; pip itself can then fill the environment.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

# Not compiled: most of torch and transformers is never imported, and compiling it is half of the time.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints-dev.txt

$(RUNTIME): $(VENV)/.stamp-venv $(SETUP_INPUTS)
	$(PIP_INSTALL) --editable '.[demo]'
	@touch $@

$(DEV): $(VENV)/.stamp-venv $(SETUP_INPUTS)
	$(PIP_INSTALL) --editable '.[demo,dev]'
	@# The published drafter code, an oracle of the export's tests. It pins other versions of what we share: code only.
	$(PIP_INSTALL) --no-deps dflash==0.1.0
	@touch $(RUNTIME) $@

check: $(DEV) ## Lint, types, architecture, contract and its generated code
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto
	@fresh=$$(mktemp -d) && trap 'rm -r "$$fresh"' EXIT && $(call generate,$$fresh) && \
	for file in "$$fresh"/target_wire/v1/*; do \
		diff -u "$(GENERATED)/$$(basename "$$file")" "$$file" || { echo "$(GENERATED) is not what target.proto makes: run 'make proto'" >&2; exit 1; }; \
	done

fmt: $(DEV) ## Format Python and proto
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/buf format --write proto

proto: $(DEV) ## Generate the contract's Python code
	$(call generate,proto)

# $(call generate,FOLDER): both plugins of mypy-protobuf lie beside the interpreter.
generate = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc --proto_path=proto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTO)

# Three processes on two cores, as tests also wait; a file each at a time (its tests share servers), long files first.
test: $(DEV) ## Test everything that needs no GPU
	$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder $(TESTS) $(PYTEST_ARGS)

TESTS := $(wildcard tests/faults tests/integration tests/unit tests/contract)

soak: $(DEV) ## Repeat the fault runs with N new seeds, stall a client for a minute, train every recipe: make soak N=3
	SOAK=$(or $(N),1) STALL_S=60 $(PYTEST) -v tests/faults/drafter_trainer/test_unbroken.py \
		tests/faults/drafter_trainer/test_swap_storm.py \
		tests/faults/target_server/test_stalled_client.py \
		tests/faults/target_server/test_swaps_under_fire.py \
		tests/unit/drafter_trainer/test_recipes.py tests/integration/demo/test_demo_tiny.py \
		tests/integration/bench/test_recovery.py $(PYTEST_ARGS)

test-gpu: $(DEV) ## Test what needs a CUDA device
	$(PYTEST) -m gpu $(wildcard tests/gpu) $(PYTEST_ARGS)

bench: $(DEV) ## Measure what is promised, into bench/results.json; some parts: make bench PARTS=wire,scale
	$(BIN)/python -m bench $(if $(PARTS),--only $(PARTS))

demo: $(RUNTIME) ## Train a drafter for a small real model, then decode with it (15 minutes)
	$(BIN)/python -m demo

demo-tiny: $(RUNTIME) ## The same path with a tiny model (two minutes the first time)
	$(BIN)/python -m demo --tiny

clean: ## Remove the environment and what tools leave behind
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
