# `make train` from a fresh clone is all it takes: the first run sets up .venv, later runs start at once.
# Options go in ARGS: make train ARGS="--depth 6". Plain make 3.81 (macOS) understands this file.

# The Python that .venv is made with. One that already has PyTorch shares it: nothing large is downloaded.
PYTHON ?= python3
ARGS ?=

# When python3 is too old and no PYTHON was asked for, these are tried in its place.
ifeq ($(origin PYTHON),file)
PYTHONS = $(PYTHON) python3.13 python3.12 python3.11
EXACT =
else
PYTHONS = "$(PYTHON)"
EXACT = --exact
endif

SETUP = @for python in $(PYTHONS); do \
	if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then exec "$$python" scripts/setup.py $(EXACT) $(1); fi; done; \
	echo 'Quintic needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3' >&2; exit 1

help:
	@echo 'make train    train a small GPT and write a report to runs/   (options: ARGS="--depth 6")'
	@echo 'make compare  train the same model with Muon and with AdamW, side by side   (options: ARGS)'
	@echo 'make test     run the quick tests   (one: ARGS="-n 0 tests/test_setup.py -k cpu")'
	@echo 'make test-all run all tests, the slow ones too   (the slow ones alone: ARGS="-m slow")'
	@echo 'make clients  install the libraries whose training loops have examples, so that make test-all runs these'
	@echo 'make docs     build the manual as a site in site/   (it reads as plain Markdown, too: docs/index.md)'
	@echo 'make lint     check style and types: ruff, mypy'
	@echo 'make release  build the wheel and the sdist and check them   (to look at: ARGS="--draft")'
	@echo 'make format   rewrite the source in the house style'
	@echo 'make clean    remove .venv and caches; data/ and runs/ stay'

# QUINTIC_STARTED_BY tells the program that whoever reads its hints types make: make train ARGS="--resume".
train:
	$(call SETUP,train)
	@QUINTIC_STARTED_BY=make .venv/bin/quintic train $(ARGS)

compare:
	$(call SETUP,train)
	@QUINTIC_STARTED_BY=make .venv/bin/quintic compare $(ARGS)

# Two workers of one thread each (tests/conftest.py); the first that is done takes over half of what the other has left.
# Bytecode is kept, whatever the shell says: the processes that tests start need not compile the package each.
PYTEST = PYTHONDONTWRITEBYTECODE= .venv/bin/python -m pytest -n 2 --dist worksteal

test:
	$(call SETUP,train dev)
	@$(PYTEST) -m 'not slow' $(ARGS)

test-all:
	$(call SETUP,train dev pyright)
	@$(PYTEST) $(ARGS)

# The libraries of the examples: tests of what is not installed are skipped.
clients:
	$(call SETUP,train dev clients)

vision:
	$(call SETUP,train dev vision)

# Into the same .venv: the reference is generated from the installed package. Pages open from disk; their search needs a
# server: .venv/bin/python -m http.server -d site
docs:
	$(call SETUP,train docs)
	@NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict
	@echo 'site/index.html'

lint:
	$(call SETUP,train dev)
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m mypy

release:
	$(call SETUP,train dev)
	@.venv/bin/python scripts/release.py $(ARGS)

format:
	$(call SETUP,train dev)
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find quintic tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help train compare test test-all clients vision docs lint release format clean
