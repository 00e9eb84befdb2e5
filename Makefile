# Every target is one command. `make` lists them; a variable reaches its stage only when it is set.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-model test-triton lint format models formats calibrate engine serve chat \
	eval certify bench quality-report clean clean-engines clean-venv

PY := .venv/bin/python
# $(call opt,MODEL,--model) is empty, or --model and the value of MODEL.
opt = $(if $($(1)),$(2) '$($(1))')
ENGINE = $(call opt,MODEL,--model) $(call opt,KV,--kv)

help: ## list the targets and variables
	@awk -f scripts/help.awk $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned (PYTHON= EXTRAS= TORCH_INDEX= SKIP_TRITON=)
	@PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' TORCH_INDEX='$(TORCH_INDEX)' SKIP_TRITON='$(SKIP_TRITON)' bash scripts/setup.sh

demo: setup ## the main job on a small model: calibrate, build, serve, query, evaluate
	@MODEL='$(MODEL)' N='$(N)' bash scripts/demo.sh

test: setup ## linters, types and every test that this machine can run
	@bash scripts/test.sh

test-unit: setup ## tests that need only a CPU
	@$(PY) -m pytest -m 'not model and not triton and not gpu'

test-model: setup ## tests on the real small model
	@$(PY) -m pytest -m model

test-triton: setup ## tests against the real Triton Inference Server
	@$(PY) -m pytest -m triton

lint: setup ## ruff, ruff format and mypy
	@bash scripts/lint.sh

format: setup ## rewrite the sources with ruff format
	@$(PY) -m ruff format .

models: setup ## list what MODEL= may name
	@$(PY) -m build.list models

formats: setup ## list what KV= may name
	@$(PY) -m build.list formats

calibrate: setup ## ranges of K and V; with SEARCH=1 the mix of formats too (MODEL= PROMPTS= N= SEED= SEARCH=1)
	@$(PY) -m calibrate.run $(call opt,MODEL,--model) $(call opt,PROMPTS,--prompts) $(call opt,N,--n) $(call opt,SEED,--seed) \
		$(if $(SEARCH),--search)

engine: setup ## build an engine (MODEL= KV= CONTEXT= BATCH=; HOST=trtllm TP= PP= IMAGE_TAG= DRY_RUN=1)
	@$(PY) -m build.run $(ENGINE) $(call opt,HOST,--host) $(call opt,CONTEXT,--context) $(call opt,BATCH,--batch) \
		$(call opt,TP,--tp) $(call opt,PP,--pp) $(call opt,IMAGE_TAG,--image-tag) $(if $(DRY_RUN),--dry-run)

serve: setup ## serve an engine with Triton (MODEL= KV= PORT= CONTEXT= BATCH= KV_FALLBACK= CERTIFICATE=)
	@$(PY) -m serve.run $(ENGINE) $(call opt,PORT,--port) $(call opt,CONTEXT,--context) $(call opt,BATCH,--batch) \
		$(call opt,KV_FALLBACK,--kv-fallback) $(call opt,CERTIFICATE,--certificate)

chat: setup ## talk to a running server (PORT=)
	@$(PY) -m serve.chat $(call opt,PORT,--port)

eval: setup ## compare an engine with its fp16 twin (MODEL= KV= QUICK=1)
	@$(PY) -m eval.run $(ENGINE) $(if $(QUICK),--quick)

certify: setup ## build, evaluate and sign: the certificate that serving asks for (MODEL= KV= QUICK=1)
	@$(PY) -m eval.certify $(ENGINE) $(if $(QUICK),--quick)

bench: setup ## time the CPU engine beside transformers, fill the pools (MODEL= KV=)
	@$(PY) -m bench.engine_cpu $(ENGINE)

quality-report: setup ## write docs/results.md from the records of bench/results
	@$(PY) -m bench.quality_report

clean: ## remove the caches of Python and the linters
	@bash scripts/clean.sh caches

clean-engines: ## remove built engines and calibrations from engines/
	@bash scripts/clean.sh engines

clean-venv: ## remove .venv
	@bash scripts/clean.sh venv
