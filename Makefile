# One virtual environment, made once from the locked versions; every target uses it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint types serve bench bench-peers soak load cluster deploy-tools stack browser-tools clean

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else "packhouse needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)  ## the main job, end to end, in about half a minute
	@$(BIN)/packhouse demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

test: lint types  ## lint, types and all tests
	$(BIN)/python -m pytest

browser-tools:  ## what the tests of the dashboard use: Debian's Chromium, and axe-core from npm
	command -v chromium > /dev/null || apt-get install --yes -qq --no-install-recommends chromium
	mkdir -p build/axe
	cd build/axe && npm pack --silent axe-core@4.14.1 && tar -xzf axe-core-*.tgz --strip-components=1 package/axe.min.js

deploy-tools: $(READY)  ## what the tests of deploy/ check with: promtool, helm, hadolint, schemas
	tests/deploy/tools.sh

stack: $(READY)  ## the parts of the compose file on this machine, without containers; after deploy-tools
	$(BIN)/python -m tests.deploy.stack

serve: $(READY)  ## the service, embedded, on loopback
	$(BIN)/packhouse serve

bench: $(READY)  ## what is measured: a table, and JSON beside it in build/bench
	$(BIN)/python tests/benchmarks/caching.py --out build/bench
	$(BIN)/python tests/benchmarks/incremental.py --out build/bench
	$(BIN)/python tests/benchmarks/chats.py --out build/bench
	$(BIN)/python tests/benchmarks/catalog.py --out build/bench
	$(BIN)/python tests/benchmarks/packing.py --out build/bench
	$(BIN)/python tests/benchmarks/streaming.py --out build/bench
	$(BIN)/python tests/benchmarks/trainer.py --out build/bench

soak: $(READY)  ## long runs whose processes are killed all the time: streaming, and jobs
	$(BIN)/python -m tests.client.fire --minutes 10
	$(BIN)/python -m tests.soak --kills 200

cluster: $(READY)  ## a Ray cluster of three nodes here, of which one and then the head are killed in mid-job
	$(BIN)/python -m tests.cluster
	$(BIN)/python -m tests.cluster --client

load: $(READY)  ## 200 trainers, 50 submitters, slow readers and a restart on one service: two to three minutes
	$(BIN)/python -m tests.load

bench-peers: $(READY)  ## the peers that streaming is compared with, in an environment of their own; what fails is told by the benchmark
	$(PYTHON) -m venv build/peers
	for peer in $$(cat tests/benchmarks/peers.txt); do build/peers/bin/pip install --quiet --disable-pip-version-check $$peer \
	    2> build/peers/$${peer%%=*}.log || tail -n 1 build/peers/$${peer%%=*}.log; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
