# A node of the Ray cluster, head or worker: it runs what the service asks for. Build it from the root of the repository:
#   docker build --file deploy/containers/worker.Dockerfile --tag packhouse/worker:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY deploy/containers/ray.lock deploy/containers/
COPY client/packhouse client/packhouse
COPY worker/packhouse worker/packhouse
COPY service/packhouse service/packhouse
COPY trainer/packhouse trainer/packhouse
# "default" has what a head needs: the autoscaler, and the agents that KubeRay asks after health.
RUN python -m venv /opt/packhouse \
    && /opt/packhouse/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint requirements.lock --constraint deploy/containers/ray.lock \
        ".[worker,vision]" "ray[default,client]"

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 packhouse \
    && useradd --uid 10001 --gid 10001 --create-home packhouse
COPY --from=build /opt/packhouse /opt/packhouse
ENV PATH=/opt/packhouse/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
USER 10001:10001
WORKDIR /home/packhouse
# It asks the head, which RAY_ADDRESS names on a worker.
ENV RAY_ADDRESS=127.0.0.1:6379
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s --retries=3 CMD ["ray", "health-check"]
STOPSIGNAL SIGTERM
# The arguments say which it is: --head, or --address=HEAD:6379.
ENTRYPOINT ["ray", "start", "--block"]
