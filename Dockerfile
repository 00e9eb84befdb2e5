# NibbleKV's images: one file, three targets. `make image TARGET=cpu` builds one with docker, podman or buildah.
#
#   cpu      Debian, torch for CPUs, the embedded Triton; what CI proves
#   gpu      Ubuntu, torch for CUDA, the embedded Triton; kernels are compiled at run time by NVRTC
#   trtllm   on NVIDIA's image of Triton with TensorRT-LLM, which brings Python, torch and Triton; serves engines for it
#
# Packages are installed in a stage of their own, so that no pip, compiler or cache is left in what runs. Wheels that lie
# in docker/wheels/ are taken instead of an index; an engine that lies in docker/engine/ is baked in (ENGINE= does it),
# otherwise engines are mounted at /engines.

ARG CPU_BASE=docker.io/library/debian:12-slim
ARG GPU_BASE=docker.io/library/ubuntu:24.04
ARG TRTLLM_BASE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3

FROM ${CPU_BASE} AS packages-cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nibblekv
COPY pyproject.toml constraints.txt ./
COPY scripts/requirements.py scripts/packages.sh scripts/
COPY docker/wheels/ /wheels/
RUN TORCH_INDEX="${TORCH_INDEX}" bash scripts/packages.sh /opt/venv /wheels

FROM ${GPU_BASE} AS packages-gpu
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nibblekv
COPY pyproject.toml constraints.txt ./
COPY scripts/requirements.py scripts/packages.sh scripts/
COPY docker/wheels/ /wheels/
RUN EXTRAS=gpu bash scripts/packages.sh /opt/venv /wheels

FROM ${CPU_BASE} AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends python3 libpython3.11 libexpat1 libstdc++6 zlib1g \
    && rm -rf /var/lib/apt/lists/* && useradd --system --uid 10001 --home-dir /var/lib/nibblekv --create-home nibble \
    && install -d -o nibble -g nibble /run/nibblekv
COPY --from=packages-cpu /opt/venv /opt/venv
WORKDIR /opt/nibblekv
COPY nibble nibble
COPY serve serve
COPY recipes recipes
COPY triton_repo/native triton_repo/native
COPY docker/engine/ /engines/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    NIBBLE_ENGINES=/engines NIBBLE_RUN=/run/nibblekv
USER 10001
EXPOSE 8002 8003
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-m", "serve.healthcheck"]
ENTRYPOINT ["python", "-m", "serve.run", "--openai-host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--log-stdout"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
ARG TRITON_VERSION=unknown
ARG TORCH_VERSION=unknown
LABEL org.opencontainers.image.title="NibbleKV, CPU" org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
    nibblekv.triton=${TRITON_VERSION} nibblekv.torch=${TORCH_VERSION}

FROM ${GPU_BASE} AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends python3 libpython3.12 libexpat1 libstdc++6 zlib1g \
    && rm -rf /var/lib/apt/lists/* && useradd --system --uid 10001 --home-dir /var/lib/nibblekv --create-home nibble \
    && install -d -o nibble -g nibble /run/nibblekv /var/cache/nibblekv
COPY --from=packages-gpu /opt/venv /opt/venv
WORKDIR /opt/nibblekv
COPY nibble nibble
COPY serve serve
COPY recipes recipes
COPY triton_repo/native triton_repo/native
COPY docker/engine/ /engines/
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    NIBBLE_ENGINES=/engines NIBBLE_RUN=/run/nibblekv NIBBLE_KERNEL_CACHE=/var/cache/nibblekv \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001
EXPOSE 8002 8003
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 CMD ["python", "-m", "serve.healthcheck"]
ENTRYPOINT ["python", "-m", "serve.run", "--openai-host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--log-stdout"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
ARG TRITON_VERSION=unknown
ARG TORCH_VERSION=unknown
LABEL org.opencontainers.image.title="NibbleKV, CUDA" org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
    nibblekv.triton=${TRITON_VERSION} nibblekv.torch=${TORCH_VERSION}

FROM ${TRTLLM_BASE} AS trtllm
ARG TRTLLM_BASE
USER 0
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/nibblekv
COPY pyproject.toml constraints.txt ./
COPY scripts/requirements.py scripts/packages.sh scripts/
COPY docker/wheels/ /wheels/
RUN bash scripts/packages.sh --beside /opt/launcher /wheels && rm -rf /wheels scripts pyproject.toml constraints.txt \
    && useradd --system --uid 10001 --home-dir /var/lib/nibblekv --create-home nibble \
    && install -d -o nibble -g nibble /run/nibblekv
COPY nibble nibble
COPY serve serve
COPY recipes recipes
COPY docker/engine/ /engines/
ENV PYTHONPATH=/opt/nibblekv PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    NIBBLE_ENGINES=/engines NIBBLE_RUN=/run/nibblekv
USER 10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --retries=3 \
    CMD ["/opt/launcher/bin/python", "-m", "serve.healthcheck", "--port", "8000", "--path", "/v2/health/ready"]
ENTRYPOINT ["/opt/launcher/bin/python", "-m", "serve.trtllm.run"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="NibbleKV on TensorRT-LLM" org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION} \
    org.opencontainers.image.base.name=${TRTLLM_BASE}
