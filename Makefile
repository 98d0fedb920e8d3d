# One command does all. `make demo` and `make test` work in a fresh clone: they create .venv first.
# COEXEC_* variables are listed by `python -m coexec.config`.

# The first of these that is Python 3.11 to 3.13; `make PYTHON=/path/to/python3.12 test` chooses another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CXX_FILES := $(wildcard src/coexec/csrc/*.cpp src/coexec/csrc/*.h)

.PHONY: demo test test-full asan bench lint format format-check typecheck check wheel clean

demo: $(READY)
	$(BIN)/python -m examples.demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

test-full: $(READY)
	$(BIN)/python -m pytest

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer (g++). A finding ends the run; its report is in
# out/asan. The runtimes must be there before Python is; PYTHONMALLOC=malloc shows them Python's objects too.
ASAN := COEXEC_SANITIZE=address,undefined COEXEC_CACHE_DIR=$(CURDIR)/out/asan/cache
ASAN_PRELOAD = $(foreach library,asan ubsan stdc++,$(shell $(or $(CXX),g++) -print-file-name=lib$(library).so))
ASAN_RUN = LD_PRELOAD="$(ASAN_PRELOAD)" PYTHONMALLOC=malloc \
    ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/out/asan/report \
    UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/out/asan/report

asan: $(READY)
	mkdir -p out/asan
	$(ASAN) $(BIN)/python -m coexec.intercept
	$(ASAN) $(ASAN_RUN) $(BIN)/python -m pytest tests/coexec -m "not compile"

bench: $(READY)
	$(BIN)/python -m benchmarks.bench_overhead --json out/bench/overhead.json
	$(BIN)/python -m benchmarks.bench_step --json out/bench/step.json

lint: $(READY)
	$(BIN)/ruff check .

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --select I .
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

format-check: $(READY)
	$(BIN)/ruff format --check .
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))

typecheck: $(READY)
	$(BIN)/mypy

check: lint format-check typecheck test

wheel: $(READY)
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build dist out src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

$(READY): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python 3.11 to 3.13 found: install one, or run make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(READY)
