# The two commands a newcomer needs: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check lab lab-smoke protos clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "PLA-Serve needs Python 3.11 or newer; this is %s. Name another: make PYTHON=python3.12 ..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "The venv module is missing: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[cpu,triton,dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/plaserve demo

test: setup
	$(BIN)/python -m pytest -q

# The lab: a minute to see that it works, or half an hour for its page (docs/lab.md).
lab-smoke: setup
	$(BIN)/plaserve lab run smoke

lab: setup
	$(BIN)/plaserve lab page

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
