# What a user or contributor runs. Each target first brings the machine up to what it needs,
# so `make train` and `make test` start from an empty one.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := test
.PHONY: system venv train lint test test-long test-all test-peers test-torch peer-fixtures docs wheel bench clean

# Where tests keep their files: `make test SCRATCH=/mnt/nvme` shows how that disk behaves.
SCRATCH ?= .scratch

# Processes that run tests side by side; `make test WORKERS=0` runs them one after the other.
WORKERS ?= 2

# The first of these that is 3.11 or newer makes the virtual environment.
PYTHON ?= python3.11 python3
define find_python
python=$$(for name in $(PYTHON); do \
  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
  then echo "$$name"; break; fi; done)
endef

BIN := .venv/bin
STAMP := .venv/installed

# Both names, because pip 25.3 gave constraints of isolated build environments one of their own.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

# Tests start hundreds of processes. Each would take 0.8 s to compile the packages again.
unexport PYTHONDONTWRITEBYTECODE

# ninja is not among them: CMake then builds with the make that runs this.
system:
	@missing() {
	  $(find_python)
	  command -v g++ >/dev/null || echo g++
	  command -v cmake >/dev/null || echo cmake
	  command -v pkg-config >/dev/null || echo pkg-config
	  if [ -z "$$python" ]; then echo python3 python3-venv python3-dev; return; fi
	  "$$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
	  "$$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' \
	    2>/dev/null || echo python3-dev
	}
	missing_uring() { pkg-config --exists 'liburing >= 2.2' 2>/dev/null || echo liburing-dev; }
	# Its name differs between distributions; libaio-dev brings whichever it is.
	missing_libaio() { PATH="$$PATH:/sbin" ldconfig -p 2>/dev/null | grep -q 'libaio\.so\.1' || echo libaio-dev; }
	names() { tr '\n' ' ' | sed 's/ $$//'; }
	wanted=$$({ missing; missing_uring; missing_libaio; } | names)
	if [ -n "$$wanted" ] && command -v apt-get >/dev/null; then
	  as_root=none
	  if [ "$$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root='sudo -n'; fi
	  if [ "$$as_root" != none ]; then
	    $$as_root apt-get update -qq || true
	    # One by one: a distribution without liburing-dev must still get the others.
	    for name in $$wanted; do
	      $$as_root env DEBIAN_FRONTEND=noninteractive \
	        apt-get install -y -qq --no-install-recommends "$$name" || true
	    done
	  fi
	fi
	still_missing=$$(missing | names)
	if [ -n "$$still_missing" ]; then
	  echo "Install these packages (python3 at 3.11 or newer), then try again: $$still_missing" >&2
	  exit 1
	fi
	if [ -n "$$(missing_uring)" ]; then
	  echo 'Notice: without the package liburing-dev the io_uring engine is not built.' >&2
	fi
	if [ -n "$$(missing_libaio)" ]; then
	  echo 'Notice: without the package libaio-dev the libaio engine does not work.' >&2
	fi

venv: $(STAMP)

# torch comes first and alone, so that pip's own choice of build is taken for this machine.
# Plain `make`, since its variable form would let `make -n` run all of a one-shell recipe.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	@make --no-print-directory system
	$(find_python)
	"$$python" -m venv .venv
	$(BIN)/pip install -c constraints.txt torch==2.13.0
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

# The systems that tests/peers/ compares with. DeepSpeed's setup imports torch and builds nothing.
PEERS_STAMP := .venv-peers/installed

$(PEERS_STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	@make --no-print-directory system
	$(find_python)
	"$$python" -m venv .venv-peers
	.venv-peers/bin/pip install -c constraints.txt torch==2.13.0
	.venv-peers/bin/pip install -c constraints.txt ninja numpy packaging psutil setuptools wheel
	DS_BUILD_OPS=0 .venv-peers/bin/pip install -c constraints.txt --no-build-isolation deepspeed
	.venv-peers/bin/pip install -c constraints.txt -e '.[dev,peers]'
	touch $@

train: $(STAMP)
	$(BIN)/python examples/train_gpt.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Checks the style beside the tests $(1), and shows what it found after them. A directory of its own
# per run, so that two runs at a time cannot remove each other's files.
define check
mkdir -p '$(SCRATCH)'
scratch=$$(mktemp -d '$(SCRATCH)/tierstore-tests-XXXXXX')
trap 'rm -rf "$$scratch"; rmdir .scratch 2>/dev/null || true' EXIT
make --no-print-directory lint >"$$scratch/lint" 2>&1 & lint=$$!
failed=
$(BIN)/pytest --basetemp="$$scratch/files" -n $(WORKERS) --dist worksteal $(1) || failed=$$?
wait $$lint || failed=$${failed:-1}
cat "$$scratch/lint"
exit $${failed:-0}
endef

test: $(STAMP)
	@$(call check,-m 'not long and not peers' --hypothesis-profile=quick)

test-long: $(STAMP)
	@$(call check,-m 'long and not peers')

test-all: $(STAMP)
	@$(call check,-m 'not peers')

# One process: all tests of a session share the checkpoints that the peers write at its start.
test-peers: BIN := .venv-peers/bin
test-peers: $(PEERS_STAMP)
	@mkdir -p '$(SCRATCH)'
	files=$$(mktemp -d '$(SCRATCH)/tierstore-tests-XXXXXX')
	trap 'rm -rf "$$files"; rmdir .scratch 2>/dev/null || true' EXIT
	$(BIN)/pytest --basetemp="$$files" -m peers tests/peers

# Another version of torch, for a release: the oldest that is supported, and the newest.
TORCH ?= 2.9.1

test-torch: BIN := .venv-torch/bin
test-torch:
	@make --no-print-directory system
	$(find_python)
	rm -rf .venv-torch
	"$$python" -m venv .venv-torch
	grep -vE '^(torch|triton|nvidia-.*|cuda-.*)==' constraints.txt >.venv-torch/constraints.txt
	export PIP_CONSTRAINT="$$PWD/.venv-torch/constraints.txt"
	$(BIN)/pip install torch==$(TORCH)
	$(BIN)/pip install -e '.[dev]'
	$(call check,-m 'not long and not peers' --hypothesis-profile=quick)

# Writes anew what `make test` reads without its writers: small checkpoints, listings of parameters.
peer-fixtures: $(PEERS_STAMP)
	folder=$$(mktemp -d)
	trap 'rm -rf "$$folder"' EXIT
	.venv-peers/bin/python -m tests.peers.make_fixtures "$$folder"
	.venv-peers/bin/python -m tests.peers.transformers_models

# The site, in build/site: pages of docs/, and the API from docstrings.
docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -d build/site.doctrees docs build/site

# dist/*.tar.gz, and wheels, which need no compiler to install: one for Python 3.11, and one for 3.12
# and later, which the first of these that is here makes.
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13 python3.14
wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --sdist --outdir dist
	for name in $(WHEEL_PYTHONS); do
	  "$$name" -c '' 2>/dev/null || continue
	  "$$name" -m venv dist/builder
	  dist/builder/bin/pip wheel -q --no-deps \
	    --config-settings=cmake.define.TIERSTORE_PORTABLE=ON -w dist/built .
	  rm -r dist/builder
	  if ls dist/built/*-abi3-*.whl >/dev/null 2>&1; then break; fi
	done
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/built/*.whl
	rm -r dist/built

bench: $(STAMP)
	for program in bench/*.py; do $(BIN)/python "$$program"; done

clean:
	rm -rf .venv .venv-peers .venv-torch .scratch build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
