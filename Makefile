# make demo    set up .venv and train the embedded default: digits, less than a minute on two CPU cores, after the download
# make demo-mindspore    the same with MindSpore, two workers under msrun, in .venv-mindspore
# make test    set up both environments and run the tests that every change must pass: minutes on two cores
# make test-all   the same and every combination of facts, the mock accelerator, planted faults: before a release
# make test-device    runs on the mock accelerator, with memory apart from the host's: what a CPU can show about GPUs and NPUs
# make test-fast    the tests that are not marked as starting processes, before each commit
# make check   layering, style, types, and whether every test can be collected
# make docs    the site of docs/, in site/; a link that leads nowhere is an error. make docs-serve shows it while you write
# make mutants break one expression at a time and count what the fast tests find: half an hour on one core
# make clean   remove the environments and what the demo wrote

PYTHON ?= python3
VENV := .venv
MS_VENV := .venv-mindspore
MUTATION_VENV := .venv-mutation
BIN := $(VENV)/bin
# A run of the other framework has a folder of its own.
MS_PLACES := --save outputs/digits-mindspore/checkpoints --load outputs/digits-mindspore/checkpoints \
  --tensorboard-dir outputs/digits-mindspore/tensorboard
# What is tested on either framework, each in its own environment. After other models of a process MindSpore 2.10 fails at
# gradients of some products with an axis of 1 (test_single_key.py), and after such a product it computes wrong gradients: so
# that file, tests/test_cross_product.py and the tests of verification have processes of their own, in `make test-all`.
SEAM_TESTS := tests/framework/test_framework_contract.py tests/framework/test_mindspore_file.py \
  tests/objectives/gaussian/test_loss_in_float32.py tests/golden tests/objectives/flow/test_path.py \
  tests/objectives/test_any_latents.py tests/models/test_autoencoder_kl.py \
  tests/models/test_outside_predictor.py tests/models/test_video_transformer.py \
  tests/models/test_lora.py tests/objectives/wan_flow tests/mindspore/test_mindspore_framework.py \
  tests/mindspore/test_sharding.py tests/mindspore/test_step.py tests/training/test_rehearsal.py \
  tests/sampling/test_autoguidance.py tests/models/test_dit_shapes.py tests/models/test_image_transformers.py tests/test_durations.py
# What is run on the mock accelerator (tests/mock_accelerator) beside what is written for it, but for two that are long and show nothing there.
DEVICE_TESTS := --deselect tests/training/test_lora_run.py::test_cat_dog_fine_tunes_published_weights \
  --deselect tests/tools/evaluate/test_evaluate.py::test_statistics_of_a_folder_score_like_the_folder \
  tests/device tests/test_cross_product.py tests/sampling \
  tests/training/test_run.py tests/tools/verify/test_replay.py tests/training/test_grids.py tests/training/test_lora_run.py \
  tests/training/test_power_ema_run.py tests/training/test_same_numbers.py tests/training/test_repa_run.py \
  tests/training/test_low_bit_run.py \
  tests/training/test_text_to_image_run.py \
  tests/cli/test_sample.py tests/tools/evaluate/test_evaluate.py tests/test_api.py \
  tests/tools/visualize/test_app.py::test_the_page_answers_with_the_samples_of_the_pipeline_and_their_way \
  tests/test_planted_faults.py::test_a_fault_that_no_cpu_sees_is_caught_on_a_device
# Rooms whose tests run in the process of the tests.
FAST_TESTS := $(addprefix tests/,configs data framework models objectives planning sampling golden tools/planning tools/evaluate)
PIP := $(BIN)/python -m pip --disable-pip-version-check install

# Tests start some hundred processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: register demo demo-mindspore test test-all test-pytorch test-mindspore test-mindspore-alone test-device test-fast check docs docs-serve mutants clean

demo: $(VENV)/.installed
	bash examples/dit/pretrain.sh
	@echo "to go on: source $(VENV)/bin/activate, and then for instance mm-dit sample --help"

demo-mindspore: $(MS_VENV)/.installed
	AI_FRAMEWORK=mindspore bash examples/dit/pretrain.sh $(MS_PLACES)

# TEST_FLAGS go to pytest: make test TEST_FLAGS='-n 1 -p randomly'. Both frameworks side by side, so that no core stands idle.
test: $(VENV)/.installed-dev $(MS_VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j2 test-pytorch test-mindspore

test-all: $(VENV)/.installed-dev $(MS_VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j2 test-pytorch test-mindspore TEST_FLAGS="--extended $(TEST_FLAGS)"
	@$(MAKE) --no-print-directory -j2 test-device test-mindspore-alone

test-pytorch: $(VENV)/.installed-dev $(MS_VENV)/.installed-dev
	MM_DIT_MINDSPORE_PYTHON=$(CURDIR)/$(MS_VENV)/bin/python $(BIN)/python -m pytest $(TEST_FLAGS)

ON_MINDSPORE := MM_DIT_TEST_FRAMEWORK=mindspore GLOG_v=3 $(MS_VENV)/bin/python -m pytest -n 0
test-mindspore: $(MS_VENV)/.installed-dev
	$(ON_MINDSPORE) $(filter-out -n 1 -p randomly,$(TEST_FLAGS)) $(SEAM_TESTS)

test-mindspore-alone: $(MS_VENV)/.installed-dev
	$(ON_MINDSPORE) tests/framework/test_single_key.py
	$(ON_MINDSPORE) --extended tests/test_cross_product.py
	$(ON_MINDSPORE) --extended tests/tools/verify/test_port.py tests/tools/verify/test_step_trace.py

# The first time the device is compiled, which takes a minute or two of a core.
test-device: $(VENV)/.installed-dev
	@if command -v g++ > /dev/null; \
	then PYTHONPATH=$(CURDIR)/tests/mock_accelerator $(BIN)/python -m pytest --extended $(DEVICE_TESTS); \
	else echo "no g++: the device of the tests cannot be compiled, and nothing is tested on it"; fi

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not ranks" $(FAST_TESTS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest --collect-only -qq > /dev/null

# (mkdocs-material advertises its successor where this is not set)
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --quiet --strict

docs-serve: $(VENV)/.installed-docs
	$(BIN)/mkdocs serve

register: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.register

mutants: $(MUTATION_VENV)/.installed
	OMP_NUM_THREADS=1 nice $(MUTATION_VENV)/bin/python benchmarks/mutants.py $(MUTANTS)

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
  || { echo "$(PYTHON) is $$($(PYTHON) --version): Python 3.10 to 3.12 is needed; make PYTHON=python3.11 ..."; exit 1; }

# A PyTorch that sees an accelerator is the user's own and is kept (found through a .pth file). Otherwise PyTorch's build
# for CUDA is installed where there is an NVIDIA driver, and its CPU build, a twentieth of that, where there is none.
$(VENV)/.installed: requirements/base.txt requirements/pytorch.txt requirements/pytorch-cpu.txt setup.py
	@$(CHECK_PYTHON)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@if theirs=$$($(PYTHON) requirements/find_pytorch.py); \
	then echo "keeping the PyTorch in $$theirs"; \
	  echo "$$theirs" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/users_pytorch.pth"; \
	elif command -v nvidia-smi > /dev/null; \
	then echo "PyTorch for CUDA, about 3 GB"; $(PIP) $$(grep torch== requirements/pytorch-cpu.txt); \
	else echo "PyTorch's CPU build, about 200 MB"; $(PIP) --retries 1 -r requirements/pytorch-cpu.txt; fi
	@echo "everything else, about 300 MB"
	$(PIP) -r requirements/base.txt -r requirements/pytorch.txt
	$(PIP) --quiet --no-deps --editable .
	@touch $@

# MindSpore lives without PyTorch: nothing on its path imports it.
$(MS_VENV)/.installed: requirements/base.txt requirements/mindspore.txt setup.py
	@$(CHECK_PYTHON)
	@echo "installing into $(MS_VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(MS_VENV)
	$(MS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet \
	  -r requirements/base.txt -r requirements/mindspore.txt
	$(MS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

$(MS_VENV)/.installed-dev: $(MS_VENV)/.installed requirements/dev.txt
	$(MS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet $(shell grep ^pytest requirements/dev.txt)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt requirements/video.txt requirements/parquet.txt \
    requirements/evaluate.txt requirements/app.txt requirements/gguf.txt
	$(PIP) -c requirements/base.txt -r requirements/dev.txt -r requirements/video.txt -r requirements/parquet.txt \
	  -r requirements/app.txt -r requirements/gguf.txt
	$(PIP) --no-deps -r requirements/evaluate.txt
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed requirements/docs.txt
	$(PIP) --quiet -r requirements/docs.txt
	@touch $@

# mutmut sees the packages of .venv through a .pth file, and those that .venv sees so itself.
$(MUTATION_VENV)/.installed: $(VENV)/.installed-dev requirements/mutation.txt
	$(BIN)/python -m venv $(MUTATION_VENV)
	@packages() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	theirs=$$(packages $(VENV)); { echo "$$theirs"; cat "$$theirs/users_pytorch.pth" 2>/dev/null || true; } \
	  > "$$(packages $(MUTATION_VENV))/shared.pth"
	$(MUTATION_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/mutation.txt
	$(MUTATION_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) $(MS_VENV) $(MUTATION_VENV) mutants outputs data msrun_log site
