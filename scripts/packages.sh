#!/usr/bin/env bash
# Installs the Debian packages that a target of the Makefile needs and that are missing; does nothing, and
# needs no network, when all are there. Usage: packages.sh build|test|docs|format|tidy|wheel
set -euo pipefail

build="g++ cmake make pkg-config libcli11-dev nlohmann-json3-dev libopenblas-pthread-dev libpcre2-dev libutf8proc-dev"
case "${1:-}" in
  build) wanted="$build" ;;
  test) wanted="$build libgtest-dev clang clang-format python3 python3-venv chromium" ;;
  docs) wanted="make python3 python3-venv" ;;
  format) wanted="clang-format" ;;
  tidy) wanted="$build libgtest-dev clang-tidy" ;;
  wheel)
    wanted="g++ cmake make python3 python3-venv libcli11-dev nlohmann-json3-dev"
    # An older libstdc++ serves more systems (scripts/wheel.sh).
    if apt-cache show g++-11 >/dev/null 2>&1; then wanted="$wanted g++-11"; fi ;;
  *) echo "usage: $0 build|test|docs|format|tidy|wheel" >&2; exit 2 ;;
esac

has_header() { [ -e "/usr/include/$1" ] || [ -e "/usr/local/include/$1" ]; }

# What counts is the program or the header, wherever it came from.
present() {
  case "$1" in
    libcli11-dev) has_header CLI/CLI.hpp ;;
    nlohmann-json3-dev) has_header nlohmann/json.hpp ;;
    libgtest-dev) has_header gtest/gtest.h ;;
    libpcre2-dev) has_header pcre2.h ;;
    libutf8proc-dev) has_header utf8proc.h ;;
    libopenblas-pthread-dev) ls /usr/lib/*/openblas-pthread/libopenblas.so >/dev/null 2>&1 ||
      [ -e /usr/local/lib/libopenblas.so ] ;;
    python3-venv) python3 -c "import ensurepip" 2>/dev/null ;;
    clang) command -v clang++ >/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing=""
for package in $wanted; do present "$package" || missing="$missing $package"; done
[ -z "$missing" ] && exit 0

become_root=""
if [ "$(id -u)" != 0 ]; then become_root=$(command -v sudo || true); fi
if ! command -v apt-get >/dev/null || { [ "$(id -u)" != 0 ] && [ -z "$become_root" ]; }; then
  echo "This step needs, by their Debian names:$missing" >&2
  echo "They cannot be installed from here: there is no apt-get, or no right to use it." >&2
  for tool in cmake make; do command -v $tool >/dev/null || exit 1; done
  echo "Going on with what there is." >&2
  exit 0
fi
echo "Installing:$missing"
$become_root apt-get -qq update
# shellcheck disable=SC2086 # a list of words, and a prefix that may be empty
$become_root env DEBIAN_FRONTEND=noninteractive \
  apt-get -qq install -y --no-install-recommends $missing >/dev/null
