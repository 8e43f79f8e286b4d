# make demo [POLICY=pollux|coadapt|throughput|dynamic|fixed|...]; make test; make install; make clean
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
POLICY ?= pollux
INSTALLED := $(VENV)/.installed

export OMP_NUM_THREADS := 1

.PHONY: install demo test lint clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

demo: $(INSTALLED)
	$(BIN)/coadapt run workloads/sets/demo.toml --policy $(POLICY)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

clean:
	rm -rf $(VENV) *.egg-info build .mypy_cache .pytest_cache .ruff_cache .hypothesis
