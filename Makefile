# Warren. `make run` and `make test` do all set-up by themselves; `make help` lists the rest.
# Behind a proxy or with a package mirror, configure pip as usual: nothing here names an index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Several people may run make in one tree: one at a time installs or compiles.
LOCKED := flock $(VENV)/.lock
PIP_INSTALL := $(LOCKED) $(BIN)/python -m pip install --quiet --constraint constraints.txt
KERNEL := src/warren/kernel
MODULES := $(basename $(notdir $(wildcard $(KERNEL)/*.pyx)))
# One stamp for each compiled module: build/kernel/checksum stands for warren.kernel.checksum.
STAMPS := $(addprefix build/kernel/,$(MODULES))

# make run ARGS=..., make bench ARGS=..., make test ARGS="-k journal": passed on to the command.
ARGS ?=

# Two tests at a time; those that share a Spark session stay together. PARALLEL= runs them one after the other.
PARALLEL ?= -n 2 --dist loadgroup

.PHONY: help setup kernel run demo test test-packages test-full test-compiled compiled lint bench bench-rabbitmq differential clean modules

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: kernel ## the system packages, .venv and the compiled kernel; does nothing when nothing changed

# --keep-going: a module that does not compile must not keep the others from being built.
kernel: $(VENV)/.installed ## the compiled kernel alone, in place; only what changed
	@$(MAKE) --no-print-directory --keep-going modules

modules: $(STAMPS)
	@:

run: setup ## the broker, with its data in ./data
	$(BIN)/warren serve --data-dir data $(ARGS)

test-packages:
	@scripts/system_packages.sh --tests

test: lint test-packages ## lint, then all tests at a tenth of their size
	WARREN_TEST_SCALE=small $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-full: lint test-packages ## lint, then all tests at full size; writes docs/reliability/
	WARREN_TEST_SCALE=full $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

lint: setup ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The package as it is installed from a wheel, with the logic compiled by mypyc; the tree itself stays plain Python.
COMPILED := build/compiled
$(COMPILED)/.built: $(STAMPS) $(shell find src/warren -name '*.py') setup.py pyproject.toml
	rm -rf $(COMPILED) build/lib*
	WARREN_LOGIC=compiled $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir \
		--target $(COMPILED) .
	touch $@

compiled: setup ## the package with its logic compiled by mypyc, in build/compiled
	@$(MAKE) --no-print-directory $(COMPILED)/.built

test-compiled: compiled test-packages ## all tests at a tenth of their size against the compiled package
	PYTHONPATH=$(COMPILED) WARREN_TEST_SCALE=small $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

differential: setup ## the same programs against Warren and Debian's RabbitMQ, compared
	$(BIN)/python -m differential $(ARGS)

demo: setup ## a broker, a flow of orders, exactly-once into Parquet, with a crash in the middle
	$(BIN)/python -m examples.demo $(ARGS)

bench-rabbitmq: compiled ## Warren beside RabbitMQ, which Debian has
	PYTHONPATH=$(COMPILED) $(BIN)/python -m bench.rabbitmq $(ARGS)

bench: compiled ## the measurements of bench/, with the compiled package
	PYTHONPATH=$(COMPILED) $(BIN)/python -m bench $(ARGS)

clean: ## remove what was built, but not .venv
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f $(KERNEL)/*.so

$(VENV)/.created: scripts/system_packages.sh
	scripts/system_packages.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	touch $@

# The kernel is compiled in one place only, below, so that a changed pyproject.toml does not compile it anew.
$(VENV)/.installed: $(VENV)/.created pyproject.toml setup.py constraints.txt
	$(PIP_INSTALL) setuptools cython
	WARREN_KERNEL=none $(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	touch $@

# Cython knows which .pxd and .h a module really uses, so a module that a changed one does not concern is done at once.
build/kernel/%: $(KERNEL)/%.pyx $(wildcard $(KERNEL)/*.pxd $(KERNEL)/*.h) setup.py pyproject.toml
	@mkdir -p $(@D)
	WARREN_KERNEL=$* $(LOCKED) $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
