# Every target first makes .venv if it is missing, and brings it up to date if pyproject.toml or
# constraints.txt changed. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
# As many files at once as there are cores, 8 at most: the tests of a file share what they set up.
PYTEST_FLAGS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Also when its interpreter no longer starts: the system's has moved, say.
MISSING := $(shell $(BIN)/python -c '' 2>/dev/null || echo new-environment)
RESULTS := benchmarks/results

# Ranks of a test are threads or processes of one machine: more threads in each only get in the way.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz lint format bench bench-gpu clean new-environment

help:
	@echo "make demo       every strategy on one real input, over 4 local processes"
	@echo "make test       the tests; test-all adds the slow ones"
	@echo "make fuzz       random examples of tests/fuzz, for MINUTES=30"
	@echo "make lint       ruff, import-linter, the budget of lines and pyright; format rewrites the files"
	@echo "make bench      the benchmark's quick cases, and a page of them; bench-gpu those of a GPU"

demo: $(STAMP)
	$(BIN)/tilewise demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_FLAGS)

MINUTES ?= 30

# One file after the other, other examples in every run; a failing one is shown, and no file stops
# the others. A file that has begun is finished.
fuzz: $(STAMP)
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); failed=; \
	while [ $$(date +%s) -lt $$end ]; do \
		for file in tests/fuzz/test_*.py; do \
			[ $$(date +%s) -lt $$end ] || break; \
			echo "$$file"; \
			HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -q --timeout=0 $$file || failed="$$failed $$file"; \
		done; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.size
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PEERS := axolotl-ringmaster==0.2.7 ring-flash-attn==0.1.8 yunchang==0.6.4  # as in pyproject.toml

# Starts anew: without the old rows nothing is skipped as finished. Namespaces need root.
bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PEERS)
	rm -f $(RESULTS)/kernels.jsonl $(RESULTS)/strategies.jsonl
	$(BIN)/tilewise bench kernels --quick -o $(RESULTS)/kernels.jsonl
	$(BIN)/tilewise bench strategies --quick --also benchmarks.peers -o $(RESULTS)/strategies.jsonl
	@if [ "$$(id -u)" = 0 ] && command -v tc >/dev/null; then \
		rm -f $(RESULTS)/network.jsonl; \
		$(BIN)/tilewise bench network --quick --also benchmarks.peers -o $(RESULTS)/network.jsonl; \
	else echo "no root or no tc: the network lab is left out"; fi
	$(BIN)/tilewise report $(RESULTS)/*.jsonl -o out/benchmark.html

# Where PYTHON has a torch that sees a GPU, that torch is measured; else the environment's.
bench-gpu:
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; \
	then PYTHONPATH=src $(PYTHON) -m benchmarks.gpu; \
	else $(MAKE) --no-print-directory $(STAMP) && $(BIN)/python -m benchmarks.gpu; fi

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist

# A torch that is there and new enough stays (a CUDA build, say), with the triton that it asks for.
# Otherwise the pin decides, because an unpinned torch may bring gigabytes of CUDA packages along.
$(STAMP): pyproject.toml constraints.txt $(MISSING)
	@torch=$$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true); \
	case "$$torch" in 2.11.*|2.12.*|2.13.*|2.14.*|2.15.*) pins="s/^torch==.*/torch==$$torch/; /^triton==/d";; *) pins=;; esac; \
	sed "$$pins" constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $@

new-environment:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tilewise needs Python 3.11 or newer, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(VENV)
