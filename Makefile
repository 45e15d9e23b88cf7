# The front door: each target says what it does in `make help`. CMake does the work, in build/.
BUILD  ?= build
PREFIX ?= /usr/local
JOBS   ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
MAKEFLAGS += --no-print-directory
SOURCES = $(shell git ls-files '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh')

# GPU code is built for the GPU that is here; where there is none, for every architecture that CMake's default
# names, and in tests for one, to see that it compiles.
CUDA   ?= AUTO
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null)
ARCHITECTURES ?= $(if $(HAS_GPU),native)
CUDA_FLAGS = -DSCRUPLE_CUDA=$(CUDA) -DCMAKE_CUDA_ARCHITECTURES="$(ARCHITECTURES)"
has_header = $(wildcard /usr/include/$(1) /usr/local/include/$(1))
HAS_CLI = $(if $(and $(call has_header,CLI/CLI.hpp),$(call has_header,nlohmann/json.hpp)),ON,OFF)

.PHONY: help build test test-gpu demo bench install wheel format tidy sanitize sanitize-gpu clean
.DEFAULT_GOAL := help

help: ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | awk -F'\t' '{printf "  make %-13s %s\n", $$1, $$2}'

build: ## install what is missing (apt), build the library and the command line into build/
	@scripts/packages.sh build
	@cmake -S . -B $(BUILD) --log-level=WARNING $(CUDA_FLAGS)
	@cmake --build $(BUILD) -j$(JOBS)

test: ARCHITECTURES = $(if $(HAS_GPU),native,90)
test: ## build everything with warnings as errors and run every test
	@scripts/packages.sh test
	@scripts/python.sh
	@cmake -S . -B $(BUILD) --log-level=WARNING -DSCRUPLE_DEVELOPER=ON $(CUDA_FLAGS)
	@cmake --build $(BUILD) -j$(JOBS)
	@ctest --test-dir $(BUILD) --output-on-failure

# The tests of scruple.torch that start processes of their own, on the CPU whatever SCRUPLE_TEST_DEVICE says.
CPU_ONLY = ^torch_(distributed|examples)$$
test-gpu: ## on a machine with a GPU: build for it and run every test, the GPU's and the CPU's; installs nothing
	@nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
	@cmake -S . -B $(BUILD)/gpu --log-level=WARNING -DSCRUPLE_DEVELOPER=ON -DSCRUPLE_CUDA=ON \
	  -DCMAKE_CUDA_ARCHITECTURES=native -DSCRUPLE_CLI=$(HAS_CLI) -DSCRUPLE_TRAIN=OFF
	@cmake --build $(BUILD)/gpu -j$(JOBS)
	@SCRUPLE_TEST_ENGINE=cuda SCRUPLE_TEST_DEVICE=cuda SCRUPLE_COMPILERS=g++ \
	  ctest --test-dir $(BUILD)/gpu --output-on-failure -j$(JOBS) -E '$(CPU_ONLY)'

demo: CUDA = OFF
demo: build ## train every recipe on the same text, compare them, and draw demo/report.html
	$(BUILD)/scruple compare --out demo

bench: build ## measure every recipe on this machine
	$(BUILD)/scruple bench

install: build ## install into PREFIX (default /usr/local)
	@cmake --install $(BUILD) --prefix $(PREFIX)

wheel: ## build a wheel of the Python package, with the library inside, into dist/
	@scripts/packages.sh wheel
	@scripts/python.sh wheel
	@CMAKE_ARGS='$(CUDA_FLAGS)' CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) .venv/bin/pip --quiet --disable-pip-version-check \
	  wheel . --wheel-dir dist --no-deps --no-build-isolation --config-settings=build-dir=$(BUILD)/wheel \
	  --config-settings=ninja.make-fallback=true
	@ls -t dist/*.whl | head -1

format: ## format every source file
	@scripts/packages.sh format
	@clang-format -i $(SOURCES)

tidy: ## run clang-tidy over the library and the command line
	@scripts/packages.sh tidy
	@cmake -S . -B $(BUILD)/tidy --log-level=WARNING -DSCRUPLE_DEVELOPER=ON $(CUDA_FLAGS) \
	  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	@run-clang-tidy -quiet -p $(BUILD)/tidy -j$(JOBS) -extra-arg=-Wno-unknown-warning-option '/(engine|grad|io|train|capi|cli|bench)/.*\.cpp$$'

sanitize: ## build with the address and undefined-behaviour sanitizers and run every test
	@scripts/packages.sh test
	@scripts/python.sh
	@cmake --preset sanitize --log-level=WARNING
	@cmake --build --preset sanitize -j$(JOBS)
	@ctest --preset sanitize

sanitize-gpu: ## after make test-gpu: run the GPU tests under compute-sanitizer (memory, uninitialised reads, races)
	@scripts/sanitize_gpu.sh $(BUILD)/gpu

clean: ## remove build/
	@rm -rf $(BUILD)
