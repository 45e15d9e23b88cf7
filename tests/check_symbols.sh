#!/bin/sh
# The library exports exactly the functions of tests/symbols.txt, and scruple.h declares exactly those.
# usage: check_symbols.sh LIBRARY
# A new function of the ABI: add its name to symbols.txt. One that goes away or changes: SCRUPLE_ABI_VERSION.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
library=${1:?usage: check_symbols.sh LIBRARY}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

LC_ALL=C sort -u "$here/symbols.txt" > "$work/listed"
nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
  LC_ALL=C sort -u > "$work/exported"
tr '\n' ' ' < "$here/../include/scruple/scruple.h" | grep -o 'SCRUPLE_API [^;#]*(' |
  sed 's/(.*//; s/.*[ *]//' | grep '^scruple_' | LC_ALL=C sort -u > "$work/declared"

status=0
for found in exported declared; do
  if ! diff -u "$work/listed" "$work/$found"; then
    echo "tests/symbols.txt (-) and what is $found (+) differ"
    status=1
  fi
done
exit $status
