PY ?= python3
BIN := .venv/bin
UV = UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt

run: .venv/.core          ## set up what is missing, then run the main job
	$(BIN)/twin run

test: .venv/.all          ## set up what is missing, then run all tests
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: .venv/.all         ## formatting, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dashboard: .venv/.all     ## the what-if page on http://127.0.0.1:8501
	$(BIN)/twin dashboard

$(BIN)/uv:
	$(PY) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check uv==0.13.9

.venv/.core: $(BIN)/uv pyproject.toml constraints.txt
	$(UV) -e . && touch $@

.venv/.all: .venv/.core
	$(UV) -e '.[fast,runtime,dashboard,cluster,dev]' && touch $@

.PHONY: run test check dashboard
