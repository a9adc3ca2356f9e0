# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install -q -c constraints.txt

# What `make run` serves, and where. Without a name: a small model, trained on the spot and kept.
DEMO_MODEL := .cache/demo-model
MODEL_NAME ?=
BIND ?= 127.0.0.1
SERVED := $(if $(MODEL_NAME),$(MODEL_NAME),$(DEMO_MODEL))

# Detectors of secrets that look like any other word; the tests have many such words.
WITHOUT_A_FORM := KeywordDetector BasicAuthDetector Base64HighEntropyString HexHighEntropyString

# Two files of tests at a time; those of one file share services and models.
SPREAD := -n 2 --dist loadfile

SOURCES := tgis tests integration_tests bench scripts
PACKAGING := pyproject.toml constraints.txt protos/generation.proto protos/shard.proto scripts/build_protos.py

.DEFAULT_GOAL := help
.PHONY: help install run check audit test test-all chaos bench bench-peers bench-tuning profile docs protos
.PHONY: screenshots clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

install: $(VENV)/installed  ## Make the virtual environment and install the package
run: $(VENV)/installed $(if $(MODEL_NAME),,$(DEMO_MODEL)/config.json)  ## Serve MODEL_NAME, or the demo model
	@scripts/serve.sh "$(BIN)" "$(SERVED)" "$(BIND)"

check: $(VENV)/installed-dev  ## Lint, types, imports, sizes, pages, wire contract
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_sizes.py
	$(BIN)/python -m scripts.write_docs --check
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/wire/served

audit: $(VENV)/installed $(VENV)-audit/installed  ## List what is installed (sbom.json), look for secrets and known faults
	$(VENV)-audit/bin/cyclonedx-py environment --pyproject pyproject.toml -o sbom.json $(BIN)/python
	git ls-files -z | xargs -0 $(VENV)-audit/bin/detect-secrets-hook $(WITHOUT_A_FORM:%=--disable-plugin %)
	$(VENV)-audit/bin/pip-audit --path "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"

test: $(VENV)/installed-dev  ## Run the tests
	$(BIN)/pytest -m "not slow" $(SPREAD)

test-all: $(VENV)/installed-dev  ## Run the tests, the slow ones too
	$(BIN)/pytest $(SPREAD)

chaos: $(VENV)/installed-dev  ## Traffic under faults at random, ten minutes; CHAOS='--minutes 2 --seed 7'
	$(BIN)/python -m integration_tests.chaos $(CHAOS)

bench: $(VENV)/installed-dev  ## Measure the service; SHAPE=15m|135m|500m|1b, BENCH='more options'
	$(BIN)/python -m bench --shape $(or $(SHAPE),135m) $(BENCH)

bench-peers: $(VENV)/installed-dev  ## Measure other engines from PyPI beside the service; SHAPE=, BENCH=
	$(BIN)/python -m bench.peers --shape $(or $(SHAPE),135m) $(BENCH)

profile: $(VENV)/installed-dev  ## Where a step's time goes; SHAPE=, PROFILE='--batch 1,8,32 --prefill 512'
	$(BIN)/python -m bench.profile --shape $(or $(SHAPE),135m) $(PROFILE)

bench-tuning: $(VENV)/installed-dev  ## Measure soft prompts and adapters; BENCH='more options'
	$(BIN)/python -m bench.tuning $(BENCH)

docs: $(VENV)/installed-dev  ## Write the pages of docs/ that follow from the code
	$(BIN)/python -m scripts.write_docs

screenshots: $(VENV)/installed-dev $(DEMO_MODEL)/config.json  ## Make docs/pictures; SCREENSHOTS='dashboard top site'
	@scripts/fetch_prometheus.sh
	$(BIN)/python -m scripts.screenshots $(SCREENSHOTS)

protos: $(VENV)/bin/pip  ## Generate tgis/pb from protos/; every install does
	$(PIP) --no-deps -e .

clean:  ## Remove what the other targets made
	rm -rf $(VENV) $(VENV)-audit sbom.json .cache tgis/pb build dist

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/pip $(PACKAGING)
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)-audit/installed:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/pip install -q cyclonedx-bom detect-secrets pip-audit
	@touch $@

$(DEMO_MODEL)/config.json: | $(VENV)/installed
	$(BIN)/tgis demo-model $(DEMO_MODEL)
