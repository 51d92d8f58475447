# Tailrace. `make` alone lists what there is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PEERS  := .venv-peers
NODE   := bench/peers/node
ARGS   ?=
# Tests wait for servers much of the time, and those without a JVM most of it: more workers than cores end sooner.
WORKERS ?= 4
test-fast: WORKERS = 6
# Files are given to workers whole, since tests of a file share what they start, and in the order of tests/conftest.py.
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Without compiled files every process of the tests, and there are hundreds, would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test test-fast check fmt faults bench bench-docs bench-query peers protos clean lock java

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: java $(STAMPS)/jars ## Make the environment: Python packages by hash, jars by hash

run: setup ## Run everything on this machine with sample data, until Ctrl-C (ARGS="--port 8080")
	@exec $(BIN)/tailrace demo $(ARGS)

test: setup ## Run the tests, on a real broker, a real Valkey and a real Spark (ARGS="-k days")
	$(BIN)/pytest -q $(PARALLEL) $(ARGS)

test-fast: setup ## Run the tests that start no JVM (Kafka, Cassandra, Spark) and are not slow, with a tenth of the random examples
	$(BIN)/pytest -q $(PARALLEL) -m "not jvm and not slow" --examples=0.1 $(ARGS)

check: $(STAMPS)/project ## Check format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(STAMPS)/project ## Format the code and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

faults: setup ## End the driver in all ways that there are, fifty times
	$(BIN)/pytest -q tests/faults --faults=50 $(ARGS)

bench: setup ## Measure everything beside its peers, in 40 minutes (QUICK=1, ARGS="--only folds --docs"); bench-folds: one part
	@$(MAKE) -s peers || echo "the peers of requirements/peers.txt cannot be installed: they are left out" >&2
	$(BIN)/python -m bench $(if $(QUICK),--quick) $(ARGS)

bench-docs: setup ## Write the tables and plots of the last run into docs/benchmarks.md (OUT=folder)
	$(BIN)/python -m bench.report $(or $(OUT),.tailrace/bench)

bench-query: setup peers $(NODE)/node_modules/.stamp ## Measure queries beside four others
	$(BIN)/python bench/query.py $(ARGS)

bench-%: setup
	@$(MAKE) -s peers || echo "the peers of requirements/peers.txt cannot be installed: they are left out" >&2
	$(BIN)/python bench/$*.py $(if $(QUICK),--quick) $(ARGS)

peers: $(PEERS)/.stamp ## Install what Tailrace is measured against

protos: $(STAMPS)/project ## Renew the code that is made from src/tailrace/views/sessions/rta.proto
	$(BIN)/python -m grpc_tools.protoc -Isrc --python_out=src --pyi_out=src src/tailrace/views/sessions/rta.proto

lock: $(STAMPS)/uv ## Renew requirements/*.txt and the lock of the peers in Node
	$(BIN)/uv pip compile pyproject.toml --extra all --group dev --universal --generate-hashes --no-annotate \
		--no-header --python-version 3.11 -o requirements/dev.txt
	printf 'bytewax\neventsourcing\nmongomock\nmongoquery\nquixstreams\n' | $(BIN)/uv pip compile - --universal --generate-hashes \
		--no-annotate --no-header --python-version 3.11 -o requirements/peers.txt
	cd $(NODE) && npm install --package-lock-only

clean: ## Remove the environment and all caches; data in .tailrace stays
	rm -rf $(VENV) $(PEERS) $(NODE)/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache dist build
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

java:
	@found=$$("$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p'); \
	test "$${found:-0}" -ge 17 || { \
		echo "Java 17 or newer is needed (found: $${found:-none}): install OpenJDK 17, or point JAVA_HOME at one." >&2; \
		exit 1; }

# Each step leaves a stamp, so that what did not change is not done again.

$(STAMPS)/uv: requirements/uv.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed: install it, or name it, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make environments: install its venv package (on Debian: python3-venv)." >&2; \
		exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt
	@touch $@

$(STAMPS)/packages: requirements/dev.txt $(STAMPS)/uv
	@echo "installing the Python packages"
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --require-hashes -r requirements/dev.txt
	@touch $@

$(STAMPS)/project: pyproject.toml $(STAMPS)/packages
	@VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install -q --no-deps --no-build-isolation -e .
	@touch $@

$(STAMPS)/jars: src/tailrace/embedded/jars.lock $(STAMPS)/project
	@$(BIN)/python -m tailrace.embedded.jars
	@touch $@

# What Tailrace is measured against has an environment of its own.
$(PEERS)/.stamp: requirements/peers.txt $(STAMPS)/uv
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@VIRTUAL_ENV=$(PEERS) $(BIN)/uv pip install -q --require-hashes -r requirements/peers.txt
	@touch $@

# Where there is no Node, what needs it is not measured; the measurement says so.
$(NODE)/node_modules/.stamp: $(NODE)/package-lock.json
	@if command -v npm >/dev/null; then cd $(NODE) && npm ci --silent && touch node_modules/.stamp; fi
