#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer and the sanitizers and runs them from corpora of good files.
# usage: fuzz/run.sh BUILD_FOLDER [SECONDS [TARGET...]]; the targets share the seconds: checkpoint, jsonl, tokenizer.
# Skips (77) where there is no clang++ with libFuzzer.
set -euo pipefail
source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(mkdir -p "$1" && cd "$1" && pwd) seconds=${2:-10}
targets=("${@:3}")
if [ ${#targets[@]} -eq 0 ]; then targets=(checkpoint jsonl tokenizer); fi
seconds=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))
flags="-std=c++20 -O1 -gline-tables-only -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
if ! command -v clang++ >/dev/null ||
  ! echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ $flags -x c++ - -o "$build/probe" 2>/dev/null; then
  echo "clang++ with libFuzzer is not here"
  exit 77
fi

# Good files to start from, small ones.
seeds() {
  local corpus=$build/corpus_$1
  mkdir -p "$corpus"
  case $1 in
    checkpoint) SCRUPLE_FUZZ_SEEDS=$corpus "$build/fuzz_checkpoint" ;;
    jsonl)
      printf '{"text": "one"}\n\n{"prompt": "two\\n", "completion": "\\u00e9", "id": [1, {}]}\r\n' >"$corpus/lines"
      printf '\xef\xbb\xbf{"completion": "no newline", "prompt": ""}' >"$corpus/mark" ;;
    tokenizer)
      for file in "$source_folder"/fuzz/seeds/*.json; do
        { cat "$file" && printf '\0 cab ab  12\n\xc3\xa9<s> cab<|end|>'; } >"$corpus/$(basename "$file" .json)"
      done ;;
  esac
}

cd "$source_folder"
for target in "${targets[@]}"; do
  sources=() more=(-malloc_limit_mb=1)
  case $target in
    checkpoint) sources=(io/*.cpp) more+=(-dict=fuzz/words.dict) ;;
    jsonl) sources=(train/text/jsonl.cpp train/text/utf8.cpp io/file.cpp io/json.cpp) more+=(-dict=fuzz/jsonl.dict) ;;
    # A regular expression takes more than its text: PCRE2's compiled form, its machine code and its stack.
    tokenizer)
      sources=(train/text/{bpe,json_object,pattern,tokenizer,utf8}.cpp io/file.cpp io/json.cpp -lpcre2-8 -lutf8proc)
      more=(-dict=fuzz/tokenizer.dict -malloc_limit_mb=32) ;;
    *) echo "there is no fuzz target $target; there are checkpoint, jsonl and tokenizer" >&2 && exit 2 ;;
  esac
  echo "fuzz target $target, $seconds s"
  # shellcheck disable=SC2086 # a list of flags
  clang++ $flags -I. "fuzz/$target.cpp" "${sources[@]}" -o "$build/fuzz_$target"
  seeds "$target"
  # Memory: what a reader takes is a few times the file, and files are at most 16 kB here.
  "$build/fuzz_$target" "$build/corpus_$target" "${more[@]}" -max_total_time="$seconds" -max_len=16384 -rss_limit_mb=1024 \
    -timeout=10 -print_final_stats=1 -artifact_prefix="$build/$target-"
done
