# Every target sets up what it needs in $(VENV) on first use; a second run starts at once and needs no network.
#
#   make demo | test | fuzz | lint | bench | profile | venv | clean | help
#
# Overrides:  PYTHON=python3.12   the interpreter that creates the environment (3.10 or newer)
#             VENV=/some/where    the environment; one that exists already is kept, its torch too if it is recent enough
#             VENV_FLAGS=--system-site-packages   let the environment see the interpreter's own packages
#             TORCH=torch==2.12.0 another torch
#             ARGS="..."          further arguments of the command behind demo, test or bench

PYTHON     ?= python3
VENV       ?= .venv
VENV_FLAGS ?=
TORCH      ?= torch==2.13.0
ARGS       ?=

PY        := $(VENV)/bin/python
RUN_READY := $(VENV)/.cortiq-run
DEV_READY := $(VENV)/.cortiq-dev
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP       := $(PY) -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test fuzz lint bench profile clean

help:
	@echo "make demo    fold the small model that ships here with repair, heal it, score it; bake one (minutes on two CPU cores)"
	@echo "make test    the CPU tests; with a GPU: $(PY) -m pytest -m gpu"
	@echo "make fuzz    1,000 damaged input files of each kind (CASES=, SEED=)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   every op: correctness gate, then its speed (small shapes where there is no GPU)"
	@echo "make profile where the time of a training step goes, by op (ARGS=\"--size 4B\"; a small model where there is no GPU)"
	@echo "make venv    only the set-up, in $(VENV)"
	@echo "make clean   remove $(VENV), caches and build output"

demo: $(RUN_READY)
	$(PY) examples/demo.py $(ARGS)

# Exit status 5 is pytest's "nothing collected". Interpreter tests get a process of their own, because Triton reads
# TRITON_INTERPRET when a kernel is defined; they are run once there are any.
test: $(DEV_READY)
	$(PY) -m pytest -m "not gpu and not interpret" $(ARGS) || [ $$? -eq 5 ]
	@if grep -rqs --include='test_*.py' 'mark\.interpret' tests; then \
	  echo "tests under TRITON_INTERPRET=1"; \
	  TRITON_INTERPRET=1 $(PY) -m pytest -m interpret $(ARGS) || [ $$? -eq 5 ]; \
	fi

# A new seed each time, printed; the same one makes the same cases again. make test runs a few cases, always the same.
CASES ?= 1000
SEED  := $(or $(SEED),$(shell date +%s))

fuzz: $(DEV_READY)
	@echo "CORTIQ_FUZZ_SEED=$(SEED) CORTIQ_FUZZ_CASES=$(CASES)"
	CORTIQ_FUZZ_SEED=$(SEED) CORTIQ_FUZZ_CASES=$(CASES) $(PY) -m pytest -m fuzz -rA tests/fuzz $(ARGS)

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(RUN_READY)
	$(PY) -m bench.run $(ARGS)

# --size comes first, so that one in ARGS is the one that counts.
profile: $(RUN_READY)
	$(PY) -m bench.profile --size $$($(PY) -c 'import torch; print("0.8B" if torch.cuda.is_available() else "small")') --json $(ARGS)

venv: $(DEV_READY)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python %d.%d is too old: cortiq_kernels needs 3.10 or newer; try make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { echo "python -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# torch comes first and on its own: the wheel without CUDA where no NVIDIA GPU answers (gigabytes less), PyPI's where one does.
# An unreachable CPU index is a warning to pip; a download cut short there is tried once more with pip's usual patience.
$(RUN_READY): pyproject.toml setup.py $(wildcard csrc/*) | $(PY)
	@if $(PY) -c 'import torch, sys; v = torch.__version__.split(".")[:2]; sys.exit((int(v[0]), int(v[1])) < (2, 10))' 2>/dev/null; then \
	  echo "keeping torch $$($(PY) -c 'import torch; print(torch.__version__)')"; \
	elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then \
	  echo "installing $(TORCH) with CUDA (an NVIDIA GPU answers)"; $(PIP) "$(TORCH)"; \
	else \
	  echo "installing $(TORCH) for the CPU (no NVIDIA GPU answers)"; \
	  $(PIP) --retries 0 --timeout 5 --extra-index-url $(CPU_INDEX) "$(TORCH)" || $(PIP) --extra-index-url $(CPU_INDEX) "$(TORCH)"; \
	fi
	@echo "installing cortiq_kernels"
	@$(PIP) "setuptools>=77" "pybind11>=2.13" ninja
	@$(PIP) --no-build-isolation -e .
	@$(PY) -c 'from cortiq_kernels import native; print("native module:", native.describe())'
	@touch $@

$(DEV_READY): $(RUN_READY)
	@echo "installing the test and lint tools"
	@$(PIP) --no-build-isolation -e ".[test,lint]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info cortiq_kernels/_C* .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
