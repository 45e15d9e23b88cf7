#include "train/cuda/recording.h"

#include <utility>

namespace scruple::train::cuda {

void Recording::begin() {
  clear();
  running_ = true;
  begin_part();
}

void Recording::begin_part() {
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a graph");
}

void Recording::end_part(Act act) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream_, &graph), "recording a graph");
  cudaGraphExec_t ready = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "making a graph");
  parts_.push_back({ready, std::move(act)});
  check(cudaGraphLaunch(ready, stream_), "launching a graph");
}

void Recording::between(Sink& sink, const Act& act) {
  if (running_) end_part(act);
  act(sink);
  if (running_) begin_part();
}

void Recording::finish() {
  end_part(nullptr);
  running_ = false;
}

void Recording::cancel() noexcept {
  cudaGraph_t graph = nullptr;
  if (running_ && cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
  cudaGetLastError();
  running_ = false;
  clear();
}

void Recording::clear() noexcept {
  for (const Part& part : parts_) cudaGraphExecDestroy(part.graph);
  parts_.clear();
}

void Recording::replay(Sink& sink) const {
  for (const Part& part : parts_) {
    check(cudaGraphLaunch(part.graph, stream_), "launching a graph");
    if (part.act) part.act(sink);
  }
}

}  // namespace scruple::train::cuda
