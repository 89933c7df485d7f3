# Two commands: `make demo` and `make test`. Both make .venv first, once; delete it with `make clean`.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q $(PIP_FLAGS) -c constraints.txt

# What an installation depends on: when one of these is newer than the stamp, it is installed again.
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/octavo/ops/native/*.cpp src/octavo/ops/native/*/*.cpp src/octavo/ops/native/include/*.h)
PACKAGE := $(VENV)/.octavo-installed
TESTS := $(VENV)/.octavo-tests-installed
TYPES_SAY := $(VENV)/.octavo-types
# A process a processor and one more, since some wait, each taking whole files in order: a module's reference results
# are computed once.
TEST_PROCESSES ?= -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The plugins that the tests need, by name: what installs others has pytest rewrite their packages in each process.
TEST_PLUGINS := -p xdist.plugin -p pytest_timeout -p _hypothesis_pytestplugin
# Of the engines on a GPU, side by side: their kernels are compiled meanwhile, and each takes 1 GB there.
GPU_TEST_PROCESSES ?= -n logical --maxprocesses 16 --dist loadgroup
# What is linted and formatted.
CODE := $(wildcard src tests bench tools setup.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-clients test-gpu-families lint style format clean
.NOTPARALLEL:

help:
	@echo "make demo    install Octavo into $(VENV) and generate text with the bundled model"
	@echo "make test    the same environment and the test needs; then lint, types and all CPU tests"
	@echo "make test-clients  clients from PyPI, each in an environment of its own, against a running server"
	@echo "make test-gpu-families  every family on an NVIDIA GPU with default settings, against the CPU's tokens"
	@echo "make lint    lint, format check and types only"
	@echo "make format  format the code in place"
	@echo "make clean   remove $(VENV), .venv-clients and everything that was built"

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("octavo: Python 3.11 or newer is needed; try: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# Each installation compiles the native operators anew, so `make test` makes one, with the test needs in it.
$(PACKAGE): $(SOURCES) | $(PY)
	@echo "Installing Octavo and its needs into $(VENV) (a few minutes the first time: torch is large) ..."
	$(PIP) -e .
	@touch $@

$(TESTS): $(SOURCES) | $(PY)
	@echo "Installing Octavo, its needs and the test needs into $(VENV) (a few minutes the first time) ..."
	$(PIP) -e '.[test]'
	@touch $(PACKAGE) $@

demo: $(PACKAGE)
	@$(VENV)/bin/octavo generate -v --temperature 0 --max-tokens 160 "def read_lines(path):"
	@echo
	@echo "Next, try:"
	@echo "  $(VENV)/bin/octavo generate --temperature 0.8 --seed 1 'class Stack:'"
	@echo "  $(VENV)/bin/octavo chat"
	@echo "  $(VENV)/bin/octavo doctor --explain"
	@echo "  make test"

# Each test process computes on one thread, its engines too, unless a test asks for more.
# Modules are compiled here where Python is told to keep no bytecode: else each server that a test starts does it again.
# Types are checked beside the tests: mypy takes one core, for a while. What it finds is said last.
test: $(TESTS) style
	$(PY) -m compileall -q -j 0 src
	@$(PY) -m mypy >$(TYPES_SAY) 2>&1 & types=$$!; \
	export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; \
	$(PY) -m pytest -q $(TEST_PLUGINS) $(TEST_PROCESSES); tests=$$?; \
	wait $$types || { cat $(TYPES_SAY); exit 1; }; \
	exit $$tests

test-clients: $(TESTS)
	PIP_FLAGS="$(PIP_FLAGS)" $(PY) tools/client_envs.py
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -rA -m clients tests

test-gpu-families: $(TESTS)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -m gpu $(GPU_TEST_PROCESSES) tests/gpu/test_families_gpu.py

lint: $(TESTS) style
	$(PY) -m mypy

style: $(TESTS)
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)

format: $(TESTS)
	$(PY) -m ruff check --fix-only $(CODE)
	$(PY) -m ruff format $(CODE)

clean:
	rm -rf $(VENV) .venv-clients build dist src/*.egg-info src/octavo/ops/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
