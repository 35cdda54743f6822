# `make demo` and `make test` work from a fresh clone: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint format nightly clean

demo: $(VENV)/.ready
	$(BIN)/python examples/bagel_two_stage.py --out out $(ARGS)

test: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nightly: $(VENV)/.ready
	$(BIN)/python -m pytest -m "slow" --timeout=3600 $(ARGS)

clean:
	rm -rf $(VENV) build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and alone: its pin decides between a CPU wheel and gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@
