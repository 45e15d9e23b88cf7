#!/usr/bin/env bash
# Installs the build, moves the installed tree, and uses it as others would: its command line, and consume.sh.
# Usage: install_test.sh BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${CMAKE:-cmake}" --install "$1" --prefix "$work/staged" >/dev/null
mv "$work/staged" "$work/prefix"  # whoever packages this will move it too
echo "--- installed command line"
"$work/prefix/bin/scruple" --version
"$here/consume.sh" "$work/prefix"
