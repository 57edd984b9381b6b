# The trainer, and with it the streaming client. Build it from the root of the repository:
#   docker build --file deploy/containers/trainer.Dockerfile --tag packhouse/trainer:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY client/packhouse client/packhouse
COPY worker/packhouse worker/packhouse
COPY service/packhouse service/packhouse
COPY trainer/packhouse trainer/packhouse
RUN python -m venv /opt/packhouse \
    && /opt/packhouse/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint requirements.lock ".[trainer,vision]"

FROM python:3.11.14-slim-bookworm
RUN groupadd --gid 10001 packhouse \
    && useradd --uid 10001 --gid 10001 --create-home packhouse
COPY --from=build /opt/packhouse /opt/packhouse
ENV PATH=/opt/packhouse/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/packhouse
# It runs once and ends: its exit code tells how it went.
HEALTHCHECK NONE
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc-per-node=gpu", "-m", "packhouse.trainer", "--config", "/run/packhouse/run.toml"]
