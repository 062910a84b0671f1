# Everything a developer or a user types. Idempotent: the second call does only what has changed.
#
#   make train NVME=./scratch [ARGS="--model gpt-124m"]   set up, then train on the standard library's own source
#   make test         static checks and the test suite, without slow and gpu tests
#   make check        static checks alone: ruff, formatting, mypy, import contracts
#   make test-slow    the tests marked slow          make test-gpu   the tests marked gpu
#   make test-full    all but the gpu tests; writes what the whole matrix of stages, tiers and ranks gave: docs/matrix.md
#   make build        environment and native code    make wheel      dist/*.whl, then tried without compiler and liburing
#   make map          rewrite the file map in ARCHITECTURE.md       make clean   forget environment and builds
#
# PYTHON=python3 VENV=none builds against the packages that PYTHON already has and installs nothing.

NVME ?= ./scratch
ARGS ?=
PYTHON ?= python3
VENV ?= .venv

# Compiled modules carry the interpreter's tag, and so do the stamps that say they are up to date.
TAG := $(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
SOURCES := $(shell find csrc -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.inl' -o -name '*.py')

ifeq ($(VENV),none)
PY := $(PYTHON)
STAMPS := build/existing-$(TAG)
else
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
endif
RUNTIME := $(STAMPS)/runtime
DEVELOP := $(STAMPS)/develop
NATIVE := $(STAMPS)/native

.PHONY: train test test-slow test-full test-gpu check build wheel map clean

train: build
	mkdir -p $(NVME)
	$(PY) -m infinity train --nvme $(NVME) $(ARGS)

test: check
	$(PY) -m pytest -m "not slow and not gpu"

test-slow: build $(DEVELOP)
	$(PY) -m pytest -m "slow and not gpu"

test-full: check
	MATRIX_TABLE=docs/matrix.md $(PY) -m pytest -m "not gpu"

test-gpu: build $(DEVELOP)
	$(PY) -m pytest -m gpu

check: build $(DEVELOP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())'

build: $(NATIVE)

wheel: $(DEVELOP)
	$(PY) scripts/build_wheel.py dist

map:
	$(PYTHON) scripts/update_map.py

clean:
	rm -rf .venv build dist *.egg-info infinity/*.so csrc/aio/_aio.c

ifeq ($(VENV),none)

$(RUNTIME) $(DEVELOP):
	@mkdir -p $(@D) && touch $@

$(NATIVE): setup.py $(SOURCES) $(RUNTIME)
	$(PY) setup.py -q build_ext --inplace
	@touch $@

else

# Every call is constrained, torch comes first and alone: a looser request would pull another build of it. Nothing is compiled
# to bytecode ahead of its first import: that would take longer than all the rest.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

$(RUNTIME): pyproject.toml constraints.txt scripts/requirements.py
	scripts/install-liburing
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PY) scripts/requirements.py build runtime > $(VENV)/requirements.txt
	$(PIP) --requirement $(VENV)/requirements.txt
	@mkdir -p $(@D) && touch $@

$(DEVELOP): $(RUNTIME)
	$(PY) scripts/requirements.py dev > $(VENV)/requirements-dev.txt
	$(PIP) --requirement $(VENV)/requirements-dev.txt
	@touch $@

# An editable install compiles in place and puts the `infinity` command into the environment.
$(NATIVE): setup.py $(SOURCES) $(RUNTIME)
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

endif
