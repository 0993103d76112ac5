# make demo   three nodes, 20,000 real flights, a kill, a Spark query: ends 0 only if every check held
# make test   everything that proves something, under 15 minutes on 2 cores
# make check  format, lint, types, architecture, wheel, licences: about a minute
# make bench  figures beside their floors, from one run
# make clean  remove what the others leave behind (not .venv)
#
# Each target sets up what it needs in .venv. REQUIRE=spark turns "no Java, Spark skipped" into a failure.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CODE := laminar raft membership router ebpf tests benches

.PHONY: help demo test test-long check bench clean pins java
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: .venv/.spark java
	$(BIN)/laminar demo

# The first stage is pure or small and shares the cores. The second runs real nodes, then Spark, alone.
# What `make check` runs is left out here.
test: .venv/.spark java
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests --ignore=tests/cluster --ignore=tests/docs \
	  --ignore=tests/spark --ignore=tests/test_architecture.py --ignore=tests/test_wheel.py \
	  --ignore=tests/test_licences.py
	$(BIN)/python -m pytest -q -p no:xdist tests/cluster tests/docs tests/spark

# The same rules with other examples: more of them, from a seed that is drawn and printed (and may be given).
test-long: .venv/.spark java
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "make test-long SEED=$$seed"; \
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests --ignore=tests/cluster --ignore=tests/docs \
	  --ignore=tests/spark --hypothesis-profile=long --hypothesis-seed=$$seed --timeout=1800

check: .venv/.spark
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE)
	$(BIN)/python -m pytest -q -p no:xdist tests/test_architecture.py tests/test_wheel.py tests/test_licences.py

bench: .venv/.core
	$(BIN)/python -m benches

clean:
	rm -rf build dist demo-out bench-out test-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The newest versions that pyproject.toml allows, resolved in an environment of their own.
pins:
	rm -rf build/pins
	$(PYTHON) -m venv build/pins
	build/pins/bin/pip install --quiet --disable-pip-version-check '.[arrow,spark,lz4,demo,dev]'
	{ sed -n '/^#/p' constraints.txt; build/pins/bin/pip freeze --exclude laminar-mq; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/pins

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Laminar needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# hatchling first and no isolated build: so that the build, too, uses only pinned versions.
.venv/.core: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) hatchling
	$(PIP) --no-build-isolation --editable '.[dev,arrow,lz4]'
	@touch $@

.venv/.spark: .venv/.core
	@$(BIN)/python -c 'import pyspark, matplotlib' 2>/dev/null || echo "fetching Spark, 450 MB"
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

# Spark wants Java 17 or newer. Where packages may be installed, install it; where not, go on: tests and demo
# say in their last line what they skipped.
java:
	@"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching a Java runtime, for Spark"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { apt-get update -qq; apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless \
	    || apt-get install -y -qq --no-install-recommends default-jre-headless; } >/dev/null || true; \
	fi
