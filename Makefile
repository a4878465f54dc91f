# make demo, make test: each sets up what it needs, once, in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-transformers test-gpu test-sanitized bench bench-gpu bench-fused lint clean

help:            ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

$(READY): pyproject.toml setup.py constraints.txt $(wildcard src/longspan/attention/*/csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "PYTHON must be 3.11 or newer, got " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing longspan into $(VENV) (a minute or two, only when its requirements change)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)   ## Time every method on this machine, train a small model with each, draw a page
	@$(BIN)/longspan demo

# `make test PARTS=2` shares the tests among two processes.
PARTS ?= 1
in_parts = seq $(PARTS) | xargs -P $(PARTS) -I{} $(1) -m pytest -m $(2) --part {}/$(PARTS)

test: $(READY)   ## Run the tests (CPU)
	@$(call in_parts,$(BIN)/python,"not gpu")

# The oldest transformers that is supported; .venv has the pinned one.
TRANSFORMERS ?= 5.17.0
OTHER := build/transformers-$(TRANSFORMERS)
test-transformers: $(READY)   ## Run the Hugging Face tests with another transformers (TRANSFORMERS=5.17.0)
	@test -d $(OTHER) || $(BIN)/python -m pip install -qq --disable-pip-version-check \
	  --target $(OTHER) 'transformers==$(TRANSFORMERS)'
	@PYTHONPATH=$(OTHER) $(BIN)/python -m pytest tests/huggingface tests/models tests/test_examples.py \
	  tests/training/test_traces.py tests/training/test_resume.py

# Built apart from the library in use. Python itself leaks by the sanitizer's measure, and torch has
# no red zones; what the kernels read and write has. Emulated threads have stacks of their own, which
# the sanitizer would not know.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitized = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest --capture=sys $(1)
test-sanitized: $(READY)   ## Run the CPU kernels, and the CUDA kernels on a CPU, under ASan and UBSan
	@CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build_ext --force \
	  --build-temp build/sanitized --build-lib build/sanitized
	@$(call sanitized,tests/attention/test_yoso_cpu.py \
	  --kernels build/sanitized/longspan/attention/yoso/_cpu.so)
	@EMULATOR_FLAGS="$(SANITIZE) --param=asan-stack=0" $(call sanitized,\
	  tests/attention/test_yoso_emulated.py -k "not backwards and not drawn and not sum")

# A GPU machine usually has its own torch: name its Python to use that one instead of .venv,
# as in `make test-gpu GPU_PYTHON=python3`.
GPU_PYTHON ?= $(BIN)/python
on_gpu = if ! nvidia-smi -L >/dev/null 2>&1; then echo "No NVIDIA GPU here: $(1)."; exit 0; fi; \
	if [ "$(GPU_PYTHON)" = "$(BIN)/python" ]; then $(MAKE) --no-print-directory $(READY) || exit 1; fi; \
	export PYTHONPATH=src; $(2)

test-gpu:        ## Run the tests that need an NVIDIA GPU (kernels take long to compile: PARTS=16)
	@$(call on_gpu,GPU tests were not run,$(call in_parts,$(GPU_PYTHON),gpu))

bench: $(READY)  ## Time every method on this CPU, to 65,536 tokens, where results/cpu.jsonl lacks rows
	@$(BIN)/longspan bench cpu --device cpu -o results/cpu.jsonl

bench-gpu:       ## Time YOSO beside exact attention on an NVIDIA GPU; rows, tables, plot go to results/
	@$(call on_gpu,nothing was measured,$(GPU_PYTHON) -m longspan.bench.gpu results/yoso-gpu.jsonl && \
	  $(GPU_PYTHON) -m longspan.report.gpu results/yoso-gpu.jsonl)

bench-fused:     ## Time the Triton methods beside exact attention on an NVIDIA GPU; likewise
	@$(call on_gpu,nothing was measured,$(GPU_PYTHON) -m longspan.bench.gpu_fused results/fused-gpu.jsonl && \
	  $(GPU_PYTHON) -m longspan.report.fused results/fused-gpu.jsonl)

lint: $(READY)   ## Check style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

clean:           ## Remove what make made
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache longspan-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
