# Every recipe sets up what it needs. Nothing is installed outside .venv except Debian's prometheus.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: check test

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
