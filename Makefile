PYTHON ?= python
RESULTS ?= bench/results/h200

.PHONY: check test gpu bench

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
	$(PYTHON) -m bench coldstart --out $(RESULTS)/coldstart.json
	$(PYTHON) -m bench host --out $(RESULTS)/host.json

bench:  ## on an H200 with vLLM installed: times beside it, and the comparison byte for byte
	$(PYTHON) -m bench activation --out $(RESULTS)/activation.json --plot $(RESULTS)/activation.png
	$(PYTHON) -m bench.bitwise --out $(RESULTS)/bitwise.json
	$(PYTHON) -m bench.sweep --quick --out $(RESULTS)/activation_sweep.json
	$(PYTHON) -m bench experts --shape glm-5.3-tp8,glm-5.3-tp4,glm-5.3-flash-tp8,qwen3-next-tp1 --out $(RESULTS)/experts.json
	$(PYTHON) -m bench experts --quick --keep --shape deepseek-v4-flash-ep8,glm-5.3-tp8,glm-5.3-tp4 \
	  --routing uniform,zipf,one --m 256,384,512,768,1024,1536,2048,3072,4096,6144,8192,16384 --out $(RESULTS)/experts.json
	$(PYTHON) -m bench experts --quick --keep --shape glm-5.3-flash-tp8 --m 8192 --out $(RESULTS)/experts.json
	$(PYTHON) -m bench vllm --out $(RESULTS)/vllm.json
	$(PYTHON) -m bench stress --m 1,8,64,256,1024,4096 --out $(RESULTS)/stress.json
