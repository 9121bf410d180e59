# Everything runs in one virtual environment, made from constraints.txt on first use.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# What pip takes into it.
CONSTRAINTS ?= constraints.txt
PYTEST := $(BIN)/python -m pytest
# How many test files run at a time; with 1, one test after the other in one process. Tests wait more
# than they compute: four at a time keep two cores busy.
JOBS   ?= 4
# Those of `make test-pythons`.
PYTHONS ?= python3.10 python3.12 python3.13

# The kernels that tests and examples start are those of the environment, not of the person.
export JUPYTER_PREFER_ENV_PATH := 1
# Hundreds of processes import the package: compiled once, not in each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test check coverage docs test-accelerator test-binder test-chaos test-datasets test-deepspeed test-eight \
  test-fp8 test-gpu test-hosts test-inductor test-kernels test-kills test-libraries test-long test-newest test-pythons test-ray \
  test-soak test-torch test-torch-tpu test-tpu test-wheel test-without-browser bench changelog demo dist lab env browser \
  clean size

help:
	@echo 'make demo            train in a notebook, headless; writes build/demo/'
	@echo 'make lab             open the same notebook in JupyterLab'
	@echo 'make test            ruff, mypy and the tests of all main ways: eight minutes'
	@echo 'make test-long       further cases, all examples and pages: as long again'
	@echo 'make check           ruff and mypy'
	@echo 'make coverage        the tests, with the lines that they miss'
	@echo 'make docs            build the site of documentation; writes build/docs/html/'
	@echo 'make test-accelerator  what asynchronous devices change, on a simulated one that it builds'
	@echo 'make test-binder     build the environment of binder/, and run all notebooks in it'
	@echo 'make test-chaos      kill kernels, agents, templates and ranks at random'
	@echo 'make test-datasets   ranks read by datasets, which it gets; make test skips that'
	@echo 'make test-deepspeed  trains by DeepSpeed, which it gets; make test skips that'
	@echo 'make test-eight      three kinds of parallelism at once, on eight ranks'
	@echo 'make test-fp8        trains in 8 bits by torchao, which it gets; make test skips that'
	@echo 'make test-gpu        what only a machine with a GPU shows; make test skips that elsewhere'
	@echo 'make test-hosts      trains on two hosts, one of them made of namespaces; needs root'
	@echo 'make test-inductor   trains by what torch.compile builds, which takes a minute'
	@echo 'make test-libraries  first cells of notebooks, with datasets, timm, fastai and others'
	@echo 'make test-kernels    blocking, background, Stop, Interrupt in six versions of ipykernel'
	@echo 'make test-kills      kill ranks of trainings that save checkpoints, and resume each'
	@echo 'make test-newest     the tests, browsers aside, with the newest release of all that it installs'
	@echo 'make test-pythons    the tests, browsers aside, on other versions of Python: $(PYTHONS)'
	@echo 'make test-ray        trains on a cluster of Ray of two nodes, which it gets'
	@echo 'make test-soak       launch 1,000 times, and look at what that leaves behind'
	@echo 'make test-torch      the tests, browsers aside, on another torch: TORCH=2.11.0, else the newest'
	@echo 'make test-torch-tpu  asks torch_tpu, which it gets, for what only it can say'
	@echo 'make test-tpu        trains by torch_xla on its CPU device, which it gets: 7 GB'
	@echo 'make test-wheel      make dist; a launch from a kernel that has the wheel alone, on each Python'
	@echo 'make dist            build and check what is published: dist/'
	@echo 'make changelog VERSION=0.2.0   gather changelog.d/ in CHANGELOG.md'
	@echo 'make bench           the figures of benchmarks/README.md, peers beside us'
	@echo 'make size            code lines, docstrings, helpers used once; ARGS=-v lists those'
	@echo 'make clean           remove what was built and measured; .venv stays'

# Several files at a time (with JOBS=1 one), and then the browsers two at a time: eight minutes. A
# file's tests stay together, so that the fixtures of a module are made once. Only files that name a marker are read for it: to read all takes each process 10 s.
marked = $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.$(1)' tests)
test: check browser
ifeq ($(JOBS)$(strip $(ARGS)),$(filter-out 1,$(JOBS)))
	$(PYTEST) --numprocesses $(JOBS) --dist loadfile -m 'not browser and not serial and not long'
	$(PYTEST) --numprocesses 2 --dist loadfile -m 'browser and not long' $(call marked,browser)
else
	$(PYTEST) $(ARGS)
endif

# What takes longer, and then, alone, what measures or fills the machine.
test-long: browser
	$(PYTEST) --numprocesses $(JOBS) --dist loadfile -m 'long and not browser' $(call marked,long)
	$(PYTEST) --numprocesses 2 --dist loadfile -m 'long and browser' $(call marked,browser)
	$(PYTEST) -m serial $(call marked,serial)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(READY)
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# As Binder builds it: from the root, and by nothing but what binder/ says.
test-binder:
	$(PYTHON) -m venv build/binder
	build/binder/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --requirement binder/requirements.txt
	PATH="$$PWD/build/binder/bin:$$PATH" bash binder/postBuild
	@for notebook in notebooks/0*.ipynb; do \
	  echo "== $$notebook"; \
	  build/binder/bin/python notebooks/execute.py $$notebook --out build/binder-pages || exit 1; \
	done

test-chaos: $(READY)
	$(BIN)/python -m tests.chaos $(ARGS)

# What a target needs beside .venv goes into an environment on top of it, so that it stays as it is:
# torchao prints warnings in every process that looks for it, say.
#   1: its name, 2: what pip installs
define on_top
	$(BIN)/python -m venv build/$(1)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  >"$$(build/$(1)/bin/python -c 'import site; print(*site.getsitepackages())')/below.pth"
	build/$(1)/bin/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check $(2)
endef

# Warnings are errors, links that lead nowhere among them.
docs: $(READY)
	$(call on_top,sphinx,--constraint constraints.txt --constraint constraints-docs.txt --editable '.[docs]')
	@# The kernel of the notebooks is this environment's, whatever else the person has.
	build/sphinx/bin/python -m ipykernel install --sys-prefix >/dev/null 2>&1
	build/sphinx/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --fresh-env --quiet \
	  --doctree-dir build/docs/doctrees $(ARGS) docs build/docs/html
	@echo 'The site is in build/docs/html/index.html'

# The accelerator is compiled for the pinned torch, once: 45 to 90 s. What only a real GPU shows has a
# marker of its own.
SIM := tests/accelerator/simaccel
build/accelerator/.built: $(READY) $(wildcard $(SIM)/csrc/*) $(SIM)/build.py $(SIM)/pyproject.toml
	@command -v g++ >/dev/null || { echo 'A C++ compiler is needed (Debian: apt-get install g++)'; exit 1; }
	$(call on_top,accelerator,--constraint constraints.txt ninja setuptools hatchling)
	PATH="$$PWD/build/accelerator/bin:$$PATH" build/accelerator/bin/python $(SIM)/build.py
	build/accelerator/bin/python -m pip install --quiet --quiet --no-build-isolation --no-deps --force-reinstall ./$(SIM)
	@touch $@

test-accelerator: build/accelerator/.built
	build/accelerator/bin/python -m pytest -m 'not real_gpu' tests/accelerator tests/gpu $(ARGS)

test-datasets: $(READY)
	$(call on_top,datasets,--constraint constraints.txt datasets==5.2.0)
	build/datasets/bin/python -m pytest tests/kernel/test_datasets.py $(ARGS)

test-deepspeed: $(READY)
	$(call on_top,deepspeed,--constraint constraints.txt deepspeed==0.19.8)
	build/deepspeed/bin/python -m pytest tests/training/test_deepspeed.py \
	  tests/cli/test_launch.py::test_deepspeed_trains_from_a_file_alone \
	  tests/test_private_names.py $(ARGS)

test-eight: $(READY)
	$(PYTEST) tests/training/eight_ranks.py $(ARGS)

# pip may find torchvision compiled for another torch than .venv's (for CUDA, say), which then has no
# operators. Its import needs the names of two; nothing here calls them.
test-libraries: $(READY)
	$(call on_top,libraries,--constraint constraints.txt datasets==5.2.0 diffusers evaluate fastai lightning timm trl)
	printf '%s\n' 'if not _has_ops() and not hasattr(torch.ops.torchvision, "nms"):' \
	  '    for each in ("nms", "qnms"):' \
	  '        torch.library.define(f"torchvision::{each}", "(Tensor a, Tensor b, float c) -> Tensor")' \
	  >>"$$(echo build/libraries/lib/python3*/site-packages/torchvision/extension.py)"
	build/libraries/bin/python -m pytest -m '' tests/kernel/test_first_cells.py \
	  tests/launch/test_library_metrics.py \
	  'tests/test_docs.py::test_the_blocks_of_a_page_run_in_a_new_kernel_one_after_the_other[guide/lightning.md]' $(ARGS)

test-fp8: $(READY)
	$(call on_top,fp8,--constraint constraints.txt torchao==0.18.0)
	build/fp8/bin/python -m pytest tests/training/test_float8.py $(ARGS)

test-gpu: $(READY)
	$(PYTEST) -m gpu $(call marked,gpu) $(ARGS)

test-hosts: $(READY)
	$(PYTEST) tests/hosts/two_hosts.py $(ARGS)

test-inductor: $(READY)
	$(PYTEST) tests/training/inductor.py $(ARGS)

test-kernels: $(READY)
	$(PYTEST) tests/notebook/matrix.py $(ARGS)

test-kills: $(READY)
	NOTEBOOK_ACCEL_TEST_ROUNDS=50 $(PYTEST) tests/training/test_kills.py $(ARGS)

# Each Python in an environment of its own; one that does not start is not installed.
test-pythons:
	@failed=; \
	for python in $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "== $$python is not installed: skipped"; continue; }; \
	  echo "== $$python"; \
	  $(MAKE) --no-print-directory test-without-browser PYTHON=$$python VENV=build/$$python || \
	    failed="$$failed $$python"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed:$$failed"; exit 1; }

# An environment of its own: torch_xla can be imported with the torch of its own number alone.
test-tpu:
	@test -x build/tpu/bin/pip || $(PYTHON) -m venv build/tpu
	@grep -v '^torch==' constraints.txt >build/tpu/constraints.txt
	build/tpu/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	  --constraint build/tpu/constraints.txt --constraint constraints-tpu.txt --editable . \
	  torch_xla jupyter-client pytest pytest-timeout transformers
	build/tpu/bin/python -m pytest tests/xla $(ARGS)

# The wheel alone, in an environment of its own for each Python; $(PYTEST) drives a kernel there.
test-wheel: $(READY) dist
	@failed=; \
	for python in $(PYTHON) $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "== $$python is not installed: skipped"; continue; }; \
	  echo "== $$python"; \
	  bare=build/wheel-$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  { test -x $$bare/bin/pip || $$python -m venv $$bare; } && \
	  $$bare/bin/python -m pip uninstall --quiet --quiet --yes notebook-accel && \
	  $$bare/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	    --constraint constraints.txt dist/*.whl && \
	  WHEEL_PYTHON=$$bare/bin/python $(PYTEST) tests/test_packaging.py -k launches $(ARGS) || \
	    failed="$$failed $$python"; \
	done; \
	[ -z "$$failed" ] || { echo "Failed:$$failed"; exit 1; }

# In an environment of its own. A constraint of the person's pip, which may cap torch, gives way to
# ours; torch says itself which setuptools fits.
newest_torch = $(PYTHON) -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\([0-9.]*\).*/\1/p'
test-torch:
	@torch=$(TORCH); torch=$${torch:-$$($(newest_torch))}; made=build/torch-$$torch; \
	mkdir -p build && \
	{ grep -Ev '^(torch|setuptools)==' constraints.txt; echo "torch==$$torch"; } >$$made.txt && \
	PIP_CONSTRAINT="$$PWD/$$made.txt" $(MAKE) --no-print-directory env VENV=$$made CONSTRAINTS=$$made.txt && \
	echo "== torch $$torch" && \
	$$made/bin/python -m pytest \
	  $(or $(ARGS),--numprocesses $(JOBS) --dist loadfile -m 'not browser and not serial and not long')

# What a person gets who installs today: no version is pinned, and what was here before is brought up to
# date. A constraint of the person's pip, which may cap torch, gives way to an empty one.
test-newest:
	@mkdir -p build && : >build/newest.txt
	PIP_CONSTRAINT="$$PWD/build/newest.txt" PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager \
	  $(MAKE) --no-print-directory --what-if=pyproject.toml env VENV=build/newest CONSTRAINTS=build/newest.txt
	build/newest/bin/python -m pytest \
	  $(or $(ARGS),--numprocesses $(JOBS) --dist loadfile -m 'not browser and not serial and not long')

test-torch-tpu: $(READY)
	$(call on_top,torch-tpu,--constraint constraints.txt torch_tpu==0.2.0)
	build/torch-tpu/bin/python -m pytest tests/test_torch_tpu.py $(ARGS)

test-without-browser: $(READY)
ifeq ($(strip $(ARGS)),)
	$(PYTEST) --numprocesses $(JOBS) --dist loadfile -m 'not browser and not serial'
	$(PYTEST) -m serial $(call marked,serial)
else
	$(PYTEST) -m 'not browser' $(ARGS)
endif

test-ray: $(READY)
	$(call on_top,ray,--constraint constraints.txt ray==2.60.0)
	build/ray/bin/python -m pytest tests/engines/on_ray.py $(ARGS)

test-soak: $(READY)
	NOTEBOOK_ACCEL_TEST_ROUNDS=333 $(PYTEST) tests/launch/test_launcher.py -k leave_nothing_behind $(ARGS)

bench: $(READY)
	@for script in launch library_launch many_ranks session step strategies loader checkpoint closure flood panel faults sweep; do \
	  echo; echo "== benchmarks/$$script.py $(ARGS)"; \
	  $(BIN)/python benchmarks/$$script.py $(ARGS) || exit 1; \
	done
	@echo; echo '== benchmarks/strategies.py --scaling $(ARGS)'
	@$(BIN)/python benchmarks/strategies.py --scaling $(ARGS)

# What is published: the wheel is built from the sdist, as it is for whoever has that alone.
release_tools = test -x build/dist/bin/pip || $(PYTHON) -m venv build/dist; \
  build/dist/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
  --constraint constraints.txt build==1.6.1 check-wheel-contents==0.6.3 hatchling \
  towncrier==26.9.0 twine==7.0.0
dist:
	@$(release_tools)
	rm -rf dist
	build/dist/bin/python -m build --no-isolation
	build/dist/bin/twine check --strict dist/*
	build/dist/bin/check-wheel-contents dist/*.whl

changelog:
	@$(release_tools)
	build/dist/bin/towncrier build --version $(VERSION) --yes

demo: $(READY)
	$(BIN)/python notebooks/execute.py notebooks/01_quickstart.ipynb --out build/demo

lab: $(READY)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/01_quickstart.ipynb

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'Python 3.10 or newer is needed; name one with: make PYTHON=python3.x'; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { echo 'python3 cannot make a virtual environment (Debian: apt-get install python3-venv)'; exit 1; }
	@echo 'Installing into $(VENV); the first time takes some minutes.'
	@# Most of its modules are never imported: Python compiles those that are.
	$(BIN)/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check \
	  --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

# The browser tests need a Chromium, which only a system's package manager brings.
browser:
	@for name in "$$CHROMIUM" chromium chromium-browser google-chrome google-chrome-stable; do \
	  if [ -n "$$name" ] && command -v "$$name" >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ]; then \
	  echo 'Installing Chromium for the browser tests.'; \
	  { apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes chromium >/dev/null; } || \
	  echo 'Chromium could not be installed: the browser tests are skipped.'; \
	else \
	  echo 'No Chromium found: the browser tests are skipped (Debian: apt-get install chromium).'; \
	fi

size:
	@$(PYTHON) tests/house_figures.py $(ARGS)

clean:
	rm -rf build dist docs/notebooks docs/reference/api .mypy_cache .ruff_cache .pytest_cache .coverage .coverage.*
