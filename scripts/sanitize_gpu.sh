#!/bin/sh
# Runs the GPU tests, in their quick form, under compute-sanitizer: memory, uninitialised reads, races.
# usage: sanitize_gpu.sh FOLDER   (with cuda_test, sink_test, sink_skips_test and, where they are built, the trainer's tests: make test-gpu builds them)
set -u
folder=${1:?usage: sanitize_gpu.sh FOLDER}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Left out: what makes CUDA fail on purpose. Races need shared memory (levels, norms, the rows that warps hold),
# and their check is slow: a few tests alone.
provoking='CudaErrors.*:CudaGraph.ATable*:CudaGraph.Handing*'
sharing='CudaParity.LargeTensors:CudaParity.AThousandTensors:CudaNorm.Equals*:CudaNorm.Tables*:CudaLoop.Measure*'
status=0
check() {  # tool, test, filter
  SCRUPLE_TEST_QUICK=1 SCRUPLE_TEST_ENGINE=cuda compute-sanitizer --tool "$1" --error-exitcode 1 "$folder/$2" \
    --gtest_filter="$3" > "$log" 2>&1 || status=1
  grep -qE "PASSED  \] [1-9]" "$log" || status=1
  echo "$1, $2: $(grep SUMMARY "$log" || tail -1 "$log"); $(grep 'PASSED' "$log" || grep -c 'FAILED' "$log")"
}
for tool in memcheck initcheck; do
  check $tool cuda_test "-$provoking"
  for test in sink_test sink_skips_test; do check $tool $test '*'; done
done
check racecheck cuda_test "$sharing"
# The trainer's kernels, and the trainer on tiny models: of each family in 16 bits, with graphs and copies beside the
# layers; of one for races, which shared memory alone can have: the kernels' own tests show those.
if [ -x "$folder/cuda_trainer_test" ]; then
  for test in attention_test layers_test heads_test; do check memcheck $test '*'; done
  check memcheck cuda_trainer_test '*OddSizes:CudaTrainer.GraphsGive*:*Offloading*'
  check memcheck cuda_runs_test '*ASave*:*Skips*:*Judges*:*Copies*'
  check initcheck cuda_trainer_test '*OddSizes'
  check initcheck trainer_test '*Recomputation*/cuda'
  check racecheck attention_test '*SameBytesTwice'
  for test in layers_test heads_test; do check racecheck $test '*'; done
  check racecheck cuda_trainer_test '*OddSizes'
fi
exit $status
