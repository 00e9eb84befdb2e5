# Every target is one command. `make` lists them; a variable reaches its stage only when it is set.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-unit test-model test-triton test-containers lint format models formats calibrate engine serve front fallback chat \
	eval certify advise runs bench quality-report clean clean-engines clean-venv image push soak

PY := .venv/bin/python
# $(call opt,MODEL,--model) is empty, or --model and the value of MODEL.
opt = $(if $($(1)),$(2) '$($(1))')
CHOICE = $(if $(MODEL)$(WEIGHTS),--model '$(WEIGHTS:%=%:)$(MODEL)') $(call opt,KV,--kv)

help: ## list the targets and variables
	@awk -f scripts/help.awk $(MAKEFILE_LIST)

setup: ## make .venv with everything pinned (PYTHON= EXTRAS= TORCH_INDEX= SKIP_TRITON=)
	@PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' TORCH_INDEX='$(TORCH_INDEX)' SKIP_TRITON='$(SKIP_TRITON)' bash scripts/setup.sh

demo: setup ## the main job on a small model: calibrate, build, serve, query, evaluate
	@MODEL='$(MODEL)' N='$(N)' bash scripts/demo.sh

test: setup ## linters, types and every test that this machine can run
	@bash scripts/test.sh

test-unit: setup ## tests that need only a CPU
	@$(PY) -m pytest -m 'not model and not triton and not compiler and not gpu'

test-model: setup ## tests on the real small model
	@$(PY) -m pytest -m model

test-triton: setup ## tests against the real Triton Inference Server
	@$(PY) -m pytest -m triton

test-containers: setup ## build, push, pull and start a real image, with buildah and a registry on this machine
	@NIBBLE_CONTAINERS=1 $(PY) -m pytest -m containers

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

engine: setup ## build an engine (MODEL= KV= CONTEXT= BATCH= WEIGHTS=dummy or fp8; HOST=trtllm TP= PP= IMAGE_TAG= DRY_RUN=1)
	@$(PY) -m build.run $(CHOICE) $(call opt,HOST,--host) $(call opt,CONTEXT,--context) $(call opt,BATCH,--batch) \
		$(call opt,TP,--tp) $(call opt,PP,--pp) $(call opt,IMAGE_TAG,--image-tag) $(if $(DRY_RUN),--dry-run)

serve: setup ## serve an engine with Triton (MODEL= KV= PORT= CONTEXT= BATCH= KV_FALLBACK= CERTIFICATE= WEIGHTS=dummy or fp8; HOST=trtllm DRY_RUN=1)
	@$(PY) -m serve.$(if $(filter trtllm,$(HOST)),trtllm.run,run) $(CHOICE) $(call opt,PORT,--port) $(call opt,CONTEXT,--context) $(call opt,BATCH,--batch) \
		$(call opt,KV_FALLBACK,--kv-fallback) $(call opt,CERTIFICATE,--certificate) \
		$(call opt,QUEUE,--queue) $(call opt,POOL_MB,--pool-mb) $(call opt,BESIDE,--beside) $(call opt,SPLIT,--split) \
		$(call opt,OPENAI_PORT,--openai-port) $(call opt,OPENAI_HOST,--openai-host) $(call opt,OPENAI_KEYS,--keys) \
		$(if $(OPENAI_NO_KEYS),--no-keys) $(call opt,TRACE,--trace) \
		$(call opt,IMAGE_TAG,--image-tag) $(if $(DRY_RUN),--dry-run)

front: setup ## an OpenAI-compatible front over a Triton elsewhere (TRITON= OPENAI_PORT= OPENAI_HOST= OPENAI_KEYS= SPLIT=)
	@$(PY) -m serve.front.run $(call opt,TRITON,--triton) $(call opt,OPENAI_PORT,--port) $(call opt,OPENAI_HOST,--host) \
		$(call opt,OPENAI_KEYS,--keys) $(if $(OPENAI_NO_KEYS),--no-keys) $(call opt,SPLIT,--split)

fallback: setup ## switch the cache of a running server to fp16, or back with KV_FALLBACK=none (PORT=)
	@$(PY) -m serve.control $(call opt,PORT,--port) fallback $(or $(KV_FALLBACK),fp16)

chat: setup ## talk to a running server (PORT=)
	@$(PY) -m serve.chat $(call opt,PORT,--port)

eval: setup ## compare an engine with its fp16 twin (MODEL= KV= QUICK=1 PLAN=)
	@$(PY) -m eval.run $(CHOICE) $(call opt,PLAN,--plan) $(if $(QUICK),--quick)

certify: setup ## build, evaluate and sign: the certificate that serving asks for (MODEL= KV= QUICK=1 PLAN=)
	@$(PY) -m eval.certify $(CHOICE) $(call opt,PLAN,--plan) $(if $(QUICK),--quick)

advise: setup ## memory and quality of every format for a workload (MODEL= GPU= CONTEXT= CONCURRENCY=)
	@$(PY) -m eval.advise $(call opt,MODEL,--model) $(call opt,GPU,--gpu) $(call opt,CONTEXT,--context) \
		$(call opt,CONCURRENCY,--concurrency)

runs: setup ## list past evaluations (MODEL= KV=)
	@$(PY) -m eval.runs list $(CHOICE)

bench: setup ## time the CPU engine beside transformers, fill the pools (MODEL= KV=)
	@$(PY) -m bench.engine_cpu $(CHOICE)

quality-report: setup ## write docs/results.md from the records of bench/results
	@$(PY) -m bench.quality_report

soak: setup ## load and faults against a server of its own (SOAK_MINUTES= STREAMS=)
	@$(PY) -m bench.soak.run $(call opt,SOAK_MINUTES,--minutes) $(call opt,STREAMS,--streams)

image: ## build an image with docker, podman or buildah (TARGET=cpu|gpu|trtllm, ENGINE=model/kv bakes one in)
	@TARGET='$(TARGET)' ENGINE='$(ENGINE)' bash scripts/image.sh build

push: ## push that image (TARGET= REGISTRY=)
	@TARGET='$(TARGET)' REGISTRY='$(REGISTRY)' bash scripts/image.sh push

clean: ## remove the caches of Python and the linters
	@bash scripts/clean.sh caches

clean-engines: ## remove built engines and calibrations from engines/
	@bash scripts/clean.sh engines

clean-venv: ## remove .venv
	@bash scripts/clean.sh venv
