# make test     lint, then the tests that take at most 3 CPU-seconds, two cases of each, and programs that have changed
#               (WORKERS=14: by so many processes at once; CHANGED_SINCE=COMMIT: changed since that commit)
# make test-all lint, then all cases of every test, which take hours on two cores
# make test-rest a tenth of what make test leaves out (PART=7: which one, from 0 to 9)
# make test-landing both in one run, for .ci/run, with a third of all programs
# make test-gpu the tests that use GPUs, on a machine with one or more; ranks share GPUs where there are fewer (WORKERS=12)
# make quick    fast tests of each subject, which take less than two minutes on two cores
# make demo     train the small model of examples/demo on two processes (DEMO_ARGS="..." reaches the script)
# make fuzz     train random models beside a plain loop (MODELS=1000 SEED=7 WORLD=3: how many, seed, ranks)
# make models   train every architecture of tests/support/architectures with DeepCompile off and on (WORKERS=14)
# make optimizers train with every optimizer of tests/support/known_optimizers.py, and measure the steps
# make sanitize test the native code under gcc's sanitizers (SANITIZER=address, thread or undefined: only that one)
# make faults   plant faults in a copy of the fork, and show that the tests see each (FAULT_ARGS="..." reaches the script)
# make bench    compare the fork with its base and with FSDP2 (BENCH_ARGS="..." reaches benchmarks.compare)
# make wheel    build a wheel and an sdist in dist/, which pip installs on any machine; native code is compiled there
# make docs     build the documentation's site in build/site; a warning or a broken link is an error
# make lint     check the formatting and the usual mistakes; make format repairs what can be repaired
# make clean    remove everything that was made here except the base's downloaded archive
#
# Work happens in a virtual environment under .venv, one for each TORCH, for example
#     make test TORCH=torch==2.15.0
# in which the fork is installed anew whenever the content of a file that goes into it has changed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
BENCH_ARGS ?=
FAULT_ARGS ?=
MODELS ?= 100
SEED ?= 0
# The ranks of a test wait for each other, so three processes keep two cores busy.
WORKERS ?= 3
CHANGED_SINCE ?=
PART ?= 0
WORLD ?= 2
SANITIZER ?= address thread undefined

VENV := .venv/$(shell printf '%s' '$(TORCH)' | tr -cs 'A-Za-z0-9.+' '-')
BIN := $(CURDIR)/$(VENV)/bin
# Errors only: of a search in several indexes pip warns for each package that one of them lacks.
PIP := '$(BIN)/python' -m pip --disable-pip-version-check --quiet --quiet
# $(call if_links,WORDS): these words where the environment has links to this checkout instead of copies, as CONTRIBUTING.md
# sets it up.
LINKS = import json, os, sys, urllib.parse; from importlib import metadata; \
	texts = (found.read_text('direct_url.json') or '{}' for found in metadata.distributions(name='deepspeed')); \
	linked = (urllib.parse.unquote(url['url'].removeprefix('file://')) for url in map(json.loads, texts) \
	if url.get('dir_info', {}).get('editable')); \
	print(*sys.argv[1:] if os.path.realpath('$(CURDIR)') in map(os.path.realpath, linked) else ())
if_links = $$('$(BIN)/python' -I -c "$(LINKS)" $(1))
# Native code compiled at run time stays in the environment whose torch it was compiled against. CONTRIBUTING.md sets a
# variable for a shell in the checkout under which modules of the checkout are not found.
# Modules are kept compiled, also where a shell says otherwise: pytest rewrites the asserts of hundreds of files. Where
# Python looks into this folder, it takes deepspeed/ for the package before it asks for links, so it looks there first.
RUN := env -u PYTHONSAFEPATH -u PYTHONDONTWRITEBYTECODE PATH='$(BIN)':"$$PATH" \
	$(call if_links,PYTHONPATH='$(CURDIR)/build/editable') \
	TORCH_EXTENSIONS_DIR='$(CURDIR)/$(VENV)/torch_extensions'

# $(call content,PATHS): a short name for what is in these files and folders
content = $(shell find $(1) -type f ! -name '*.pyc' | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16)
FORK_FILES := deepspeed csrc setup.py pyproject.toml requirements/base.txt NOTICE
TOOLS := $(VENV)/.tools-$(call content,requirements/dev.txt)
PACK_BIN := $(CURDIR)/.venv/pack/bin
PIP_OF_PACK = '$(PACK_BIN)/python' -m pip --disable-pip-version-check --quiet --quiet
PACK := .venv/pack/.pack-$(call content,pyproject.toml)
FORK := $(VENV)/.fork-$(call content,$(FORK_FILES))
DEMO := $(VENV)/.demo-$(call content,requirements/demo.txt)
FRONTS := $(VENV)/.fronts-$(call content,requirements/demo.txt requirements/front_doors.txt)
DOCS := $(VENV)/.docs-$(call content,requirements/docs.txt)
BENCH := $(VENV)/.bench-$(call content,requirements/demo.txt requirements/benchmarks.txt)
# The base as it is released, beside the fork: a folder for PYTHONPATH.
BASE := $(VENV)/base-$(call content,requirements/base.txt)
# Tests of the native code in rank processes on CPU, compiled by tests/sanitizers/g++ with the sanitizer that the shell
# has at hand. setarch -R turns random addresses off where that is allowed: ThreadSanitizer fails with them.
SANITIZED = PATH='$(BIN)':"$$PATH" CUDA_VISIBLE_DEVICES= SANITIZER=$$sanitizer CXX='$(CURDIR)/tests/sanitizers/g++' \
	TORCH_EXTENSIONS_DIR='$(CURDIR)/$(VENV)/sanitized-'$$sanitizer-$(call content,tests/sanitizers) \
	$$(setarch -R true 2>/dev/null && echo setarch -R) pytest -q -o timeout=0 \
	tests -m sanitized
IN_PARALLEL = -n $(WORKERS) --dist worksteal
# A test that took too long may have filled a cache, or shared its core's cache with others, so it gets two more
# chances; any other failure is one at once.
WITHIN_BUDGET = --cpu-limits --reruns 2 --only-rerun OverBudget
COMPILE = from deepspeed.comm.torch import build_shm_op; build_shm_op(); \
	from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module; reducer_module()
COMPILE_ADAM = import sys; from deepspeed.accelerator import get_accelerator; \
	get_accelerator().create_op_builder(sys.argv[1]).load()
NATIVE = $$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# How a compiler finds torch's and Python's headers, and a name for native code of which each file was checked.
HEADERS = import sysconfig; from torch.utils.cpp_extension import include_paths; \
	print(*('-isystem ' + path for path in [*include_paths(), sysconfig.get_path('include')]))
ALONE := $(VENV)/.alone-$(call content,csrc)

.PHONY: demo test test-all test-rest test-landing test-gpu quick fuzz models optimizers sanitize faults bench wheel docs \
	lint format clean toolchain
.NOTPARALLEL:
# Recipes say what they do, and how long it takes where that is more than some seconds.
.SILENT:

test: toolchain lint $(FORK) $(BENCH) $(FRONTS) $(BASE) $(DOCS)
	echo "Running the tests, which takes about 12 minutes on two cores ..."
	$(RUN) pytest -q tests --fewer-cases $(if $(CHANGED_SINCE),--changed-since $(CHANGED_SINCE)) --base $(BASE) \
		$(IN_PARALLEL) $(WITHIN_BUDGET)

test-all: toolchain lint $(FORK) $(BENCH) $(FRONTS) $(BASE) $(DOCS)
	echo "Running all cases of every test, which takes hours on two cores ..."
	$(RUN) pytest -q tests --base $(BASE) $(IN_PARALLEL)

test-rest: toolchain lint $(FORK) $(BENCH) $(FRONTS) $(BASE) $(DOCS)
	echo "Running part $(PART) of what make test leaves out, which takes about 20 minutes on two cores ..."
	$(RUN) pytest -q tests --part-of-the-rest $(PART) --base $(BASE) $(IN_PARALLEL)

test-landing: toolchain lint $(FORK) $(BENCH) $(FRONTS) $(BASE) $(DOCS)
	echo "Running the tests and part $(PART) of the rest, which takes about 35 minutes on two cores ..."
	$(RUN) pytest -q tests --fewer-cases --part-of-the-rest $(PART) \
		$(if $(CHANGED_SINCE),--changed-since $(CHANGED_SINCE)) --base $(BASE) $(IN_PARALLEL) $(WITHIN_BUDGET)

test-gpu: toolchain $(FORK) $(BENCH) $(FRONTS) $(BASE)
	echo "Running the tests that use a GPU ..."
	$(RUN) pytest -q tests --gpu --fewer-cases --base $(BASE) $(IN_PARALLEL)

quick: toolchain $(FORK) $(DOCS)
	echo "Running fast tests, which takes less than two minutes on two cores ..."
	$(RUN) pytest -q tests -m quick

demo: toolchain $(FORK) $(DEMO)
	echo "Training with DeepCompile off and on ..."
	if ! $(BIN)/python -c "import torch; exit(not torch.cuda.is_available())"; then \
		export DS_ACCELERATOR=cpu; set -- --num_accelerators 2; \
	fi; $(RUN) deepspeed --log_level error "$$@" examples/demo/train_qwen3.py $(DEMO_ARGS)

fuzz: toolchain $(FORK)
	$(RUN) pytest -q tests/programs/test_fuzz.py -o timeout=0 --models $(MODELS) --seed $(SEED) --world $(WORLD)

models: toolchain $(FORK) $(FRONTS)
	$(RUN) pytest -q tests/programs/test_models.py --every-model $(IN_PARALLEL)

optimizers: toolchain $(FORK) $(FRONTS)
	echo "Training with each optimizer of torch and of the packages that are installed ..."
	$(RUN) TORCHINDUCTOR_VEC_ISA_OK=1 pytest -q tests/programs/test_optimizers.py --every-optimizer

sanitize: toolchain $(FORK)
	for name in libasan libtsan libubsan; do \
		case "$$(g++ -print-file-name=$$name.so 2>/dev/null)" in /*) ;; *) \
			echo "gcc's sanitizers are needed, and $$name was not found (on Debian: apt-get install g++)." >&2; \
			exit 1 ;; \
		esac; \
	done
	status=0; for sanitizer in $(SANITIZER); do $(SANITIZED) --sanitizer $$sanitizer \
		--reports build/sanitizers/$$sanitizer || status=1; done; exit $$status

faults: toolchain $(FORK) $(BENCH) $(FRONTS) $(BASE) $(DOCS)
	echo "Running for each fault the tests that should see it, which takes about half an hour on two cores ..."
	$(RUN) python tests/planted_faults.py $(FAULT_ARGS)

bench: toolchain $(FORK) $(BENCH) $(BASE)
	$(RUN) python -m benchmarks.compare --base $(BASE) $(BENCH_ARGS)

wheel: $(PACK)
	echo "Building a wheel and an sdist ..."
	rm -rf dist
	$(PIP_OF_PACK) wheel --no-deps --no-build-isolation --wheel-dir dist .
	env -u PYTHONSAFEPATH '$(PACK_BIN)/python' setup.py --quiet sdist --dist-dir dist
	ls dist/*

docs: $(DOCS)
	echo "Building the documentation ..."
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/site
	echo "Open build/site/index.html in a browser."

lint: $(TOOLS) $(ALONE)
	echo "Checking formatting, types and the usual mistakes ..."
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --diff .
	$(BIN)/mypy --no-error-summary
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(TOOLS)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf .venv dist build/wheel build/editable build/sanitizers build/site build/faults benchmark-results .pytest_cache \
		.ruff_cache .mypy_cache .hypothesis
	find deepspeed tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Each file of native code must include what it uses. all.cpp, which includes all files, compiles without that.
$(ALONE): $(TOOLS)
	echo "Checking each file of native code by itself ..."
	if command -v "$${CXX:-c++}" >/dev/null; then \
		ls csrc/compile/*.cpp | grep -v /all.cpp | xargs -n 1 -P $$(nproc) "$${CXX:-c++}" -std=c++20 -fsyntax-only -w \
			-Icsrc/includes -DTORCH_EXTENSION_NAME=dc $$($(BIN)/python -c "$(HEADERS)") && \
		rm -f $(VENV)/.alone-* && touch $@; \
	else echo "Native code is not checked: no C++ compiler was found (on Debian: apt-get install g++)."; fi

# The native code is compiled when it is first used, so a missing compiler is better noticed here.
toolchain:
	command -v "$${CXX:-c++}" >/dev/null || { \
		echo "A C++ compiler is needed to compile the native code, and none was found (on Debian: apt-get install g++)." >&2; \
		exit 1; }
	$(PYTHON) -c "import os, sysconfig; exit(not os.path.isfile(sysconfig.get_path('include') + '/Python.h'))" || { \
		echo "Python's C headers are needed to compile the native code, and $(PYTHON) has none (on Debian: apt-get install python3-dev)." >&2; \
		exit 1; }

$(TOOLS):
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "No virtual environment could be made with $(PYTHON) (on Debian: apt-get install python3-venv)." >&2; \
		exit 1; }
	echo "Installing $(TORCH) and the tools, which may take some minutes ..."
	$(PIP) install '$(TORCH)' -r requirements/dev.txt
	rm -f $(VENV)/.tools-* && touch $@

# A wheel needs no torch: native code is compiled where it is installed.
$(PACK):
	test -x '$(PACK_BIN)/pip' || $(PYTHON) -m venv --clear .venv/pack || { \
		echo "No virtual environment could be made with $(PYTHON) (on Debian: apt-get install python3-venv)." >&2; \
		exit 1; }
	$(PIP_OF_PACK) install 'setuptools>=70.1' wheel
	rm -f .venv/pack/.pack-* && touch $@

# Native code, DeepSpeed's own for CPUs too, is compiled here, so that no test and no training has to wait for it. A
# compiler takes a minute or two for each module and uses one core, so modules are compiled beside each other.
$(FORK): $(TOOLS)
	echo "Installing the fork ..."
	$(PIP) install --no-build-isolation $(call if_links,--editable) .
	echo "Compiling native code, which may take some minutes on two cores ..."
	cd $(VENV) && for name in CPUAdamBuilder FusedAdamBuilder; do \
		{ $(RUN) python -c "$(COMPILE_ADAM)" $$name >$$name.log 2>&1 || \
			echo "DeepSpeed's own Adam could not be compiled (see $(VENV)/$$name.log), so tests that use it may fail." >&2; } & \
	done; status=0; $(RUN) python -c "$(COMPILE)" >native.log 2>&1 || { status=1; cat native.log >&2; }; wait; exit $$status
	rm -f $(VENV)/.fork-* && touch $@

$(DEMO): $(TOOLS)
	echo "Installing what the demo needs ..."
	$(PIP) install -r requirements/demo.txt
	rm -f $(VENV)/.demo-* && touch $@

$(FRONTS): $(TOOLS)
	echo "Installing Accelerate, Trainer, Lightning, TRL and torchao ..."
	$(PIP) install -r requirements/front_doors.txt
	rm -f $(VENV)/.fronts-* && touch $@

$(DOCS): $(TOOLS)
	echo "Installing what builds the documentation ..."
	$(PIP) install -r requirements/docs.txt
	rm -f $(VENV)/.docs-* && touch $@

$(BENCH): $(TOOLS)
	echo "Installing what the benchmarks need ..."
	$(PIP) install -r requirements/benchmarks.txt
	rm -f $(VENV)/.bench-* && touch $@

# The base's setup.py imports from its own folder.
$(BASE): $(TOOLS)
	echo "Installing DeepSpeed as it was released, in a folder of its own ..."
	rm -rf $(VENV)/base-*
	env -u PYTHONSAFEPATH DS_BUILD_OPS=0 $(PIP) install --no-build-isolation --no-deps --target $@ --no-binary :all: \
		--require-hashes -r requirements/base.txt
