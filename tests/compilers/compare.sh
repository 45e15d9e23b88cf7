#!/bin/sh
# Builds the library with GCC and with Clang, at -O0 and at -O3, and compares what hash.cpp prints with each of
# them against golden.txt: the same bits for every compiler, optimisation, machine and day.
#   compare.sh WORK_DIR             compares; WORK_DIR keeps the builds for next time
#   SCRUPLE_COMPILERS=g++ compare.sh WORK_DIR   with those that a machine has
#   compare.sh WORK_DIR --refresh   the four agree and the bits are meant to change: writes golden.txt anew
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${1:?usage: compare.sh WORK_DIR [--refresh]}
mkdir -p "$work"

compilers=${SCRUPLE_COMPILERS:-g++ clang++}
for compiler in $compilers; do
  if ! command -v $compiler > /dev/null; then
    echo "$compiler is not installed; make test installs it (on Debian: apt-get install g++ clang)" >&2
    exit 1
  fi
done

build() { # compiler, optimisation
  dir=$work/$1$2
  cmake -S "$root" -B "$dir" -DCMAKE_CXX_COMPILER="$1" -DCMAKE_BUILD_TYPE=Release \
    "-DCMAKE_CXX_FLAGS_RELEASE=$2" -DSCRUPLE_DEVELOPER=OFF -DSCRUPLE_CLI=OFF -DSCRUPLE_CUDA=OFF > "$dir.log" 2>&1 &&
    cmake --build "$dir" --target scruple -j2 >> "$dir.log" 2>&1 &&
    "$1" -std=c++20 "$2" -I"$root/include" "$here/hash.cpp" -L"$dir" -lscruple -Wl,-rpath,"$dir" \
      -o "$dir/hash" >> "$dir.log" 2>&1 || {
    cat "$dir.log"
    exit 1
  }
  "$dir/hash" > "$work/$1$2.txt"
}

status=0
first=$work/g++-O0.txt
for compiler in $compilers; do
  for optimisation in -O0 -O3; do
    build $compiler $optimisation
    output=$work/$compiler$optimisation.txt
    if ! diff "$first" "$output" > "$work/diff"; then
      echo "g++ -O0 (<) and $compiler $optimisation (>) disagree in $(grep -c '^>' "$work/diff") lines:"
      head -20 "$work/diff"
      status=1
    fi
  done
done
[ $status = 0 ] || exit 1

if [ "${2:-}" = --refresh ]; then
  cp "$first" "$here/golden.txt"
  echo "golden.txt: $(wc -l < "$here/golden.txt") hashes"
elif ! diff "$here/golden.txt" "$first" > "$work/diff"; then
  echo "golden.txt (<) and this build (>) disagree in $(grep -c '^[<>]' "$work/diff") lines:"
  head -20 "$work/diff"
  echo "The bits changed. If they were meant to: tests/compilers/compare.sh $work --refresh"
  exit 1
fi
