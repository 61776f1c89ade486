# syntax=docker/dockerfile:1
# One image for gateways, Ray's head and workers. Two variants:
#
#   docker build --build-arg VARIANT=cpu  --tag baton:0.1.0-cpu  .
#   docker build --build-arg VARIANT=cuda --tag baton:0.1.0-cuda .
#
# The CUDA variant brings CUDA's libraries with PyTorch; the node brings the driver.

ARG PYTHON_VERSION=3.11

# ---- Builds the virtual environment, which is all that is taken on ---------------------------------------------------
FROM docker.io/library/python:${PYTHON_VERSION}-slim-bookworm AS build
ARG VARIANT=cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/baton
ENV PATH=/opt/baton/bin:$PATH

# What changes seldom comes first: PyTorch, then what the lock pins, then Baton.
COPY requirements/cpu.lock requirements/ptxas.lock requirements/
COPY scripts/install_image.sh scripts/install_ptxas.sh scripts/
COPY pyproject.toml README.md ./
RUN scripts/install_image.sh dependencies "$VARIANT"
COPY baton baton
COPY cli cli
COPY cluster cluster
COPY decode_worker decode_worker
COPY engine engine
COPY gateway gateway
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY scheduler scheduler
COPY simulator simulator
COPY worker worker
RUN scripts/install_image.sh baton
# The CPU kernels for every instruction set, since what runs has no C++ compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && python -m engine.native.library /opt/baton/share/native

# ---- What runs -------------------------------------------------------------------------------------------------------
FROM docker.io/library/python:${PYTHON_VERSION}-slim-bookworm
ARG VARIANT=cuda
# Triton has a C compiler build what starts its kernels.
# hadolint ignore=DL3008
RUN if [ "$VARIANT" = cuda ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && \
        rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid baton --create-home baton
COPY --from=build /opt/baton /opt/baton
# KubeRay starts Ray by a shell, whose profile may set a PATH of its own.
RUN ln -s /opt/baton/bin/baton /opt/baton/bin/ray /usr/local/bin/ \
    && baton --help >/dev/null
# The assembler is in the CUDA variant alone, and only looked for on a GPU.
ENV PATH=/opt/baton/bin:$PATH \
    HOME=/home/baton \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    BATON_NATIVE_KERNELS=/opt/baton/share/native \
    TRITON_PTXAS_PATH=/opt/baton/bin/ptxas \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
LABEL org.opencontainers.image.title="Baton" \
      org.opencontainers.image.description="Serves a large language model with prefill and decode on separate workers" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 10001:10001
WORKDIR /home/baton
# For docker alone; Kubernetes has probes of its own.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["baton", "serve"]
