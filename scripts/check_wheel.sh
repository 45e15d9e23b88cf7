#!/usr/bin/env bash
# Installs a wheel into fresh environments of every Python from 3.10 that is here, with the oldest and the newest torch
# that is supported, and runs the Python tests against what was installed. Needs a package index for torch.
# Usage: check_wheel.sh WHEEL [FOLDER]    PYTHONS="python3.10 python3.13" and TORCHES="2.6.0" choose others
set -euo pipefail
wheel=$(realpath "$1")
folder=${2:-build/check_wheel}
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
unset SCRUPLE_LIBRARY PYTHONPATH PYTHONHOME
# Those that need torch alone; the others want frameworks, or several processes, and are no other with a wheel.
tests="cast optimizers parameters rounding state masters written_state release release_failures release_loops checkpoint checkpoint_failures"

pythons=${PYTHONS:-}
if [ -z "$pythons" ]; then
  for minor in 10 11 12 13 14 15; do
    # A name in the path may be pyenv's, which has nothing behind it unless that version is chosen.
    if "python3.$minor" -c "" 2>/dev/null; then pythons="$pythons python3.$minor"; fi
  done
fi

size=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $((size / 1000)) kB"
if [ "$size" -gt 60000000 ]; then
  echo "more than 60 MB"
  exit 1
fi

status=0
for python in $pythons; do
  for torch in ${TORCHES:-2.6.0 newest}; do
    name=$(basename "$python")-torch-$torch
    venv=$folder/$name
    rm -rf "$venv"
    "$python" -m venv "$venv"
    wanted=torch
    [ "$torch" = newest ] || wanted="torch==$torch"
    if ! "$venv/bin/pip" --disable-pip-version-check --quiet install "$wheel" "$wanted" numpy safetensors \
      >"$venv.log" 2>&1; then
      echo "$name: not to be had: $(grep -m1 -E '^ERROR' "$venv.log")"
      rm -rf "$venv"
      continue
    fi
    cd "$folder"  # away from the source tree
    line=$("$venv/bin/python" -W ignore -c "
import platform, sys, torch, scruple
path = scruple._abi.library.path
assert path.startswith(sys.prefix), path
print('Python', platform.python_version() + ', torch', torch.__version__ + ':', scruple.version(), *scruple.engines())")
    "$venv/bin/scruple" checkpoint --help >/dev/null  # the command line is in it, and starts
    for test in $tests; do
      if "$venv/bin/python" -W ignore "$source/tests/torch/test_$test.py" >"$venv.$test.log" 2>&1; then
        line="$line; $test $(grep -oE 'OK.*' "$venv.$test.log" | tail -1)"
      else
        line="$line; $test FAILED: $venv.$test.log"
        status=1
      fi
    done
    echo "$line"
    rm -rf "$venv"
  done
done
exit $status
