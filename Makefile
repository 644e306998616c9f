# Every target sets up what it needs, and work that is done is not done again: pip runs when the
# project's requirements change, the compiler when a file under csrc/ does.
# ARGS= goes to the command: make demo ARGS=--quick, make test ARGS="-k clock".

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := build/.built
EXTRAS := dev,plot
CPP_FILES := $(wildcard csrc/*.h csrc/c*/*.h csrc/c*/*.cpp csrc/cuda/*.cu bench/*.cpp tests/cuda/*.h tests/cuda/*.cpp)
LOG := build/setup.log

# With a compiler at hand a failed compile is an error; without one plain PyTorch does the work.
COMPILERS := $(if $(filter default,$(origin CXX)),c++ g++ clang++,$(firstword $(CXX)))
ifndef STEPCLOCK_NATIVE
export STEPCLOCK_NATIVE := $(if $(shell for c in $(COMPILERS); do command -v $$c; done; true),1)
endif
# The CUDA kernels take minutes for all architectures: `make gpu` and pip build them, the other
# targets run on the CPU.
export STEPCLOCK_CUDA ?= 0

# $(call quietly,announcement,command): the command's output is shown only when it fails.
define quietly
	@echo "$(1)"
	@mkdir -p $(dir $(LOG))
	@$(2) >$(LOG) 2>&1 || { cat $(LOG); exit 1; }
endef

.PHONY: help demo test lint check bench gpu clean
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

demo: $(BUILT)  ## train a small GPT, beside the plain PyTorch loop
	$(BIN)/stepclock demo $(ARGS)

# Two workers, each with one thread: a second OpenMP team would wait spinning for the first. In the
# order of the files: the long builds come early.
test: $(BUILT)  ## the tests and the examples in docstrings
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(INSTALLED)  ## ruff, mypy and clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

check: lint test  ## lint, then test

bench: $(BUILT)  ## the benchmarks; nothing else should run meanwhile
	$(BIN)/python -m pytest bench $(ARGS)

# No package is installed there. A kernel that does not compile fails its stages, not all of them.
gpu:  ## on a GPU, with the machine's own PYTHON: parity, sanitizer, races
	@began=$$(date +%s); \
	archs=$$($(PYTHON) -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') \
	  || exit 1; \
	STEPCLOCK_CUDA=1 STEPCLOCK_CUDA_ARCHS=$$archs $(PYTHON) setup.py build_ext --inplace; \
	$(PYTHON) -m gpu.run --began $$began $(ARGS)

clean:  ## remove what was built; .venv stays
	rm -rf build dist *.egg-info stepclock_ext/*.so
	rm -rf .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	$(call quietly,Creating $(VENV),$(PYTHON) -m venv $(VENV))

# The kernels are left out here: the next rule builds them, with the versions that are pinned.
$(INSTALLED): pyproject.toml constraints.txt setup.py | $(BIN)/python
	$(call quietly,Installing stepclock_ext and its tools into $(VENV),\
	  STEPCLOCK_NATIVE=0 $(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]')
	@touch $@

# The folders count as well, so that a file that went away is noticed. Without a compiler the stamp
# is not set: each run looks for one again.
$(BUILT): $(INSTALLED) $(shell find csrc)
	$(call quietly,Building the kernels from csrc,$(BIN)/python setup.py build_ext --inplace)
	@grep '^stepclock_ext:' $(LOG) || true
	@if ls stepclock_ext/_C.*.so >/dev/null 2>&1; then touch $@; fi
