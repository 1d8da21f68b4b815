# make book    execute the chapters and render the site into _build/site/_build/html
# make test    every check of this repository, the book's build and a real browser included
# make colab   run the chapters with the versions that Colab has, in .venv-colab
# make lab     open the chapters in JupyterLab
# make clean   remove what was built (the environments stay; `make distclean` removes them too)
#
# Each target but `colab` first makes .venv from requirements.lock, once; it needs Python 3.11 or newer
# and a package index. PYTHON=python3.12 picks another interpreter, JOBS=4 runs more chapters at a time.

PYTHON ?= python3
JOBS ?= 2

# Threads that spin while they wait slow a shared machine down, so they sleep, and a chapter uses one.
export OMP_WAIT_POLICY := PASSIVE
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds a checksum of what decides the environment: a change there sets it up again.
READY := $(VENV)/ready-$(shell cat requirements.lock pyproject.toml | cksum | tr ' ' '-')

.PHONY: book test colab lab clean distclean env browser lint unit site
.DEFAULT_GOAL := book

env: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than 3.11: install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) from requirements.lock (minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --requirement requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --editable .
	@rm -f $(VENV)/ready-*
	@touch $@

book: $(READY)
	@$(BIN)/python book/tools/build_book.py --jobs $(JOBS)

test: browser lint unit book site

browser: $(READY)
	@$(BIN)/python book/tools/browser.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python book/tools/clean_notebooks.py --check
	$(BIN)/python book/tools/lint_notebooks.py

unit: $(READY)
	$(BIN)/python -m pytest tests --ignore=tests/site

site: $(READY)
	$(BIN)/python -m pytest tests/site

# COLAB="--versions LIST --torch-of-colab" takes all versions from another list.
colab:
	@$(PYTHON) book/tools/colab.py --jobs $(JOBS) $(COLAB)

lab: $(READY)
	$(BIN)/jupyter lab chapters

clean:
	rm -rf _build book/_static/assets book/_static/css/palette.css

distclean: clean
	rm -rf $(VENV) .venv-colab *.egg-info
