# make demo [POLICY=pollux|coadapt|throughput|dynamic|fixed|...]; make test; make lint; make docs; make install; make clean
# make experiment [EXPERIMENT=FILE.toml] [SEEDS=N]: after an interruption the same command continues. If
# COADAPT_OSDI21 names the folder of the published traces, the sensitivity of their world is measured too.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
POLICY ?= pollux
INSTALLED := $(VENV)/.installed
EXPERIMENT ?= workloads/experiments/cpu.toml
NAME := $(basename $(notdir $(EXPERIMENT)))
SELECTED := $(EXPERIMENT)$(if $(SEEDS), --seeds $(SEEDS))
RUNS := logs/$(NAME)
RESULTS := analysis/results$(if $(filter-out cpu,$(NAME)),/$(NAME))
SENSITIVITY := $(if $(filter cpu,$(NAME)),"sensitivity --world calibrated --out $(RESULTS)" \
	$(if $(COADAPT_OSDI21),"sensitivity --world osdi21 --traces $(COADAPT_OSDI21) --out $(RESULTS)"))

export OMP_NUM_THREADS := 1

.PHONY: install demo experiment docs test lint clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/coadapt run workloads/sets/demo.toml --policy $(POLICY)

# A run that is not clean (exit code 1) fails the target, but only after all steps are done.
experiment: $(INSTALLED)
	@failed=0; \
	for step in "experiment $(SELECTED)" "experiment $(SELECTED) --isolated" "compare $(RUNS) --out $(RESULTS)" \
		"fidelity $(RUNS) --out $(RESULTS)" "fidelity $(RUNS) --own-steps --out $(RESULTS)" $(SENSITIVITY); \
	do \
		echo "coadapt $$step"; $(BIN)/coadapt $$step; code=$$?; \
		if [ $$code -gt 1 ]; then exit $$code; elif [ $$code -eq 1 ]; then failed=1; fi; \
	done; \
	exit $$failed

docs: $(INSTALLED)
	$(BIN)/python -m services.cli.reference

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

clean:
	rm -rf $(VENV) *.egg-info build .mypy_cache .pytest_cache .ruff_cache .hypothesis
