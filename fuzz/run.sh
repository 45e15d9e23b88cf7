#!/usr/bin/env bash
# Builds the fuzz targets with libFuzzer and the sanitizers and runs them from corpora of good files.
# usage: fuzz/run.sh BUILD_FOLDER [SECONDS [TARGET...]]; the targets share the seconds: chat, checkpoint, config, jsonl,
# tokenizer, tokens.
# Skips (77) where there is no clang++ with libFuzzer.
set -euo pipefail
source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(mkdir -p "$1" && cd "$1" && pwd) seconds=${2:-10}
targets=("${@:3}")
if [ ${#targets[@]} -eq 0 ]; then targets=(chat checkpoint config jsonl tokenizer tokens); fi
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
    chat)
      printf '{%%- for m in messages %%}<{{ m.role }}>{{ m["content"] | trim ~ eos_token }}{%% endfor -%%}{%% if tools is defined %%}{{ tools | tojson(indent=2) }}{%% endif %%}\0{"messages": [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b"}], "tools": [{"a": [1, 2.5, null, true]}]}' >"$corpus/chat"
      printf '{%% macro f(x, y=1) %%}{{ x[::-1] }}{{ y // 2 }}{%% endmacro %%}{%% set ns = namespace(a=[]) %%}{%% for k, v in {"a": 1}.items() if v is odd %%}{%% set ns.a = ns.a + [k] %%}{{ loop.index }}{{ f("ab") }}{%% generation %%}{{ messages[-1].content.split("b")[0] }}{%% endgeneration %%}{%% else %%}{%% break %%}{%% endfor %%}\0{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}' >"$corpus/set" ;;
    checkpoint) SCRUPLE_FUZZ_SEEDS=$corpus "$build/fuzz_checkpoint" ;;
    config)
      printf '{"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 256, "n_inner": null}' >"$corpus/gpt2"
      for family in llama mistral qwen2 qwen3 gemma gemma2; do
        printf '{"model_type": "%s", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 256, "max_position_embeddings": 64, "hidden_act": "silu", "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}' "$family" >"$corpus/$family"
      done
      printf '{"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}' >"$corpus/index" ;;
    jsonl)
      printf '{"text": "one"}\n\n{"prompt": "two\\n", "completion": "\\u00e9", "id": [1, {}]}\r\n' >"$corpus/lines"
      printf '\xef\xbb\xbf{"completion": "no newline", "prompt": ""}' >"$corpus/mark"
      printf '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b", "tool_calls": [{"n": 1.5}]}], "tools": []}\n{"conversations": [{"from": "human", "value": "x"}]}' >"$corpus/messages" ;;
    tokenizer)
      for file in "$source_folder"/fuzz/seeds/*.json; do
        { cat "$file" && printf '\0 cab ab  12\n\xc3\xa9<s> cab<|end|>'; } >"$corpus/$(basename "$file" .json)"
      done ;;
    tokens) SCRUPLE_FUZZ_SEEDS=$corpus "$build/fuzz_tokens" ;;
  esac
}

sources_of() {
  echo "fuzz/$1.cpp"
  case $1 in
    checkpoint) echo io/*.cpp ;;
    config) echo train/model/{description,files}.cpp train/model/families/*.cpp train/json_object.cpp io/{file,json}.cpp ;;
    chat | jsonl)
      echo train/text/{bpe,chat,jinja,jinja_filters,jinja_lex,jinja_run,jinja_value,jsonl,pattern,tokenizer,utf8}.cpp \
        train/json_object.cpp io/{file,json}.cpp ;;
    tokenizer) echo train/text/{bpe,pattern,tokenizer,utf8}.cpp train/json_object.cpp io/{file,json}.cpp ;;
    tokens) echo train/text/tokens.cpp io/file.cpp ;;
    *) echo "there is no fuzz target $1; there are chat, checkpoint, config, jsonl, tokenizer and tokens" >&2 && exit 2 ;;
  esac
}

cd "$source_folder"
all=$(for target in "${targets[@]}"; do sources_of "$target"; done)
# Targets share files: each is compiled once.
# shellcheck disable=SC2086 # lists of flags and of files
printf '%s\n' $all | sort -u |
  xargs -P "$(nproc)" -I{} bash -c 'clang++ '"${flags/fuzzer/fuzzer-no-link}"' -I. -c {} -o "$0/$(tr / _ <<<{}).o"' "$build"

for target in "${targets[@]}"; do
  libraries="" more=(-malloc_limit_mb=1)
  case $target in
    checkpoint) more+=(-dict=fuzz/words.dict) ;;
    config) more+=(-dict=fuzz/config.dict) ;;
    jsonl) libraries="-lpcre2-8 -lutf8proc" more+=(-dict=fuzz/jsonl.dict) ;;
    # What a template writes may be longer than it.
    chat) libraries="-lpcre2-8 -lutf8proc" more=(-malloc_limit_mb=256 -dict=fuzz/chat.dict) ;;
    # A regular expression takes more than its text: PCRE2's compiled form, its machine code and its stack.
    tokenizer) libraries="-lpcre2-8 -lutf8proc" more=(-malloc_limit_mb=32 -dict=fuzz/tokenizer.dict) ;;
  esac
  echo "fuzz target $target, $seconds s"
  objects=()
  for source in $(sources_of "$target"); do objects+=("$build/${source//\//_}.o"); done
  # shellcheck disable=SC2086
  clang++ $flags "${objects[@]}" $libraries -o "$build/fuzz_$target"
  seeds "$target"
  # libFuzzer's own code of an error is 77, which would be a skip here.
  # Memory: what a reader takes is a few times the file, and files are at most 16 kB here.
  "$build/fuzz_$target" "$build/corpus_$target" "${more[@]}" -max_total_time="$seconds" -max_len=16384 -rss_limit_mb=1024 \
    -timeout=10 -error_exitcode=1 -print_final_stats=1 -artifact_prefix="$build/$target-"
done
