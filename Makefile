# `make train` and `make test` set up what they need, in .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Tests wait a good deal, for processes and for files: one more than there are cores.
PYTEST := $(RUN) -m pytest --dist=worksteal --numprocesses=$(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))

.PHONY: train test test-slow lint format clean parity-report screenshots

train: $(VENV)/.ready
	$(RUN) -m towers.train $(FLAGS)

# In three parts, with processes of their own: TensorFlow keeps every graph, and slows
# down.
define run_tests
	$(PYTEST) -m '$(1)' --ignore=tests/towers $(PYTEST_FLAGS)
	$(PYTEST) -m '$(1)' --ignore=tests/towers/test_exact_cases.py tests/towers $(PYTEST_FLAGS)
	$(PYTEST) -m '$(1)' tests/towers/test_exact_cases.py $(PYTEST_FLAGS)
endef

test: $(VENV)/.ready
	$(call run_tests,not slow)

test-slow: $(VENV)/.ready
	$(call run_tests,slow)

# The table of exact cases, on towers and under MirroredStrategy, as PARITY.md.
parity-report: $(VENV)/.ready
	rm -f .exact/towers.jsonl .exact/mirrored.jsonl
	TOWERS_EXACT_ALL=1 TF_ENABLE_ONEDNN_OPTS=1 $(PYTEST) tests/towers/test_exact_cases.py
	$(RUN) -m scripts.parity_report --mirrored

# docs/tensorboard_*.png and docs/report.png; needs Debian's chromium.
screenshots: $(VENV)/.ready
	$(RUN) -m scripts.screenshots

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV)

# The file exists once everything in setup.py is installed; a change there renews it.
$(VENV)/.ready: setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "Towers needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) --version); run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	@touch $@
