# The two commands a newcomer needs: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_PROCESSES ?= 2
STAMP := $(VENV)/.installed

.PHONY: setup demo fleet-demo test check bench chaos chaos-sim chart-check lab lab-smoke gpu-check protos clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "PLA-Serve needs Python 3.11 or newer; this is %s. Name another: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "The venv module is missing: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cpu,triton,dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/plaserve demo

# Twelve processes and etcd under load, some of them killed: about four minutes.
fleet-demo: setup
	$(BIN)/plaserve fleet demo

# Four policies side by side on the CPU engine: about ten minutes under load, two more to build the bundle at first.
# On an idle machine: client, services and engine share it.
BENCH_POLICIES ?= fcfs,shortest_aging,laps_slides,plaserve
BENCH_ROUNDS ?= 4
BENCH_SECONDS ?= 32
BENCH_BUNDLES ?= bundles

bench: setup
	$(BIN)/plaserve build --out $(BENCH_BUNDLES)
	$(BIN)/plaserve bench compare --policies $(BENCH_POLICIES) --rounds $(BENCH_ROUNDS) \
		--seconds $(BENCH_SECONDS) --bundle $(BENCH_BUNDLES)/SmolLM2-135M-Instruct --json var/bench/bench.json

# A file's tests stay in one process, so that what they share is made once.
test: setup
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile

# Faults by seed, in virtual time, every law checked: some ten minutes on two cores. `make test` runs 500 of them.
chaos-sim: setup
	$(BIN)/python -m service.sim.chaos --seeds 0:5000 --calm

# Faults by seed on real processes (etcd and a small fleet on loopback), every law checked: 14 minutes on two busy
# cores. As root also with a network for each process, to cut it off (iproute2).
chaos: setup
	$(BIN)/python -m service.bench.chaos --seeds 0:20

# The Helm chart and container files, rendered and checked without a cluster. What it installs is 400 MB.
chart-check: setup
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[deploy]'
	$(BIN)/python -m pytest -q tests/deploy

# The lab: a minute to see that it works, or some 40 minutes on two idle cores for its pages (docs/lab.md,
# docs/controllers.md); goes on where it was stopped.
lab-smoke: setup
	$(BIN)/plaserve lab run smoke

lab: setup
	$(BIN)/plaserve lab page

# On a GPU machine: the tests that need one, then every measurement (docs/gpu.md). It installs nothing: GPU_PYTHON
# needs torch, numpy and pytest. GPU_OPTIONS goes to the measurement, e.g. GPU_OPTIONS='--minutes 30'.
GPU_PYTHON ?= $(PYTHON)

gpu-check:
	$(GPU_PYTHON) -m pytest -c tests/gpu/bare.ini --rootdir=. --confcutdir=tests/gpu tests/gpu
	$(GPU_PYTHON) -m build_scripts.gpu.measure --out auto $(GPU_OPTIONS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m build_scripts.protos --check

protos: setup
	$(BIN)/python -m build_scripts.protos

clean:
	rm -rf $(VENV) bundles var demo.json
