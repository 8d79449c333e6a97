# Every target makes its own .venv first; python3 (with venv), make and g++ are all it needs.

PYTHON ?= python3
PIP     = .venv/bin/python -m pip -qq --disable-pip-version-check --no-input
# Bytecode of what is imported is written on the way; that of all files would take half a minute.
INSTALL = $(PIP) install --no-compile $(addprefix -c ,$(CONSTRAINTS))
CONSTRAINTS = constraints.txt
# The pip that comes with Python 3.11 takes twice as long to read the index of packages.
PIP_VERSION = pip==26.3
STAMP   = .venv/installed
DOCS    = .venv/installed_docs
SPELLED = $(wildcard *.md) docs src tests benchmarks examples
CPP_FILES = $(shell find src -name '*.h' -o -name '*.c' -o -name '*.cpp')

export PYTHONUNBUFFERED = 1
# Every process that imports torch would compile it again without bytecode, which is written beside the environment.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX = $(CURDIR)/.venv/bytecode

.PHONY: demo bench test tests slow package sanitize fuzz fuzz-graphs fuzz-files fuzz-weights faults soak isa lint format types docs clean check check-torch

demo: $(STAMP)
	.venv/bin/python examples/demo.py

# What quantizing costs. The race against other engines needs their packages: benchmarks/README.md.
bench: $(STAMP)
	.venv/bin/python benchmarks/costs.py

# Types are checked beside the tests, whose workers share the cores with it.
test: format
	@$(MAKE) --no-print-directory -j2 types tests

tests: $(STAMP)
	.venv/bin/python -m pytest -q -n auto --dist worksteal

# What is slow and rarely breaks, with ten times the examples of properties, and the pages of the site.
slow: $(STAMP) $(DOCS)
	INTAGLIO_HYPOTHESIS=thorough .venv/bin/python -m pytest -q -n auto --dist worksteal -m "slow or examples"

# Wheel and sdist, built and installed in environments of their own, with the Pythons that are found.
package: $(STAMP)
	.venv/bin/python -m pytest -q -m slow -rs tests/end_to_end/test_clean_installation.py

# Exported programs of the networks that can be exported, under AddressSanitizer and UndefinedBehaviorSanitizer, the pool under TSan.
sanitize: $(STAMP)
	.venv/bin/python -m pytest -q -n auto -m "slow or not slow" -rs tests/native/test_sanitizers.py tests/native/test_thread_sanitizer.py

# Everything that is drawn at random. Each driver prints what it found, and how to run a failure again.
fuzz: fuzz-graphs fuzz-files fuzz-weights

# Networks drawn from the operator records, through all stages.
FUZZ_COUNT ?= 1000
FUZZ_SEED ?= 0
FUZZ_SECONDS ?= 3600

fuzz-graphs: $(STAMP)
	PYTHONPATH=tests .venv/bin/python -m fuzz.graphs --seed $(FUZZ_SEED) --count $(FUZZ_COUNT) --seconds $(FUZZ_SECONDS)

# Changed files of every kind that intaglio reads; SANITIZE=1 compiles their programs with AddressSanitizer.
FILES_COUNT ?= 100000

fuzz-files: $(STAMP)
	PYTHONPATH=tests .venv/bin/python -m fuzz.files --seed $(FUZZ_SEED) --count $(FILES_COUNT) $(if $(SANITIZE),--sanitize)

# Changed weights of exported C, under AddressSanitizer and UndefinedBehaviorSanitizer.
WEIGHTS_COUNT ?= 100000

fuzz-weights: $(STAMP)
	PYTHONPATH=tests .venv/bin/python -m fuzz.exported_weights --seed $(FUZZ_SEED) --count $(WEIGHTS_COUNT)

# Every system call of saving, loading, compiling and exporting fails once.
faults: $(STAMP)
	PYTHONPATH=tests .venv/bin/python -m fuzz.faults

# Threads call models for SOAK_SECONDS; then SOAK_MADE models are made and dropped.
SOAK_SECONDS ?= 600
SOAK_MADE ?= 10000

soak: $(STAMP)
	PYTHONPATH=tests .venv/bin/python -m fuzz.soak --seconds $(SOAK_SECONDS) --made $(SOAK_MADE)

# Exported programs on aarch64, riscv64 and an old x86-64, and the microkernels for aarch64, under emulators, where cross
# compilers are installed.
isa: $(STAMP)
	.venv/bin/python -m pytest -q -n auto -m slow -rs tests/runtime/export/test_other_processors.py tests/kernels/test_neon_kernels.py

lint: format types

format: $(STAMP)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/clang-format --dry-run -Werror $(CPP_FILES)
	.venv/bin/codespell $(SPELLED)

types: $(STAMP)
	.venv/bin/python -m mypy

# The tests beside every PyTorch that pyproject.toml declares, oldest first, each in an environment of its own.
TORCH_VERSIONS ?= 2.13.0

check-torch: | check
	@for version in $(TORCH_VERSIONS); do \
	  home=build/torch-$$version; echo "PyTorch $$version, in $$home"; \
	  $(PYTHON) -m venv $$home && \
	  $$home/bin/python -m pip -qq --disable-pip-version-check --no-input install torch==$$version && \
	  $$home/bin/python -m pip -qq --disable-pip-version-check --no-input install -e '.[dev,demo]' && \
	  $$home/bin/python -m pytest -q -n auto --dist worksteal || exit 1; \
	done

# The documentation, as pages in build/site.
docs: $(STAMP) $(DOCS)
	.venv/bin/python -m sphinx -W --keep-going -E -q -d build/doctrees docs build/site

# torch is pinned to one build here; pyproject.toml declares the versions that `make check-torch` tests.
# torchvision is for examples/newcomer.py; with its dependencies it would bring another build of torch.
$(STAMP): pyproject.toml Makefile $(CONSTRAINTS) | check
	$(PYTHON) -m venv .venv
	$(PIP) install $(PIP_VERSION)
	$(INSTALL) torch==2.13.0 -e '.[dev]'
	$(INSTALL) --no-deps torchvision==0.28.0 pillow
	@touch $@

$(DOCS): $(STAMP)
	$(INSTALL) -e '.[docs]'
	@touch $@

check:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "intaglio needs Python 3.11 or later as $(PYTHON); install one, then: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@command -v g++ >/dev/null || \
	  { echo "intaglio compiles kernels with g++ and there is none; install it (Debian, Ubuntu: apt install g++)" >&2; exit 1; }

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +
