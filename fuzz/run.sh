#!/usr/bin/env bash
# Builds fuzz/checkpoint.cpp with libFuzzer and the sanitizers and runs it from a corpus of good files.
# usage: fuzz/run.sh BUILD_FOLDER [SECONDS]; skips (77) where there is no clang++ with libFuzzer
set -euo pipefail
source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$1 seconds=${2:-10}
mkdir -p "$build/corpus"
flags="-std=c++20 -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
if ! command -v clang++ >/dev/null ||
  ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ $flags -x c++ - -o "$build/probe" 2>/dev/null; then
  echo "clang++ with libFuzzer is not here"
  exit 77
fi
# shellcheck disable=SC2086 # a list of flags
clang++ $flags -I"$source_folder" "$source_folder"/fuzz/checkpoint.cpp "$source_folder"/io/*.cpp -o "$build/fuzz_checkpoint"

SCRUPLE_FUZZ_SEEDS="$build/corpus" "$build/fuzz_checkpoint"
# Memory: what a reader takes is a few times the file, and files are at most 16 kB here.
"$build/fuzz_checkpoint" "$build/corpus" -dict="$source_folder/fuzz/words.dict" -max_total_time="$seconds" -max_len=16384 \
  -rss_limit_mb=1024 -malloc_limit_mb=1 -timeout=10 -print_final_stats=1 -artifact_prefix="$build/"
