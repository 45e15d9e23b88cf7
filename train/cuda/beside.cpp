#include "train/cuda/beside.h"

namespace scruple::train::cuda {

Beside::Beside(const Stream& stream, Engine* engine) : stream_(stream), engine_(engine) {
  if (is_there()) reached_ = new_event(), done_ = new_event();
}

Beside::~Beside() {
  for (const cudaEvent_t event : {reached_, done_})
    if (event != nullptr) cudaEventDestroy(event);
}

void Beside::run(const std::function<void()>& queue) {
  if (!is_there()) return queue();
  check(cudaEventRecord(reached_, stream_), "stepping beside a pass");
  check(cudaStreamWaitEvent(second_, reached_), "stepping beside a pass");
  engine_->set_stream(second_);
  try {
    queue();
  } catch (...) {
    come_back();
    throw;
  }
  come_back();
}

void Beside::come_back() {
  engine_->set_stream(stream_);
  check(cudaEventRecord(done_, second_), "stepping beside a pass");
}

void Beside::join() const {
  if (is_there()) check(cudaStreamWaitEvent(stream_, done_), "waiting for steps");
}

}  // namespace scruple::train::cuda
