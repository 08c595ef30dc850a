# `make demo`: the main job on a real small model. `make test`: everything that must hold.
# Both make their own environment in .venv. torch is pinned to one release: on a machine with an
# NVIDIA GPU the same line installs its CUDA build.
PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_FLAGS ?=

BIN := .venv/bin
STAMP := .venv/installed

.PHONY: demo test faults lint gpu-test clean

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	# setuptools warns of the source folders beside the package, which are meant to be there.
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[demo,dev]"
	# z-lab's reference client, for tests: its pins are for its own benchmarks, not for its model.
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	if command -v nvidia-smi >/dev/null; then $(BIN)/python -m pip install --quiet --editable ".[gpu]"; fi
	touch $@

demo/target/config.json: $(STAMP)
	$(BIN)/python tests/real/smollm2.py demo/target --work demo/download

demo: demo/target/config.json
	$(BIN)/python tests/real/demo.py $(DEMO_FLAGS)

test: demo/target/config.json
	$(BIN)/python -m pytest

faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell README.md Makefile pyproject.toml dflash_offline cli stages tests --skip '*.jsonl'
	mkdir -p build/tree/dflash_offline
	ln -sfn $(CURDIR)/dflash_offline/*.py $(CURDIR)/cli $(CURDIR)/stages build/tree/dflash_offline/
	cd build/tree && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p dflash_offline

clean:
	rm -rf .venv build demo *.egg-info
