#!/bin/sh
# Each header compiles alone, and the public C header as C99: what a file needs, it includes.
# Where a .cpp begins with a header, the build of `make test` has shown that; the others are compiled here.
# usage: check_headers.sh [CXX [CC]]
set -eu
cd "$(dirname "$0")/.."
cxx=${1:-g++}
cc=${2:-gcc}
warnings="-Wall -Wextra -Wpedantic -Wshadow -Werror"
status=0

# Included from a file of its own, so that `#pragma once` in a main file is not a warning.
compiles() { # language and standard, compiler, header
  if ! printf '#include "%s"\n' "$3" | $2 $1 -fsyntax-only $warnings -I. -Iinclude -; then
    echo "$3 does not compile alone ($2)"
    status=1
  fi
}

count=0
rooms="formats optim engine grad io train cli include"
# A GPU's headers include CUDA's, which not every machine has.
has_cuda=yes
printf '#include <cuda_runtime_api.h>\n' | $cxx -x c++ -fsyntax-only - 2> /dev/null || has_cuda=
begun_with=$(find $rooms capi -name '*.cpp' ! -path '*cuda*' | while read -r file; do
  first=$(grep -m1 '^[^/]' "$file" | sed -n 's/^#include "\(.*\)"$/\1/p')
  printf '%s\n' "$first" "$(dirname "$file")/$first"
done)
for header in $(find $rooms -name '*.h' -o -name '*.hpp' 2> /dev/null | sort); do
  case $header in
    train/cuda/* | engine/cuda_device.h | engine/cuda_ring.h | engine/cuda_rows.h) [ -n "$has_cuda" ] || continue ;;
  esac
  count=$((count + 1))
  if printf '%s\n' "$begun_with" | grep -qxF "$header"; then continue; fi
  compiles "-x c++ -std=c++20" "$cxx" "$header"
done
compiles "-x c -std=c99" "$cc" include/scruple/scruple.h
[ $status = 0 ] && echo "$count headers compile alone"
exit $status
