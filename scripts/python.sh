#!/usr/bin/env bash
# Sets up .venv with what the Python tests need; does nothing, and needs no network, when it is there already.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=tests/requirements.txt
if cmp -s $wanted .venv/requirements.txt; then exit 0; fi
echo "Setting up .venv: $(grep -v '^#' $wanted | tr '\n' ' ')(once; torch is large)"
python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check -r $wanted
cp $wanted .venv/
