# `make demo` and `make test` do everything from nothing, in .venv.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: demo test wheel install install-dev clean

install: $(VENV)/.runtime
install-dev: $(VENV)/.dev

# The C++ kernels are built by the installation.
NATIVE := setup.py $(wildcard kernels/native/*.cpp kernels/native/*.h)

$(VENV)/.runtime: pyproject.toml constraints.txt $(NATIVE)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

# Starts the server on a real model and streams one answer from it.
demo: $(VENV)/.runtime
	$(VENV)/bin/python scripts/demo.py

# What people and CI run: lint, cheap tests with the type check beside them, then the slow tests.
test: $(VENV)/.dev
	VENV=$(VENV) bash scripts/check.sh

# dist/: an sdist, and a wheel with the kernels that needs no compiler.
wheel: $(VENV)/.runtime
	$(PIP) install -q 'setuptools>=77'
	VENV=$(VENV) bash scripts/build_wheel.sh dist

clean:
	rm -rf $(VENV) build dist *.egg-info
