# Two commands do everything: `make demo` and `make test`. Each makes .venv on first use, with plain pip.
PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check bench tables docs browser clean

demo: .venv/.core
	$(BIN)/specguard demo

test: .venv/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

# A browser for the tests of the report, where it can be installed; without one they are skipped, and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } \
	|| echo "no Chromium could be installed: the tests of the report in a browser will be skipped"

docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: .venv/.dev
	$(BIN)/python benchmarks/msvp_overhead.py
	$(BIN)/python benchmarks/scale_out.py
	test -e runs/digits_pgd/plain/result.json || PYTHON=$(BIN)/python recipes/digits_pgd/run.sh
	$(BIN)/python benchmarks/attack_throughput.py --run runs/digits_pgd/plain --radius 0.1 --batch 360

tables: .venv/.dev
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/formats.py
	$(BIN)/python docs/models.py
	$(BIN)/python docs/zoo.py

# PIP_CONSTRAINT reaches the isolated build environment too.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps torchattacks==3.5.1  # an oracle of the tests, which asks for an old requests
	touch $@

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
