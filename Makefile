# Every target does its own set-up: all that is needed beforehand is Python 3.11 or newer and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
PINS   := requirements-dev.txt
SERVER_PINS := requirements-server.txt
CONSTRAINTS := $(VENV)/constraints.txt

# Fails if the Python is too old.
SUPPORTED := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'

# The tests start a thousand processes: each would compile all its modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup changelog pins peers demo test lint types type-completeness pytest pytest-pure mutants oldest-spark wheels release image kept soak fuzz generate bench bench-quick stages connectors console routes growth neighbours bench-peers bench-cluster bench-archive pictures docs linkcheck clean
.DEFAULT_GOAL := help

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY) ## make .venv with the project and its development tools

# The pins hold for what pip builds packages from, too; older versions of pip take that from PIP_CONSTRAINT. Without the
# hashes: a build asks for `setuptools>=40`, and pip demands an exact version of all when one has a hash.
$(INSTALLED): pyproject.toml $(PINS)
	@$(SUPPORTED)
	@echo 'Installing into $(VENV); the first time this takes two minutes.'
	$(PYTHON) -m venv $(VENV)
	sed -n '/--hash/!s/ \\$$//p' $(PINS) > $(CONSTRAINTS)
	PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
		$(BIN)/pip install --quiet --disable-pip-version-check --requirement $(PINS)
	@touch $@

# Compiles again if a compiled source has changed.
$(READY): $(INSTALLED) hatch_build.py $(shell find core/trio_nsq -name '*.py')
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: compile pure
compile: $(INSTALLED) ## compile what has changed of the hot path: after each change of a compiled module
	$(BIN)/python hatch_build.py compile

pure: $(INSTALLED) ## run the hot path as Python, until make compile, or until a source changes
	$(BIN)/python hatch_build.py pure
	@touch $(READY)

COMPILE_PINS := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command 'make pins'

pins: $(INSTALLED) ## renew requirements-dev.txt and -server.txt: the newest versions that pyproject.toml allows
	$(COMPILE_PINS) --extra dev --extra server --extra spark --output-file $(PINS) pyproject.toml
	$(COMPILE_PINS) --extra server --constraint $(PINS) --output-file $(SERVER_PINS) pyproject.toml

peers:          ## install the Debian packages whose programs the tests run, as root
	@tests/interop/debian.sh

DEMO := $(VENV)/demo

# Only the broker's packages, and nothing is compiled: this takes half a minute instead of three.
$(DEMO)/.ready: $(SERVER_PINS)
	@$(SUPPORTED)
	@echo '1/3 Create an environment in $(DEMO)'
	@$(PYTHON) -m venv $(DEMO)
	@echo "2/3 Install the broker's $$(grep -c == $(SERVER_PINS)) packages there: 50 MB, about 20 s"
	@$(DEMO)/bin/pip install --quiet --disable-pip-version-check --requirement $(SERVER_PINS)
	@touch $@

demo: $(DEMO)/.ready ## broker, publish, consume and compare a real file: make demo [FILE=/var/log/syslog]
	@echo '3/3 Stream a file through a broker that runs from this folder'
	@PYTHONPATH=$(CURDIR)/core:$(CURDIR)/cli $(DEMO)/bin/python examples/demo.py $(if $(FILE),"$(FILE)")

test: lint types pytest ## lint, types and tests: what CI runs

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy --strict
	$(BIN)/mypy --num-workers=auto
	$(BIN)/mypy --num-workers=auto tests bench examples docs tools

type-completeness: $(READY) ## how many names of the client have types that all type checkers know, a minute
	$(BIN)/python tools/type_completeness.py --least 98

# Files run side by side, those that share a Spark one after the other; within a file in order. Many tests wait for
# processes: four of them keep two cores busy.
WORKERS ?= $(shell expr 2 '*' $$(nproc))

pytest: $(READY) ## the tests alone: make pytest [ARGS='-k log'] [WORKERS=1]
	$(BIN)/python tools/failed_again.py --numprocesses=$(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(ARGS)

PURE := $(VENV)/pure
# Folders whose tests execute compiled modules: the protocol, the poller, the log and the broker. Commands, connectors,
# the console and Spark's jobs are never compiled, and meet the broker through its protocol, which these tests cover.
# For the same reason, files about these and about documents are left out of the folders.
PURE_TESTS := $(addprefix tests/,protocol log model broker http client lookup nsqd_import fuzz faults interop) \
	$(addprefix --ignore=tests/faults/,test_connections_killed.py test_connections_many.py test_to_http.py test_to_nsq.py) \
	$(addprefix --ignore=tests/interop/,test_benchmarks.py test_differences.py test_nsqd_import.py test_same_files.py \
		test_same_lookupd.py test_same_mirror.py test_same_requests.py test_same_stat.py test_web_pages.py) \
	$(addprefix --ignore=tests/client/,test_client_document.py test_consumer_document.py test_documented_types.py \
		test_outside_trio.py test_public_names.py test_sync_mirror.py)

# In a copy of the checkout, whose compiled modules stay. Its environment borrows the tools of the other one: a path in
# a .pth file does not bring the other's editable installation.
pytest-pure: $(INSTALLED) ## the tests of what is compiled, without compiling: CI runs them after make test
	rm -rf $(PURE)
	mkdir -p $(PURE)/tests/interop tests/interop/.build
	git ls-files -z --cached --others --exclude-standard | \
		tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory=$(PURE)
	ln -s $(CURDIR)/tests/interop/.build $(PURE)/tests/interop/.build
	$(BIN)/python -m venv --without-pip $(PURE)/.venv
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(PURE)/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/tools.pth
	TRIO_NSQ_COMPILE=0 $(BIN)/pip --python $(PURE)/.venv/bin/python install --quiet --disable-pip-version-check \
		--no-build-isolation --no-deps --editable $(PURE)
	cd $(PURE) && TRIO_NSQ_COMPILE=0 .venv/bin/python tools/failed_again.py \
		--numprocesses=$(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder $(or $(ARGS),$(PURE_TESTS))

mutants: $(READY) ## put known bugs into a copy, one by one: the tests named for each must fail, half an hour
	$(BIN)/python tools/mutants.py $(ARGS)

# The oldest version of Spark that pyproject.toml allows, beside the pinned one.
OLDEST_SPARK := 4.0.0
OLDEST := .spark-oldest/$(OLDEST_SPARK)

$(OLDEST)/.ready: | $(READY)
	rm -rf .spark-oldest
	$(BIN)/pip install --quiet --disable-pip-version-check --target $(OLDEST) pyspark==$(OLDEST_SPARK)
	@touch $@

# This Spark leaves sockets to the garbage collector.
oldest-spark: $(OLDEST)/.ready ## the tests that start Spark, with the oldest version that is supported
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python tools/failed_again.py --numprocesses=2 --dist=loadfile -k "not memory" \
		-Wignore::ResourceWarning -Wignore::pytest.PytestUnraisableExceptionWarning \
		tests/spark/test_spark_versions.py tests/spark/test_spark_engine.py tests/spark/test_spark_failures.py \
		tests/spark/test_data_source.py tests/spark/test_data_source_columns.py tests/spark/test_data_sink.py tests/spark/test_replay_spark.py \
		tests/spark/test_data_source_schemas.py tests/spark/test_tables_in_spark.py $(ARGS)

wheels: $(INSTALLED) ## dist/: the source distribution, and a wheel for each supported Python on this machine, checked
	$(BIN)/python tools/wheels.py $(ARGS)

release: $(INSTALLED) ## dist/: wheels, checked installations, bill of materials, hashes and notes; publishes nothing
	$(BIN)/python -m tools.release $(ARGS)

image: $(INSTALLED) ## the container image, built with Docker or Podman, and checked: make image [ARGS='--engine podman']
	$(BIN)/python -m tools.image $(ARGS)

kept: $(INSTALLED) ## keep files of this version, for tests of upgrades: make kept [ARGS='--name 0.1.0-before-x']
	$(BIN)/python -m tools.kept_files $(ARGS)

fuzz: $(READY)  ## a million mutated inputs for what reads from strangers: make fuzz [ARGS='--seed 7']
	PYTHONPATH=tests $(BIN)/python -m fuzz.protocol --inputs 1000000 $(ARGS)
	PYTHONPATH=tests $(BIN)/python -m fuzz.broker --seconds 60 $(ARGS)

# The last run has these in full.
SOAK_FAULTS := $(addprefix tests/,archive faults integrations node recipes replication cluster spark)
soak: SEED := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))
soak: $(READY)  ## the fault tests in full and random examples, two hours; SEED=N, which it prints, repeats a run
	@echo 'To repeat this run: make soak SEED=$(SEED)'
	TEST_PROCESSES=new SOAK=1 $(BIN)/pytest tests $(addprefix --ignore=,$(SOAK_FAULTS)) \
		-m 'soak and not hypothesis' --timeout=0 $(ARGS)
	TEST_PROCESSES=new SOAK=1 MODEL_EXAMPLES=$${MODEL_EXAMPLES:-2000} $(BIN)/pytest tests -m hypothesis --timeout=0 \
		--hypothesis-profile=random --hypothesis-seed=$(SEED) $(ARGS)
	TEST_PROCESSES=new SOAK=1 FAULT_COMPLETE=1 ARCHIVE_MESSAGES=$${ARCHIVE_MESSAGES:-10000000} FAULT_KILLS=$${FAULT_KILLS:-50} FAULT_SEED=$${FAULT_SEED:-$(SEED)} \
		NODE_KILLS=$${NODE_KILLS:-100} \
		$(BIN)/pytest $(SOAK_FAULTS) -s --timeout=0 $(ARGS)
	BENCH_PEERS=1 $(BIN)/pytest tests/interop/test_benchmarks.py -k peers -s --timeout=0
	$(MAKE) etcds

# `make test` runs Debian's etcd; these are built from Go modules, which takes minutes the first time.
.PHONY: etcds
etcds: $(READY) ## the tests of coordination, and a failover, with other versions of etcd: make etcds [ETCDS=3.6]
	for version in $(or $(ETCDS),3.5 3.6 3.7); do \
		TEST_ETCD=$$version $(BIN)/pytest tests/coordination tests/cluster/test_engines.py \
			tests/cluster/test_faults_etcd.py -k etcd $(ARGS) || exit 1; \
	done

generate: $(READY) ## write completions/ and man/, the references of JSON, HTTP and Python, and the list of top-level domains
	$(BIN)/python -m qcli.generate
	$(BIN)/python docs/_ext/http_api.py
	$(BIN)/python docs/_ext/python_api.py
	$(BIN)/python tools/top_level_domains.py

changelog: $(READY) ## move the files of docs/changes into CHANGELOG.md, for a release
	$(BIN)/python tools/changelog.py

bench: $(READY) ## every workload beside nsqd, as ratios, about 20 minutes: make bench [ARGS='--only latency']
	$(BIN)/python bench/compare.py $(ARGS)

bench-quick: $(READY) ## CPU per message compared with main, two minutes: make bench-quick [ARGS='--base HEAD~3']
	$(BIN)/python bench/quick.py $(ARGS)

stages: $(READY) ## the broker's processor time per message, stage by stage: make stages [ARGS='--against ../before']
	$(BIN)/python bench/stages.py $(ARGS)

connectors: $(READY) ## to-file, to-http and to-nsq beside nsq_to_file, nsq_to_http and nsq_to_nsq
	$(BIN)/python bench/connectors.py $(ARGS)

console: $(READY) ## the web console beside nsqadmin, on 5 brokers with 10,000 channels each
	$(BIN)/python bench/web_console.py $(ARGS)

routes: pure    ## the modules that a PUB, a FIN, a POST /pub, an export and a page execute: make routes [ARGS=FIN]
	PYTHONPATH=tests $(BIN)/python -m routes $(ARGS)

growth: $(READY) ## how rates, memory and CPU grow with channels, topics, connections, backlog and body size
	$(BIN)/python bench/growth.py $(ARGS)

neighbours: $(READY) ## what one client can do to another: make neighbours [ARGS='--only identify']
	$(BIN)/python bench/neighbours.py $(ARGS)

bench-peers: $(READY) ## NATS JetStream, Redis and RabbitMQ beside this broker: make bench-peers [ARGS='--keep']
	$(BIN)/python bench/peers.py $(ARGS)

bench-cluster: $(READY) ## a cluster of two members beside one broker and other servers: make bench-cluster [ARGS='--only mpub-100']
	$(BIN)/python bench/cluster.py $(ARGS)

bench-archive: $(READY) ## a broker that archives beside one that does not, a restore beside a download, and requests: make bench-archive [ARGS='--only costs']
	$(BIN)/python bench/archive.py $(ARGS)

pictures: $(READY) ## draw the charts and the pictures of terminals and pages in docs/pictures
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_page_pictures.py

docs: $(READY)  ## build the documentation as a site: docs/_build/index.html
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs docs/_build

linkcheck: $(READY) ## check the links of the documentation to other sites
	$(BIN)/sphinx-build --builder linkcheck --quiet docs docs/_build/linkcheck

clean:          ## remove what the other targets made
	rm -rf $(VENV) dist .compiled .spark-oldest docs/_build docs/reference/commands bench/.builds .mypy_cache .ruff_cache .pytest_cache tests/interop/.build
	find core -name '*.so' -delete
