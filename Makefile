# Every target sets up what it needs in .venv on first use. `make help` lists them.
SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NOVELS := $(VENV)/novels

# Trainer and CPU optimizer share the cores where there is no GPU: threads that wait must not hold one.
export OMP_WAIT_POLICY ?= PASSIVE
# Packages are installed uncompiled, and the tests start hundreds of interpreters: what is compiled once must be kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-gpu soak lint wheel-test smollm2 offline setup clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(READY) ## Run the main job; ARGS="engine.topk_ratio=0.05" changes it
	$(BIN)/zenflow-train $(ARGS)

# Two processes share the tests; threads of their own would only be in each other's way.
JOBS ?= 2
test: export OMP_NUM_THREADS ?= 1
test: $(READY) ## Run every test that this machine can run; ARGS="-k selection" picks some
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-gpu: $(READY) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

soak: $(READY) ## Inject faults for two minutes; ARGS="--seconds 3600" for an hour
	$(BIN)/python -m tests.soak --out runs/soak.json $(ARGS)

lint: $(READY) ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

wheel-test: $(READY) ## Build the wheel and run it from a clean environment
	scripts/wheel_check.sh $(BIN)/python

smollm2: $(READY) $(NOVELS) ## Run the larger job, SmolLM2-135M on six novels: for a GPU
	$(BIN)/zenflow-train experiment=smollm2 data.path=$(NOVELS)/usr/lib/R/site-library/janeaustenr $(ARGS)

offline: $(READY) $(NOVELS) ## Fill offline/ for a GPU machine without a network (scripts/gpu_check.sh there)
	rm -rf $@
	$(BIN)/python -m pip install --quiet --no-deps --target $@/lib hydra-core==1.3.* omegaconf==2.3.* antlr4-python3-runtime==4.9.* gguf \
		hypothesis sortedcontainers
	$(BIN)/python scripts/pack_offline.py $@ $(NOVELS)/usr/lib/R/site-library/janeaustenr

setup: $(READY) ## Make .venv: torch, this package, the small pretrained model and its text

clean: ## Remove what was built; .venv and results stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml scripts/setup.sh scripts/install_torch.sh
	PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	touch $@

$(NOVELS): $(READY) scripts/setup_smollm2.sh
	rm -rf $@
	scripts/setup_smollm2.sh $(VENV) $@
	touch $@
