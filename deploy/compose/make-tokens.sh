#!/bin/sh
# Makes the first access tokens, in the database that compose.yaml starts: one for Prometheus, into the folder "secrets",
# and one with the role admin, which is printed, and shown this once. SOURCES must be set, as for compose.yaml.
set -eu
cd "$(dirname "$0")"
umask 077

token() { docker compose run --rm --no-TTY --entrypoint packhouse service token create "$@"; }

if [ ! -e secrets/metrics_token ]; then
    token prometheus --role read > secrets/metrics_token.new
    chmod 444 secrets/metrics_token.new
    mv secrets/metrics_token.new secrets/metrics_token
fi
token admin --role admin
