# Everything runs in .venv, made from the pinned versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/build/inductor

.PHONY: demo test lint bench quality train format clean

demo: .venv/ready          ## ask the shipped model for needles: table and picture
	$(BIN)/python examples/demo.py

test: .venv/ready          ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

lint: .venv/ready          ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/installed && $(BIN)/pip install -q --no-deps --no-build-isolation --target build/installed .
	cd build/installed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p specache_compile
	$(BIN)/python tests/support_table.py --check README.md

bench: .venv/ready         ## decode step on the CPU at 1k, 4k and 16k of context
	$(BIN)/python benchmarks/cpu_decode.py

quality: .venv/ready       ## the quality tables, method by method; goes on where it was
	$(BIN)/python benchmarks/quality.py

train: .venv/ready         ## train the small models again (half an hour each on two cores)
	$(BIN)/python examples/train_needle.py
	$(BIN)/python examples/train_text.py
	$(BIN)/python examples/train_keys.py

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build .venv

# torch alone first: its pin decides which build everything else must agree with.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("specache-compile needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@
