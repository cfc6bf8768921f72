# A router: no torch, no GPU. From the root of the repository:
#   docker build -f deploy/images/router.Dockerfile -t loraplex-router .
# To build the same again, name the base by its digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
COPY pyproject.toml constraints.txt /src/
COPY deploy/images/install.sh deploy/images/constraints.gpu.txt /src/deploy/images/
RUN sh /src/deploy/images/install.sh dependencies router,traces /opt/loraplex
COPY README.md LICENSE /src/
COPY adapters /src/adapters
COPY launcher /src/launcher
COPY loraplex /src/loraplex
COPY router /src/router
COPY server /src/server
RUN sh /src/deploy/images/install.sh project router,traces /opt/loraplex

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/loraplex /opt/loraplex
ENV PATH=/opt/loraplex/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/loraplex
RUN install -d -o 10001 -g 10001 /var/cache/loraplex
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["loraplex"]
CMD ["router", "--help"]
