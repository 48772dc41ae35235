# Every recipe sets up what it needs. Packages go into .venv; `test` also installs Debian's prometheus where it is
# missing, because one test runs a real one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -q

.PHONY: setup demo test check bench test-full test-full-engine test-full-rollout lock clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml
	@echo "Setting up $(VENV) from requirements.lock (one to three minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@# Compiling every module of every package takes a minute; Python compiles those that it imports.
	@$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-compile -r requirements.lock
	@$(BIN)/pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' 2> /dev/null || { echo "The torch that pip installed cannot be imported: the lock \
	wants its CPU build. Set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and run make clean setup"; exit 1; }
	@touch $@

demo: setup
	@$(BIN)/trimtab demo

test: setup model prometheus
	$(PYTEST) -m "not slow"

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Everything slow, in parts of at most 80 minutes each.
test-full: test test-full-engine test-full-rollout

test-full-engine: setup model
	$(PYTEST) -m slow tests/kernels tests/engine

test-full-rollout: setup model prometheus
	$(PYTEST) -m slow tests/controller tests/e2e

bench: setup model
	for name in engine_speed step_profile continuous_batching engine_techniques; do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit; done
	$(BIN)/python docs/generate.py

lock:
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/pip install --quiet -e '.[engine,dev]' 'hatchling==1.27.0' editables
	{ sed -n '1,2p' requirements.lock; .lock-venv/bin/pip freeze --exclude-editable | sed 's/+cpu//' | sort -f; } > .lock-new
	mv .lock-new requirements.lock
	rm -r .lock-venv

.PHONY: model prometheus
model: setup
	@$(BIN)/trimtab model fetch > /dev/null

prometheus:
	@command -v prometheus > /dev/null || { \
	  echo "Installing Debian's prometheus for one test"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus > /dev/null; }

clean:
	rm -rf $(VENV) .demo
