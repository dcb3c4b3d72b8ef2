# Every target sets up .venv when it is missing; `make demo` and `make test` need python3 (>= 3.11) and a package index.
PYTHON ?= python3
BIN    := .venv/bin
READY  := .venv/.ready
GPU    ?=
OUT    ?= out
WEIGHTS ?= $(wildcard $(RIDGELINE_TEST_DATA)/yolo26n-w8.pt)
IMAGES ?= $(if $(RIDGELINE_TEST_DATA),$(wildcard $(RIDGELINE_TEST_DATA)/images/bus.jpg))
SOURCES := src tests benchmarks examples docs

.PHONY: demo test lint format bench docs clean

demo: $(READY)  ## roofline of both reference workloads, detection when weights are at hand, one HTML page
	$(BIN)/ridgeline demo --out $(OUT) $(if $(GPU),--gpu "$(GPU)") $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(IMAGES)

test: $(READY)  ## the whole suite; tests that need a GPU or data say so and skip
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(READY)  ## what continuous integration checks besides the tests
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell $(SOURCES) README.md
	$(BIN)/python benchmarks/readme.py --check

format: $(READY)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/python benchmarks/readme.py

bench: $(READY)  ## times this machine's GPU; rows land in benchmarks/results/
	$(BIN)/python benchmarks/kernels.py --op conv2d_act --out benchmarks/results/kernels.jsonl
	$(BIN)/python benchmarks/yolo26.py --scale n s m l x --out benchmarks/results/yolo26.jsonl

clean:
	rm -rf .venv $(OUT) .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ridgeline needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)
