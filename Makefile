# make demo   set up .venv and train the embedded default: digits, about a minute on two CPU cores
# make test   set up .venv and run every test
# make check  layering, style and types
# make clean  remove .venv and what the demo wrote

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test check clean

demo: $(VENV)/.installed
	bash examples/dit/pretrain.sh

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# A PyTorch that sees an accelerator is the user's own and is kept (found through a .pth file); otherwise the
# CPU build is installed.
$(VENV)/.installed: requirements/base.txt requirements/pytorch.txt requirements/pytorch-cpu.txt setup.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) --version): Python 3.10 to 3.12 is needed; make PYTHON=python3.11 ..."; exit 1; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@if theirs=$$($(PYTHON) requirements/find_pytorch.py); \
	then echo "keeping the PyTorch in $$theirs"; \
	  echo "$$theirs" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/users_pytorch.pth"; \
	else $(PIP) -r requirements/pytorch-cpu.txt; fi
	$(PIP) -r requirements/base.txt -r requirements/pytorch.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) outputs data
