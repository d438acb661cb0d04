# Two commands for a newcomer:
#   make demo   fine-tune a pretrained network on real images, in full and within a budget, and compare
#   make test   everything that CI checks
# Both make .venv first if it is not there. That needs the network and 8 GB of disk once; after that neither does.

VENV := .venv
RUN := $(VENV)/bin/python -m
# Two processes of one thread each: the tests' tensors are too small for threads, and this takes half as long.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types docs tests bench results clean

help: ## list these targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

venv: ## make .venv if it is missing or pyproject.toml or constraints.txt have changed
	@tools/venv.sh $(VENV)

demo: venv ## train the built-in model on the built-in images, in full and within a budget
	@$(RUN) elastictrainer.demo

# One after the other, whatever -j says: pytest's closing line is to be the last one.
test: venv ## lint, types, docs (strict), tests and doctests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory tests

lint: venv ## ruff: rules and format
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

# Twice: as the newest tools see it, and for what the oldest Python lacks, whose view of numpy says nothing.
types: venv ## mypy, strict
	@$(RUN) mypy
	@$(RUN) mypy --python-version 3.10 --disable-error-code no-any-return --no-warn-unused-ignores

docs: venv ## build the documentation into site/, warnings are errors
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet
	@echo "docs: site/index.html"

tests: venv ## pytest with doctests, warnings are errors
	@$(TEST_ENV) $(RUN) pytest -q -n 2

# The other suites need a dataset and weights; the top of each file in benchmarks/ says how to start it.
bench: venv ## the benchmarks that need no dataset, on this CPU; an hour, results in benchmarks/results/
	@$(TEST_ENV) $(VENV)/bin/python benchmarks/time_model.py --device cpu --threads 1 --batch-size 4 --image-size 96
	@$(VENV)/bin/python benchmarks/time_model.py --device cpu --threads 2 --batch-size 4 --image-size 96
	@$(TEST_ENV) $(VENV)/bin/python benchmarks/solver.py
	@$(TEST_ENV) $(VENV)/bin/python benchmarks/apply_memory.py --batch-size 8 --image-size 64

results: venv ## docs/results from the tables in benchmarks/results
	@$(VENV)/bin/python benchmarks/pages.py

clean: ## remove everything that can be made again, but not runs/
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
