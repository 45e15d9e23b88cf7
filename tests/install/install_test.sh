#!/usr/bin/env bash
# Installs the build, moves the installed tree, then builds and runs the first C++ and the first C program of
# the README against it, exactly as they stand there: by find_package, by pkg-config and by the plain library.
# Usage: install_test.sh BUILD_DIR README
set -euo pipefail
build=$1
readme=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# extract LANGUAGE FILE: the text between the first ```LANGUAGE line and the next ``` line.
extract() {
  awk -v fence="\`\`\`$1" '$0 == fence && !seen { inside = seen = 1; next }
                           inside && /^```/ { inside = 0; ended = 1 }
                           inside { print } END { exit !ended }' "$readme" >"$2" ||
    { echo "$readme has no whole \`\`\`$1 block"; exit 1; }
}

run() {
  echo "--- $1"
  shift
  "$@"
}

"${CMAKE:-cmake}" --install "$build" --prefix "$work/staged" >/dev/null
mv "$work/staged" "$work/prefix"  # whoever packages this will move it too
prefix=$work/prefix
lib=$(dirname "$(find "$prefix" -name libscruple.so)")

run "installed command line" "$prefix/bin/scruple" --version

mkdir "$work/consumer"
cp "$here/consumer.cmake" "$work/consumer/CMakeLists.txt"
extract cpp "$work/consumer/example.cpp"
"${CMAKE:-cmake}" -S "$work/consumer" -B "$work/consumer/build" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
"${CMAKE:-cmake}" --build "$work/consumer/build" >/dev/null
run "README's C++ program by find_package" "$work/consumer/build/example"

extract c "$work/example.c"
compile=("${CC:-cc}" -std=c99 -Wall -Wextra -Wpedantic -Werror)
read -ra flags <<<"${CFLAGS:-}"
read -ra packaged <<<"$(PKG_CONFIG_PATH=$lib/pkgconfig pkg-config --cflags --libs scruple)"
"${compile[@]}" "${flags[@]}" "$work/example.c" "${packaged[@]}" -o "$work/by_pkg_config"
run "README's C program by pkg-config" env LD_LIBRARY_PATH="$lib" "$work/by_pkg_config"

"${compile[@]}" "${flags[@]}" -I"$prefix/include" "$work/example.c" -L"$lib" -lscruple -o "$work/by_library"
run "README's C program by the plain library" env LD_LIBRARY_PATH="$lib" "$work/by_library"
