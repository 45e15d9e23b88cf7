# The front door: each target says what it does in `make help`. CMake does the work, in build/.
BUILD  ?= build
PREFIX ?= /usr/local
JOBS   ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
MAKEFLAGS += --no-print-directory
SOURCES = $(shell git ls-files '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh')

# AUTO: for the GPUs that are here; ON: for every one from Ampere on, or those that ARCHITECTURES names (80 90-real ...).
CUDA   ?= AUTO
ARCHITECTURES ?=
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null)
space := $(subst ,, )
list = "$(subst $(space),;,$(strip $(1)))"
CUDA_FLAGS = -DSCRUPLE_CUDA=$(CUDA) -DCMAKE_CUDA_ARCHITECTURES=$(call list,$(ARCHITECTURES)) \
  -DSCRUPLE_CUDA_OPTIMIZERS=$(call list,$(OPTIMIZERS))
CONFIGURE = cmake --log-level=NOTICE -S .
has_toolkit = $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))

.PHONY: help build test test-all test-gpu evidence demo bench docs install wheel format tidy sanitize sanitize-threads sanitize-gpu clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | awk -F'\t' '{printf "  make %-17s %s\n", $$1, $$2}'

build: ## install what is missing (apt), build the library and the command line into build/
	@scripts/packages.sh build
	@$(CONFIGURE) -B $(BUILD) $(CUDA_FLAGS)
	@cmake --build $(BUILD) -j$(JOBS)

# Where a toolkit is but no GPU, one optimizer for one architecture shows that the kernels compile; SCRUPLE_TEST_WHOLE=1
# compiles all of them, and visits every float where a test can (tests/support.h).
test: ARCHITECTURES = $(if $(HAS_GPU),,90-real)
test: OPTIMIZERS = $(if $(HAS_GPU)$(SCRUPLE_TEST_WHOLE),,AdamW)
test: ## build everything with warnings as errors and run every test, in 15 to 35 minutes on 2 cores
	@scripts/packages.sh test
	@scripts/python.sh
	@$(CONFIGURE) -B $(BUILD) -DSCRUPLE_DEVELOPER=ON $(CUDA_FLAGS)
	@cmake --build $(BUILD) -j$(JOBS)
	@ctest --test-dir $(BUILD) --output-on-failure -j$(JOBS)

test-all: export SCRUPLE_TEST_WHOLE = 1
test-all: ## before a release: the tests with every loop whole, the sanitizers, the fuzzer for ten minutes; an hour and more
	@$(MAKE) test
	@$(MAKE) sanitize
	@$(MAKE) sanitize-threads
	@fuzz/run.sh $(BUILD)/fuzz 600

# The examples need packages beside torch, and run on the CPU; so do these tests of commands.
CPU_ONLY = ^(torch_examples|train_test|compare_test|resume_test|newcomer_test)$$
test-gpu: ## on a machine with a GPU: build for it and run the tests, the GPU's and the CPU's; installs nothing
	@nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
	@$(CONFIGURE) -B $(BUILD)/gpu -DSCRUPLE_DEVELOPER=ON -DSCRUPLE_CUDA=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=native -DSCRUPLE_CLI=AUTO -DSCRUPLE_TRAIN=AUTO
	@cmake --build $(BUILD)/gpu -j$(JOBS)
	@SCRUPLE_TEST_ENGINE=cuda SCRUPLE_TEST_DEVICE=cuda SCRUPLE_COMPILERS=g++ \
	  ctest --test-dir $(BUILD)/gpu --output-on-failure -j$(JOBS) -E '$(CPU_ONLY)'

# The page is made of the whole runs; without DATA a task draws its own. SMALL=1: one or two minutes on 2 cores, kept in build/.
evidence: ## re-make a table of evidence/: make evidence TASK=recommendation [DATA=DIR] [SMALL=1]
	@$(if $(TASK),,echo "Which TASK? $$(sed -n 's/^TASKS = "\(.*\)".*/\1/p' evidence/run.py); such as make evidence TASK=recommendation SMALL=1"; exit 2)
	@scripts/packages.sh build
	@scripts/python.sh
	@$(CONFIGURE) -B $(BUILD) $(CUDA_FLAGS)
	@cmake --build $(BUILD) -j$(JOBS) --target scruple
	@PYTHONPATH=python SCRUPLE_LIBRARY=$(BUILD)/libscruple.so .venv/bin/python evidence/run.py $(TASK) \
	  $(if $(DATA),--data $(DATA)) $(if $(SMALL),--small)
	@$(if $(SMALL),,.venv/bin/python evidence/report.py)

demo: build ## train every recipe on the same text, compare them, and draw demo/report.html
	$(BUILD)/scruple compare --out demo

bench: build ## measure every recipe on this machine
	$(BUILD)/scruple bench

docs: ## make a site of the Markdown files, build/site/index.html, in half a minute
	@scripts/packages.sh docs
	@scripts/python.sh docs
	@rm -rf $(BUILD)/doctrees $(BUILD)/site
	@.venv/bin/python -m sphinx -q -W --keep-going -c docs/site -d $(BUILD)/doctrees . $(BUILD)/site
	@echo "The first page: $(BUILD)/site/index.html"

install: build ## install into PREFIX (default /usr/local)
	@cmake --install $(BUILD) --prefix $(PREFIX)

# For every GPU from Ampere on, whatever GPU is here.
wheel: CUDA = $(if $(call has_toolkit),ON,OFF)
wheel: ## build a wheel for every GPU into dist/, or of the CPU engines where there is no CUDA toolkit: 20 minutes on 2 cores
	@$(if $(call has_toolkit),,echo "No CUDA toolkit is here: the wheel has the CPU engines alone")
	@scripts/packages.sh wheel
	@scripts/python.sh wheel
	@CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) scripts/wheel.sh $(BUILD)/wheel $(CUDA_FLAGS)

format: ## format every source file
	@scripts/packages.sh format
	@clang-format -i $(SOURCES)

tidy: ## run clang-tidy over the library and the command line
	@scripts/packages.sh tidy
	@$(CONFIGURE) -B $(BUILD)/tidy -DSCRUPLE_DEVELOPER=ON $(CUDA_FLAGS) \
	  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	@run-clang-tidy -quiet -p $(BUILD)/tidy -j$(JOBS) -extra-arg=-Wno-unknown-warning-option '/(engine|grad|io|train|capi|cli|bench)/.*\.cpp$$'

sanitize: ## build with the address and undefined-behaviour sanitizers and run every test
	@scripts/packages.sh test
	@scripts/python.sh
	@cmake --preset sanitize --log-level=NOTICE
	@cmake --build --preset sanitize -j$(JOBS)
	@ctest --preset sanitize -j$(JOBS)

# Of the tests, those of C++ that start threads; but not following_test and stochastic_test, which would take hours and
# run no code that parity_test does not.
THREADED = accumulator cached_transformer checkpoint cpu_math errors gpt measure norm_fold parity planes save_failures sink sink_skips trainer
sanitize-threads: ## build with the thread sanitizer and run the tests that start threads
	@scripts/packages.sh test
	@cmake --preset sanitize-threads --log-level=NOTICE
	@cmake --build --preset sanitize-threads -j$(JOBS) --target $(addsuffix _test,$(THREADED))
	@ctest --preset sanitize-threads -j$(JOBS) -R '^($(subst $(space),|,$(THREADED)))_test$$'

sanitize-gpu: ## after make test-gpu: run the GPU tests under compute-sanitizer (memory, uninitialised reads, races)
	@scripts/sanitize_gpu.sh $(BUILD)/gpu

clean: ## remove build/
	@rm -rf $(BUILD)
