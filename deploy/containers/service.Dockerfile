# The service: REST, the job table, and the driver of the workers. Build it from the root of the repository:
#   docker build --file deploy/containers/service.Dockerfile --tag packhouse/service:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY deploy/containers/ray.lock deploy/containers/
COPY client/packhouse client/packhouse
COPY worker/packhouse worker/packhouse
COPY service/packhouse service/packhouse
COPY trainer/packhouse trainer/packhouse
# The lock names more than one role needs: as constraints it gives the versions, and the extras say which packages.
RUN python -m venv /opt/packhouse \
    && /opt/packhouse/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint requirements.lock --constraint deploy/containers/ray.lock \
        ".[service,cluster,otel,vision]" "ray[client]"

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 packhouse \
    && useradd --uid 10001 --gid 10001 --create-home packhouse \
    && install --directory --owner 10001 --group 10001 /var/lib/packhouse
COPY --from=build /opt/packhouse /opt/packhouse
ENV PATH=/opt/packhouse/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PACKHOUSE_HOME=/var/lib/packhouse
USER 10001:10001
EXPOSE 7077
# Ready is what a balancer asks for; a service that has lost its database or Ray is alive and not healthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7077/readyz', timeout=4)"]
# It ends its streams, puts its jobs back and leaves Ray within 20 seconds.
STOPSIGNAL SIGTERM
ENTRYPOINT ["packhouse", "serve"]
