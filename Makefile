# Builds the environment in .venv and runs the project's checks.
#
#   make plan       the example: does ACT training fit on an RTX 4090? Then the next command to type
#   make test       the tests that take less than a few seconds each, however busy the machine is
#   make test-slow  the others, of which some time this machine, and the property tests with examples
#                   by chance; TESTS=… for some
#   make test-real  third-party training code in an environment of its own (an hour or more);
#                   writes docs/compatibility.md; FAMILY=NAME for one of them; TRAINFIT_EXAMPLES=DIR
#                   is examples/pytorch of a clone of Transformers, of which some are run
#   make lint       style, types and the layering of the packages
#   make coverage   lines and branches that `make test` runs in its own processes; TESTS=… for some
#   make test-newest  a part of the tests on the newest PyTorch there is, in its build with CUDA and
#                   an environment of its own (.ci/newest-pytorch)
#   make torch      another PyTorch than the pinned one for the tests: TORCH=2.8 or TORCH=newest
#   make docs       the documentation as a site, in site/
#   make screens    types what README and the guides say in a fresh clone of HEAD, and writes the sample
#                   screens and pictures from what is printed (half an hour; an idle machine)
#   make golden     what trainfit prints and saves of results, machines, watched runs and scripts,
#                   compared with bench/golden.json.xz (WRITE=1 stores what comes out)
#   make package    wheel and sdist in dist/; installs the wheel elsewhere and runs it
#   make bench      every bench, the long ones in short; TRUTH=DIR holds the published measurements
#   make clean      removes the environments, the example's data and all caches

# Modules are compiled once, not by each process of each run; without it collecting the tests
# takes three times as long.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
NEWEST := .venv-newest/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# For two cores: a quarter of the time a worker waits for processes, timers and hung drivers. 0: in one process.
PYTEST_WORKERS ?= 4

# Families of the corpus in an environment of their own (requirements/real-llm.txt).
OLDER_LLM := llm-llamafactory or llm-litgpt or llm-torchtune

TESTS ?= tests
# requirements/torch-$(TORCH).txt
TORCH ?= newest

GPU ?= RTX 4090
# Where published measurements lie that some benchmarks compare with (see their --help).
TRUTH ?= ../shared/data
DATA := data/act-example

.DELETE_ON_ERROR:
.PHONY: plan test test-newest test-slow test-real lint coverage torch docs screens golden package bench clean

# As in an activated environment: the `python` of their commands is the one that has PyTorch.
plan bench: export PATH := $(CURDIR)/$(BIN):$(PATH)

plan: .venv/.plan-ready $(DATA)/meta.json
	$(BIN)/trainfit plan --gpu "$(GPU)" -- python examples/act/train.py \
		--dataset=$(DATA) '--batch_size={batch_size:8}' '--amp={amp:true}'
	@echo
	@echo 'Next: . .venv/bin/activate'
	@echo '      trainfit plan --gpu "$(GPU)" -- python YOUR_SCRIPT.py'

test: .venv/.dev-ready
	$(PYTEST) -q --workers $(PYTEST_WORKERS)

# The list is chosen so that a test uses every private name of PyTorch that trainfit uses; the last
# command says which none does.
test-newest:
	PYTHON=$(PYTHON) .ci/newest-pytorch $(NEWEST)/python -m pytest -q -n 2 --dist loadfile \
		--no-loadscope-reorder -p tests.newest.recorder @tests/newest/chosen.txt
	$(NEWEST)/python -m tests.newest.touched

test-slow: .venv/.dev-ready
	$(PYTEST) -q -m "slow and not hypothesis" $(TESTS)
	$(PYTEST) -q -m hypothesis --hypothesis-profile chance $(TESTS) || test $$? -eq 5  # 5: none there

test-real: .venv-real/.ready .venv-real-llm/.ready
	.venv-real/bin/python -m pytest -q tests/real $(if $(FAMILY),-k "$(FAMILY)")
	.venv-real-llm/bin/python -m pytest -q tests/real -k "$(or $(FAMILY),$(OLDER_LLM))" || test $$? -eq 5  # 5: none

lint: .venv/.dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Without the tests that time this machine, which a tracer slows.
coverage: .venv/.dev-ready
	$(PYTEST) -q -n $(PYTEST_WORKERS) --dist loadfile -m "not slow" \
		--cov --cov-report=term --cov-report=html $(TESTS)

# Until .venv is built again.
torch: .venv/.dev-ready
	$(PIP) install -q --upgrade -r requirements/torch-$(TORCH).txt

docs: .venv-docs/.ready
	.venv-docs/bin/mkdocs build --strict --quiet

screens: .venv/.dev-ready
	$(BIN)/python bench/docs_walk.py --write

golden: .venv/.dev-ready
	$(BIN)/python bench/golden.py $(if $(WRITE),--write)

package: .venv/.dev-ready
	rm -rf build dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	TRAINFIT_DIST=dist $(PYTEST) -q -m slow tests/test_packaging.py

bench: .venv/.dev-ready
	$(BIN)/python bench/newcomer.py --quick --torch pinned --lend $(BIN)/python
	$(BIN)/python bench/doctor.py
	$(BIN)/python bench/loader_model.py --quick
	$(BIN)/python bench/loader_accuracy.py --quick
	$(BIN)/python bench/launch.py --quick
	$(BIN)/python bench/cases.py --quick
	$(BIN)/python bench/watch_rules.py --quick
	$(BIN)/python bench/watch_overhead.py --quick
	$(BIN)/python bench/noise_scale.py --quick
	$(BIN)/python bench/pace.py --quick
	$(BIN)/python bench/report_page.py
	$(BIN)/python bench/trace.py
	$(BIN)/python bench/act.py
	$(BIN)/python bench/remedies.py
	$(BIN)/python bench/generation.py --quick
	$(BIN)/python bench/seeds.py --quick
	$(BIN)/python bench/memory_accuracy.py --data $(TRUTH)/gpumemnet_timm_a100_fp32.csv
	$(BIN)/python bench/llm_memory.py --data $(TRUTH) --quick || test $$? -eq 3  # 3: a package lacks
	$(BIN)/python bench/distributed_speed.py --truth $(TRUTH)
	$(BIN)/python bench/kernel_accuracy.py --data $(TRUTH)
	$(BIN)/python bench/speed_accuracy.py --data $(TRUTH) --quick
	$(BIN)/python bench/memory_truth.py || test $$? -eq 3  # 3: nothing was recorded yet
	$(BIN)/python bench/speed_truth.py || test $$? -eq 3

clean:
	rm -rf .venv .venv-newest .venv-real .venv-real-llm .venv-docs $(DATA) data/real build dist site htmlcov .coverage* .touched-newest .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

# meta.json is what make_dataset.py writes last; it keeps a data set that is whole.
$(DATA)/meta.json: examples/act/make_dataset.py | .venv/.plan-ready
	$(BIN)/python examples/act/make_dataset.py --out $(DATA)
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

# The project is editable and comes last: its dependencies are pinned by then. Not -q: pip names each
# package with its size and draws the progress of its download.
.venv/.plan-ready: requirements/plan.txt pyproject.toml | $(BIN)/python
	@echo "Installing $$(grep -c == requirements/plan.txt) packages in .venv, some minutes: 1 GB with PyTorch's CPU build,"
	@echo "5.6 GB with its CUDA build (README.md says how to get the CPU build)"
	$(PIP) install -r requirements/plan.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

.venv/.dev-ready: requirements/dev.txt requirements/dev-nodeps.txt .venv/.plan-ready
	$(PIP) install -q -r requirements/dev.txt
	$(PIP) install -q --no-deps -r requirements/dev-nodeps.txt
	touch $@

.venv-docs/.ready: requirements/docs.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install -q -r requirements/docs.txt
	touch $@

# An environment of its own, so that what the corpus pulls in is never what the tests see. The
# constraint keeps PyTorch as plan.txt has it.
.venv-real/.ready: requirements/real.txt requirements/dev.txt requirements/plan.txt pyproject.toml
	test -x .venv-real/bin/python || $(PYTHON) -m venv .venv-real
	.venv-real/bin/python -m pip --disable-pip-version-check install -q \
		-c requirements/plan.txt -r requirements/real.txt
	.venv-real/bin/python -m pip --disable-pip-version-check install -q --no-deps \
		-r requirements/dev-nodeps.txt
	.venv-real/bin/python -m pip --disable-pip-version-check install -q --no-deps \
		--no-build-isolation -e .
	touch $@

.venv-real-llm/.ready: requirements/real-llm.txt requirements/plan.txt pyproject.toml
	test -x .venv-real-llm/bin/python || $(PYTHON) -m venv .venv-real-llm
	.venv-real-llm/bin/python -m pip --disable-pip-version-check install -q \
		$$(grep ^torch== requirements/plan.txt) pytest -r requirements/real-llm.txt -e .
	touch $@
