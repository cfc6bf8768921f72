# A worker for NVIDIA GPUs. From the root of the repository:
#   docker build -f deploy/images/worker.Dockerfile -t loraplex-worker .
# The base has a compiler for the host and for the GPU: Triton and FlashInfer compile for the GPU that they find, and
# keep what they compiled below HOME, on the cache volume.
# To build the same again, name the base by its digest: --build-arg CUDA_IMAGE=nvidia/cuda@sha256:...
ARG CUDA_IMAGE=docker.io/nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM ${CUDA_IMAGE}
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3.12 python3.12-dev python3.12-venv ninja-build ca-certificates \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt /src/
COPY deploy/images/install.sh deploy/images/constraints.gpu.txt /src/deploy/images/
RUN PYTHON=python3.12 sh /src/deploy/images/install.sh dependencies gpu,s3 /opt/loraplex
COPY README.md LICENSE /src/
COPY adapters /src/adapters
COPY launcher /src/launcher
COPY loraplex /src/loraplex
COPY router /src/router
COPY server /src/server
RUN sh /src/deploy/images/install.sh project gpu,s3 /opt/loraplex && rm -rf /src
ENV PATH=/opt/loraplex/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/loraplex
RUN install -d -o 10001 -g 10001 /var/cache/loraplex
USER 10001:10001
EXPOSE 8090
STOPSIGNAL SIGTERM
ENTRYPOINT ["loraplex"]
CMD ["worker", "--help"]
