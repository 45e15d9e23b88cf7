#!/usr/bin/env bash
# Builds and runs, against an installed tree, the first C++ and the first C program of the README, exactly as they stand
# there, and examples/cpp: by find_package, by pkg-config and by the plain library.
# Usage: consume.sh PREFIX   (of `make install`, or the folder of the Python package)
set -euo pipefail
prefix=$1
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
readme=$source/README.md
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# extract LANGUAGE FILE: the text between the first ```LANGUAGE line and the next ``` line.
extract() {
  awk -v fence="\`\`\`$1" '$0 == fence && !seen { inside = seen = 1; next }
                           inside && /^```/ { inside = 0; ended = 1 }
                           inside { print } END { exit !ended }' "$readme" >"$2" ||
    { echo "$readme has no whole \`\`\`$1 block"; exit 1; }
}

run() { # what it is, the text that its output has, command
  echo "--- $1"
  local said
  said=$("${@:3}")
  echo "$said"
  [[ $said == *$2* ]] || { echo "its output lacks: $2"; exit 1; }
}

build() { # source folder
  "${CMAKE:-cmake}" -S "$1" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/log" 2>&1 &&
    "${CMAKE:-cmake}" --build "$work/build" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  # Of this tree, and of no other copy that the machine may have.
  grep -q "scruple_DIR:PATH=$prefix/" "$work/build/CMakeCache.txt" ||
    { echo "found another copy than the one in $prefix:"; grep scruple_DIR "$work/build/CMakeCache.txt"; exit 1; }
}

mkdir "$work/consumer"
cp "$here/consumer.cmake" "$work/consumer/CMakeLists.txt"
extract cpp "$work/consumer/example.cpp"
build "$work/consumer"
run "README's C++ program by find_package" ": 1.000" "$work/build/example"
rm -rf "$work/build"
build "$source/examples/cpp"
run "examples/cpp" "5.125 bytes per parameter" "$work/build/fit"

lib=$(dirname "$(find "$prefix" -name libscruple.so)")
extract c "$work/example.c"
compile=("${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror)
read -ra flags <<<"${CFLAGS:-}"
packaged=$(PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name scruple.pc)") pkg-config --cflags --libs "scruple >= 0.2")
read -ra packaged <<<"$packaged"
"${compile[@]}" "${flags[@]}" "$work/example.c" "${packaged[@]}" -o "$work/by_pkg_config"
run "README's C program by pkg-config" ": 1.000" env LD_LIBRARY_PATH="$lib" "$work/by_pkg_config"

"${compile[@]}" "${flags[@]}" -I"$prefix/include" "$work/example.c" -L"$lib" -lscruple -o "$work/by_library"
run "README's C program by the plain library" ": 1.000" env LD_LIBRARY_PATH="$lib" "$work/by_library"
