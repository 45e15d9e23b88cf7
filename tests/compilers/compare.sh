#!/bin/sh
# Compares what hash.cpp prints over differently compiled libraries with golden.txt: the same bits for every
# compiler, optimisation, machine and day.
#   compare.sh WORK_DIR LIBRARY     over LIBRARY, and over g++ -O0 and clang++ -O3; WORK_DIR keeps the builds for next time
#   compare.sh WORK_DIR             over both compilers at -O0 and -O3; so does SCRUPLE_TEST_WHOLE=1 with a LIBRARY
#   SCRUPLE_COMPILERS=g++ compare.sh ...   with those that a machine has
#   compare.sh WORK_DIR --refresh   the four agree and the bits are meant to change: writes golden.txt anew
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
work=${1:?usage: compare.sh WORK_DIR [LIBRARY | --refresh]}
library=
refresh=
case "${2:-}" in
  "") ;;
  --refresh) refresh=yes ;;
  *) library=$2 ;;
esac
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
  cmake -S "$root" -B "$dir" -DCMAKE_CXX_COMPILER="$1" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=$2" \
    -DSCRUPLE_DEVELOPER=OFF -DSCRUPLE_CLI=OFF -DSCRUPLE_TRAIN=OFF -DSCRUPLE_CUDA=OFF > "$dir.log" 2>&1 &&
    cmake --build "$dir" --target scruple -j2 >> "$dir.log" 2>&1 || {
    cat "$dir.log"
    exit 1
  }
}

print_hashes() { # compiler, library, output
  folder=$(dirname "$2")
  "$1" -std=c++20 -O1 -I"$root/include" "$here/hash.cpp" -L"$folder" -lscruple -Wl,-rpath,"$folder" -o "$3.hash"
  "$3.hash" > "$3"
}

status=0
first=
compare() { # what it is, output
  [ -n "$first" ] || { first=$2 first_name=$1; return; }
  if ! diff "$first" "$2" > "$work/diff"; then
    echo "$first_name (<) and $1 (>) disagree in $(grep -c '^>' "$work/diff") lines:"
    head -20 "$work/diff"
    status=1
  fi
}

if [ -n "$library" ]; then
  print_hashes g++ "$library" "$work/library.txt"
  compare "$library" "$work/library.txt"
fi
for compiler in $compilers; do
  for optimisation in -O0 -O3; do
    # With a library that is there already, of the four the two that differ most from each other.
    if [ -n "$library" ] && [ "${SCRUPLE_TEST_WHOLE:-0}" = 0 ]; then
      case $compiler$optimisation in g++-O3 | clang++-O0) continue ;; esac
    fi
    build $compiler $optimisation
    print_hashes $compiler "$work/$compiler$optimisation/libscruple.so" "$work/$compiler$optimisation.txt"
    compare "$compiler $optimisation" "$work/$compiler$optimisation.txt"
  done
done
[ $status = 0 ] || exit 1

if [ -n "$refresh" ]; then
  cp "$first" "$here/golden.txt"
  echo "golden.txt: $(wc -l < "$here/golden.txt") hashes"
elif ! diff "$here/golden.txt" "$first" > "$work/diff"; then
  echo "golden.txt (<) and this build (>) disagree in $(grep -c '^[<>]' "$work/diff") lines:"
  head -20 "$work/diff"
  echo "The bits changed. If they were meant to: tests/compilers/compare.sh $work --refresh"
  exit 1
fi
