# Every target works on a fresh machine: .venv is made and filled when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: train test test-long lint types check bench clean

train: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/lightning-recompute fit --config configs/gpt_bytes.yaml
	@echo
	@echo "That was full recompute on a GPT of our own. Next, on your script: add one argument"
	@echo "    trainer = L.Trainer(strategy=RecomputeStrategy(), callbacks=[MemoryReport(), ThroughputReport()])"
	@echo "or try the example of it:  $(BIN)/python examples/existing_script.py"

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long and not gpu"

test-long: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup -m "long and not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test

bench: $(READY)
	for script in bench/*.py; do $(BIN)/python $$script || exit 1; done

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv
