PYTHON ?= python
RESULTS ?= bench/results/h200

.PHONY: check test gpu

check:  ## style and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

test:  ## everything that needs no GPU, and the rest where there is one
	$(PYTHON) -m pytest

gpu:  ## on an H200: the GPU suite and its record, the demo, the sanitizers
	$(PYTHON) -m pytest -m gpu -p no:cacheprovider -p no:benchmark --record $(RESULTS)/tests.json
	$(PYTHON) -m cumoe demo | tee $(RESULTS)/demo.txt
	$(PYTHON) -m bench.sanitize --out $(RESULTS)/sanitizer.json
