#!/bin/sh
# Runs the GPU tests, in their quick form, under compute-sanitizer: memory, uninitialised reads, races.
# usage: sanitize_gpu.sh CUDA_TEST   (make test-gpu builds it)
set -u
test=${1:?usage: sanitize_gpu.sh CUDA_TEST}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Left out: what makes CUDA fail on purpose. Races need shared memory, which only flash8's levels and norms use,
# and their check is slow: those tests alone.
provoking='CudaErrors.*:CudaGraph.ATable*:CudaGraph.Handing*'
sharing='CudaParity.LargeTensors:CudaParity.AThousandTensors:CudaNorm.Equals*:CudaNorm.Tables*:CudaLoop.Measure*'
status=0
for tool in memcheck initcheck racecheck; do
  filter="-$provoking"
  [ $tool = racecheck ] && filter=$sharing
  SCRUPLE_TEST_QUICK=1 SCRUPLE_TEST_ENGINE=cuda compute-sanitizer --tool $tool --error-exitcode 1 "$test" \
    --gtest_filter="$filter" > "$log" 2>&1 || status=1
  echo "$tool: $(grep SUMMARY "$log" || tail -1 "$log"); $(grep 'PASSED' "$log" || grep -c 'FAILED' "$log")"
done
exit $status
