#!/bin/sh
# Fails where clang-format would change a source file. Versions differ in detail, so only one of them judges;
# others skip (77).
set -eu
cd "$(dirname "$0")/.."
version=14
if ! command -v clang-format > /dev/null || ! clang-format --version | grep -q "version $version"; then
  echo "clang-format $version is not here: $(clang-format --version 2> /dev/null || echo none)"
  exit 77
fi
find include formats optim engine grad io train capi cli bench fuzz tests \( -name '*.h' -o -name '*.hpp' -o -name '*.c' -o -name "*.cpp" -o -name "*.cu" -o -name "*.cuh" \) \
  -exec clang-format --dry-run -Werror {} +
