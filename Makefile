PYTHON ?= python3
BIN := .venv/bin
# one thread in each worker, and a worker for each core: more threads than cores spend their time waiting for each other
WORKERS ?= logical
# bytecode is kept, whatever the environment says: else each worker rewrites the assertions of all files, each time, and
# each process that a test starts compiles this package
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: setup demo smoke golden test first-gpu test-all matrix wheel lint check docs screenshots

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/train_vit.py

smoke: setup
	$(BIN)/python -m pytest -p no:xdist -q tests/unit

golden: setup
	$(BIN)/python -m pytest -p no:xdist -q tests/unit/test_golden.py --update-golden

# PART=2/3: the second of three parts, each of other files
test: setup
	$(PYTEST) --part $(or $(PART),1/1) --durations=25 --durations-min=5

# What benchmarks/first_gpu.py does on a GPU, on the emulated accelerator.
first-gpu: setup
	$(BIN)/python -m pytest -p no:xdist -q -m slow tests/test_first_gpu.py

test-all: setup
	$(PYTEST) -m ""

# Fresh environments with the oldest and the newest supported torch and transformers.
matrix:
	$(PYTHON) tools/matrix.py

# The wheel, built, and tried in a fresh environment outside of the checkout.
wheel:
	$(PYTHON) tools/try_wheel.py

# What no test says. `make test` has the tests of `make check`, too.
lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint
	$(BIN)/python -m pytest -p no:xdist -q tests/test_structure.py tests/test_compat.py tests/test_docs_claims.py \
		tests/unit/test_every_module_has_a_test.py tests/test_ratchets.py

screenshots: setup
	$(BIN)/python docs/screenshots.py

docs: setup
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/screenshots.py --if-possible
	$(BIN)/mkdocs build
