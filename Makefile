# `make demo` and `make test` are all that a newcomer needs; both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint audit docs gpu-check gpu-bench clean

# Of 25,000 files what is imported is compiled then: to compile all takes pip most of a minute.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fettle tune workloads/digits.py --max-metric-drop 0.01 --budget 3m --output demo

test: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu'

test-all: $(STAMP)
	HYPOTHESIS_PROFILE=default $(BIN)/pytest

# Both go on where they were stopped, and end with one file to send back. A Python of one's own that has torch for the
# GPU, and what the tests need, does the same: python bench/gpu.py.
gpu-check: $(STAMP)
	$(BIN)/python bench/gpu.py --only tests- --limit 3600

gpu-bench: $(STAMP)
	$(BIN)/python bench/gpu.py

# What is pinned, against the list of compromised releases that fettle ships.
audit: $(STAMP)
	$(BIN)/fettle doctor --lock constraints.txt

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) demo site build
