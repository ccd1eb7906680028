# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find src csrc -type f ! -name '*.pyc' ! -name '*.so')

# Options of the demo and of pytest, e.g. `make demo DEMO="--steps 100"`.
DEMO ?=
TESTS ?= -n 2 --dist worksteal

.PHONY: demo test nightly lint bench fuzz sanitize docs clean

demo: $(VENV)/.package
	$(BIN)/subulp train lm --out runs/demo --overwrite $(DEMO)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

# Fifty kills of a training of each task; the tests of the arithmetic while torch has another default dtype.
nightly: $(VENV)/.test
	$(BIN)/python -m pytest -m nightly -s
	for dtype in bfloat16 float16 float64; do \
		$(BIN)/python -m pytest $(TESTS) --default-dtype $$dtype tests/numerics tests/ops tests/nn tests/optim \
			|| exit 1; \
	done

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python benchmarks/optimizers.py

# The kernels' tests with a library that checks every access and every undefined operation: every
# function that the library has, with every instruction set. Python itself is not checked: the
# sanitizers' libraries, and C++'s before torch loads it, come first. Of mixtures, the shape of 257
# rows takes minutes and reaches no line that the others leave out.
SANITIZED ?= tests/ops/test_all_finite.py tests/ops/test_rows.py tests/ops/test_embedding.py \
	tests/ops/test_pointers.py tests/ops/test_fingerprint.py tests/ops/test_mixture_tiles.py \
	tests/ops/test_head.py tests/ops/test_head_integers.py tests/ops/test_head_logistic.py \
	tests/ops/test_mixture.py tests/ops/test_mixture_any.py tests/ops/test_step_backends.py \
	tests/ops/test_step_oracle.py tests/ops/test_bf16_product.py tests/ops/test_head_fp8.py
sanitize: $(VENV)/.test
	$(PIP) install --constraint constraints.txt 'subulp[sanitize]'
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DSUBULP_SANITIZE=address,undefined \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	$(BIN)/cmake --build build/sanitize
	SUBULP_LIBRARY=$(abspath build/sanitize)/libsubulp.so \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest $(TESTS) -k "not triton and not 257" $(SANITIZED)

# The API reference, from the docstrings.
docs: $(VENV)/.package
	$(PIP) install --constraint constraints.txt 'subulp[docs]'
	$(BIN)/pdoc --docformat google --output-directory build/docs \
		subulp.numerics subulp.ops subulp.optim subulp.nn subulp.diagnostics

# Each parser for SECONDS; a finding is left in the folder as crash-...
SECONDS ?= 60
fuzz: $(VENV)/.test
	$(PIP) install --constraint constraints.txt 'subulp[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# PyTorch comes first and pinned: what follows then takes it as it is.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	@touch $@

$(VENV)/.package: $(VENV)/.torch $(SOURCES)
	$(PIP) install --constraint constraints.txt '.[lab]'
	@touch $@

# The package as it is installed, and what its extra needs besides: nothing is built again. TorchRec comes
# without its requirements, which would replace PyTorch.
$(VENV)/.test: $(VENV)/.package tests/integrations/requirements.txt
	$(PIP) install --constraint constraints.txt 'subulp[lab,test]'
	$(PIP) install --no-deps --requirement tests/integrations/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) build dist runs
