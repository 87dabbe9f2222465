# make workup   install, run the workbook on the built-in workload, print where the report is
# make test     everything that CI checks
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKLOAD ?= digits-mlp
BUDGET ?= standard
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: workup lab test lint unit notebooks bench phenomena clean

workup: $(VENV)/.installed
	$(BIN)/workup run $(WORKLOAD) --budget $(BUDGET)

lab: $(VENV)/.installed
	$(BIN)/jupyter lab notebooks

test: lint unit notebooks

lint: $(VENV)/.developing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id notebooks/*.ipynb
	$(BIN)/mypy

# One thread a process: two processes with two threads each, on two cores, wait for one another many times over.
unit: $(VENV)/.developing
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --durations=12

# nbmake runs each notebook as a reader would, with the environment in place of parameters.
notebooks: $(VENV)/.developing
	rm -rf runs/ci
	WORKUP_STUDY=runs/ci WORKUP_BUDGET=smoke WORKUP_DEVICE=cpu \
		$(BIN)/pytest -p no:cacheprovider --nbmake --nbmake-timeout=300 notebooks

# Measured, not asserted; each says at its top what it measures and with which marks.
BENCHMARKS := recording throughput noise_scale verdicts range_tests sweep spending growth peers workbook
bench: $(VENV)/.developing
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m tests.benchmarks.$$name || exit 1; done

phenomena: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.phenomena

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Workup needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs/ci
