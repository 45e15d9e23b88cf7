#include "train/cuda/recording.h"

namespace scruple::train::cuda {

void Recording::begin() {
  clear();
  running_ = true;
  begin_part();
}

void Recording::begin_part() {
  check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "recording a graph");
}

void Recording::end_part(SinkCall how, std::span<const scruple_piece> pieces) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream_, &graph), "recording a graph");
  cudaGraphExec_t ready = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&ready, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "making a graph");
  parts_->push_back({ready, how, {pieces.begin(), pieces.end()}});
  check(cudaGraphLaunch(ready, stream_), "launching a graph");
}

void Recording::deliver(Sink& sink, SinkCall how, std::span<const scruple_piece> pieces) const {
  for (const scruple_piece& piece : pieces)
    if (copies_ != nullptr) copies_->before_step(static_cast<std::size_t>(piece.tensor));
  (sink.*how)(pieces);
}

void Recording::hand(Sink& sink, SinkCall how, std::span<const scruple_piece> pieces) {
  end_part(how, pieces);
  deliver(sink, how, pieces);
  begin_part();
}

void Recording::finish() {
  end_part(nullptr, {});
  running_ = false;
}

void Recording::cancel() noexcept {
  // A sink that refuses does so between two graphs, when nothing is captured.
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream_, &status);
  cudaGraph_t graph = nullptr;
  if (status != cudaStreamCaptureStatusNone && cudaStreamEndCapture(stream_, &graph) == cudaSuccess)
    cudaGraphDestroy(graph);
  cudaGetLastError();
  running_ = false;
  clear();
}

void Recording::clear() noexcept {
  for (const Part& part : *parts_) cudaGraphExecDestroy(part.graph);
  parts_->clear();
}

void Recording::replay(Sink& sink) const {
  for (const Part& part : *parts_) {
    check(cudaGraphLaunch(part.graph, stream_), "launching a graph");
    if (part.how != nullptr) deliver(sink, part.how, part.pieces);
  }
}

}  // namespace scruple::train::cuda
