# `make train` and `make test` set up what they need, in .venv.
PYTHON ?= python3
VENV := .venv
# Where a machine's files begin; tests have made-up ones.
ROOT :=
RUN := $(VENV)/bin/python
# Tests wait a good deal, for processes and for files: one more than there are cores.
PYTEST = $(RUN) -m pytest --dist=worksteal --numprocesses=$(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 1 : 4)))

# With CUDA's libraries where there is an NVIDIA driver, the last of these files in WSL;
# GPU=1 or GPU=0 decides otherwise. The latter also hides GPUs, as pip leaves libraries.
DRIVER := $(firstword $(wildcard $(ROOT)/proc/driver/nvidia/version \
  $(ROOT)/dev/nvidiactl $(ROOT)/usr/lib/wsl/lib/libcuda.so.1))
WANTED := $(or $(GPU),$(if $(DRIVER),1,0))
ifeq ($(WANTED),1)
  READY := $(VENV)/.ready-gpu
  EXTRAS := dev,gpu
  CUDA := with CUDA's libraries
else ifeq ($(WANTED),0)
  READY := $(VENV)/.ready
  EXTRAS := dev
  CUDA := without CUDA's libraries
else
  $(error Received GPU=$(GPU); expected GPU=1 for TensorFlow with CUDA's libraries, or GPU=0 for without)
endif
ifeq ($(GPU),0)
  export CUDA_VISIBLE_DEVICES := -1
endif
ifdef GPU
  WHY := GPU=$(GPU) was given
else
  WHY := there is $(or $(DRIVER),no NVIDIA driver); GPU=0 or GPU=1 decides otherwise
endif

.PHONY: train test test-slow test-all test-changed test-oldest test-newest lint format clean parity-report screenshots docs dist try-dist

train: $(READY)
	$(RUN) -m towers.train $(FLAGS)

# Tests start hundreds of processes, which import Towers in a third of the time once it
# is compiled; pytest compiles tests for the next call, too.
test test-slow test-changed test-oldest test-newest: export PYTHONDONTWRITEBYTECODE :=

# In parts, with processes of their own: TensorFlow keeps every graph in memory. Some slow
# tests read graphs as those of GPUs, which have no oneDNN.
test: $(READY)
	$(PYTEST) -m 'not slow' --ignore=tests/towers --ignore=tests/exact $(PYTEST_FLAGS)
	$(PYTEST) -m 'not slow' tests/towers tests/exact $(PYTEST_FLAGS)

test-slow: $(READY)
	TF_ENABLE_ONEDNN_OPTS=0 $(PYTEST) -m slow --ignore=tests/exact $(PYTEST_FLAGS)
	$(PYTEST) -m slow tests/exact $(PYTEST_FLAGS)

test-all: test test-slow

# All tests, also slow ones, about what differs from a commit; and the quick exact cases.
SINCE := HEAD
test-changed: $(READY)
	$(PYTEST) $$($(RUN) -m scripts.changed_tests --since=$(SINCE)) $(PYTEST_FLAGS)
	$(PYTEST) -m 'not slow' tests/exact $(PYTEST_FLAGS)

# What docs/reference/versions.md promises of the oldest TensorFlow and Keras, in .venv-oldest:
# private names, checkpoints, the training script, and an exact case of each group.
OLDEST := 'tensorflow==2.19.*' 'keras==3.10.*' 'tensorboard==2.19.*' 'tensorflow-metadata<1.18'
TESTERS := 'pytest>=9,<10' 'pytest-xdist>=3.6,<4' 'pytest-timeout>=2.3,<3'
OLDEST_TESTS := $(addprefix tests/,towers/keras_adapter towers/lifecycle towers/train exact)

test-oldest: RUN := .venv-oldest/bin/python
test-oldest: .venv-oldest/.ready
	$(PYTEST) -m 'oldest and not slow' $(OLDEST_TESTS) $(PYTEST_FLAGS)

.venv-oldest/.ready: setup.py Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	  || { echo "TensorFlow 2.19 needs Python 3.11 or 3.12, but $(PYTHON) is $$($(PYTHON) --version); run: make test-oldest PYTHON=python3.12"; exit 1; }
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[array_record,examples]' $(TESTERS) $(OLDEST)
	@touch $@

# The same with the newest TensorFlow and Keras, before their releases. TensorFlow's release
# candidates ask for keras-nightly, which has the files of Keras: only one of them can stay.
# A failure names the private names that changed.
NEWEST := 'tensorflow>=2.21.0rc0' 'keras-nightly>=3.16.0.dev0'
NEW := .venv-newest/bin/python

test-newest: RUN := $(NEW)
test-newest:
	test -x $(NEW) || $(PYTHON) -m venv .venv-newest
	$(NEW) -m pip install --quiet --upgrade --editable '.[array_record,examples]' $(TESTERS) $(NEWEST)
	$(NEW) -m pip uninstall --quiet --yes keras keras-nightly
	$(NEW) -m pip install --quiet --no-deps 'keras-nightly>=3.16.0.dev0'
	$(NEW) -m scripts.newest $(PYTEST) -m 'oldest and not slow' $(OLDEST_TESTS) $(PYTEST_FLAGS)

# Exact cases on towers and under MirroredStrategy: PARITY.md, and .exact/table.md.
parity-report: $(READY)
	rm -f .exact/towers.jsonl .exact/mirrored.jsonl
	# The report tells which cases fail.
	-TOWERS_EXACT_ALL=1 $(PYTEST) tests/exact/test_exact.py::test_towers
	$(RUN) -m scripts.parity_report --mirrored

# docs/images/tensorboard_*.png and docs/images/report.png; needs Debian's chromium.
screenshots: $(READY)
	$(RUN) -m scripts.screenshots

# The site of docs/ and of the pages at the root, in site/.
docs: $(READY)
	$(RUN) -m pip install --quiet --editable '.[docs]'
	$(RUN) -m scripts.docs_flags
	$(VENV)/bin/mkdocs build --strict

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(READY)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The source distribution and the wheel of what is committed, checked, in dist/.
dist: .venv-dist/.ready
	rm -rf dist
	mkdir -p dist/source
	git archive HEAD | tar -x -C dist/source
	.venv-dist/bin/python -m build --outdir dist dist/source
	rm -r dist/source
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/check-wheel-contents dist/*.whl

.venv-dist/.ready: Makefile
	test -x .venv-dist/bin/python || $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet 'build>=1.2,<2' 'twine>=6.1,<8' 'check-wheel-contents>=0.6,<0.7'
	@touch $@

# The wheel of dist/ as a new user has it, with each Python.
PYTHONS := $(PYTHON)
try-dist: dist
	scripts/try_wheel.sh dist/*.whl $(PYTHONS)

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-dist dist

# The file exists once everything in setup.py is installed; a change there renews it.
$(READY): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' \
	  || { echo "Towers needs Python 3.11 to 3.14, but $(PYTHON) is $$($(PYTHON) --version); run: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing TensorFlow $(CUDA), as $(WHY)."
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@
