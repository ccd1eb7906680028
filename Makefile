# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find src csrc -type f ! -name '*.pyc' ! -name '*.so')

# Options of the demo, of `make gpu` and of pytest, e.g. `make demo DEMO="--steps 100"`.
DEMO ?=
GPU ?=
TESTS ?= -n 2 --dist worksteal

.PHONY: help demo test nightly reproduce lint gpu bench fuzz sanitize docs wheel sdist bare clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.package ## train a small model under four precisions, side by side
	$(BIN)/subulp train lm --out runs/demo --overwrite $(DEMO)

test: $(VENV)/.test ## the whole suite; TESTS= has options of pytest
	$(BIN)/python -m pytest $(TESTS)

# Fifty kills of a training of each task; the tests of the arithmetic while torch has another default dtype; the small
# size of all reproductions.
nightly: $(VENV)/.test ## the tests that take minutes, then reproduce
	$(BIN)/python -m pytest -m nightly -s
	for dtype in bfloat16 float16 float64; do \
		$(BIN)/python -m pytest $(TESTS) --default-dtype $$dtype tests/numerics tests/ops tests/nn tests/optim \
			|| exit 1; \
	done
	$(MAKE) reproduce

# By the steps in the records some four hours on two cores, most of them collage's; never timed as a whole. A paper's name
# is all of its claims.
CLAIMS ?= all
reproduce: $(VENV)/.test ## the papers' claims at the size that two cores carry; CLAIMS= chooses
	$(BIN)/subulp reproduce $(CLAIMS) --out runs/reproduce

lint: $(VENV)/.test ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# With the Python whose PyTorch sees the GPU, and what is installed there: no network, no environment of its own.
gpu: ## build, checks, tests, sanitizer and rates on this machine's GPU
	$(PYTHON) benchmarks/gpu.py $(GPU)

bench: $(VENV)/.test ## the optimizers' rates beside those of others
	$(BIN)/python benchmarks/optimizers.py

# The kernels' tests with a library that checks every access and every undefined operation: every
# function that the library has, with every instruction set. Python itself is not checked: the
# sanitizers' libraries, and C++'s before torch loads it, come first. Of mixtures, the shape of 257
# rows takes minutes and reaches no line that the others leave out.
SANITIZED ?= tests/ops/test_all_finite.py tests/ops/test_rows.py tests/ops/test_embedding.py \
	tests/ops/test_pointers.py tests/ops/test_fingerprint.py tests/ops/test_mixture_tiles.py \
	tests/ops/test_head.py tests/ops/test_head_integers.py tests/ops/test_head_logistic.py \
	tests/ops/test_mixture.py tests/ops/test_mixture_any.py tests/ops/test_step_backends.py \
	tests/ops/test_step_oracle.py tests/ops/test_bf16_product.py tests/ops/test_head_fp8.py \
	tests/ops/test_head_fused.py
sanitize: $(VENV)/.test ## the kernels' tests under the sanitizers
	$(PIP) install --constraint constraints.txt 'subulp[sanitize]'
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DSUBULP_SANITIZE=address,undefined \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja
	$(BIN)/cmake --build build/sanitize
	SUBULP_LIBRARY=$(abspath build/sanitize)/libsubulp.so \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	$(BIN)/python -m pytest $(TESTS) -k "not triton and not 257" $(SANITIZED)

# Warnings are errors: a page that nothing leads to, a link into nothing, a docstring that does not parse.
docs: $(VENV)/.package ## the site, in build/docs
	$(PIP) install --constraint constraints.txt 'subulp[docs]'
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs/site -d build/site . build/docs

# Of PyTorch's OpenMP there is one copy in a process: the wheel has none of its own. It must run wherever PyTorch's
# wheels do: auditwheel refuses one that needs a later platform.
PLATFORM ?= manylinux_2_28_$(shell uname -m)
wheel: $(VENV)/.package ## a wheel for any Linux with glibc that PyTorch runs on, in dist
	$(PIP) install --constraint constraints.txt 'subulp[wheel]'
	mkdir -p dist && rm -f dist/*.whl
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat $(PLATFORM) --exclude libgomp.so.1 \
		--wheel-dir dist build/dist/*.whl

sdist: build/dist/.built ## the source distribution, in dist
	mkdir -p dist && rm -f dist/*.tar.gz
	cp build/dist/*.tar.gz dist

# Without a PATH there is no compiler.
bare: wheel ## install the wheel where nothing is but PyTorch and NumPy, and train with it
	rm -rf build/bare
	$(PYTHON) -m venv build/bare
	build/bare/bin/python -m pip --disable-pip-version-check --quiet install --constraint constraints.txt torch numpy
	build/bare/bin/python -m pip --disable-pip-version-check --quiet install --no-index dist/*.whl
	env -i PATH=/nowhere build/bare/bin/python -I tests/bare_install.py

# Each parser for SECONDS; a finding is left in the folder as crash-...
SECONDS ?= 60
fuzz: $(VENV)/.test ## the parsers under mutated files
	$(PIP) install --constraint constraints.txt 'subulp[fuzz]'
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# PyTorch comes first and pinned: what follows then takes it as it is.
$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==2.13.0
	@touch $@

# The wheel is built from the source distribution, so whatever is tested has been in both.
build/dist/.built: $(VENV)/.torch $(SOURCES)
	$(PIP) install --constraint constraints.txt build
	rm -rf build/dist
	PIP_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python -m build --quiet --outdir build/dist
	@touch $@

$(VENV)/.package: build/dist/.built
	$(PIP) install --force-reinstall --no-deps build/dist/*.whl
	$(PIP) install --constraint constraints.txt 'subulp[lab]'
	@touch $@

# The package as it is installed, and what its extra needs besides: nothing is built again. TorchRec comes
# without its requirements, which would replace PyTorch.
$(VENV)/.test: $(VENV)/.package tests/integrations/requirements.txt
	$(PIP) install --constraint constraints.txt 'subulp[lab,test]'
	$(PIP) install --no-deps --requirement tests/integrations/requirements.txt
	@touch $@

clean: ## remove all that is built
	rm -rf $(VENV) build dist runs
