// A GPU as a backend: planes and activations in its memory, weights read where they lie, gradients handed over as they
// are computed.
#include "train/pass/backend.h"

#include "train/cuda/copies.h"
#include "train/cuda/device.h"
#include "train/cuda/engine.h"
#include "train/cuda/outbox.h"
#include "train/cuda/products.h"
#include "train/cuda/transformer.h"

namespace scruple::train {
namespace {

class Gpu final : public Backend {
 public:
  Gpu() : memory_(stream_), copies_(stream_), engine_(stream_) {}
  Engine& engine() override { return *engine_; }
  Memory& memory() override { return memory_; }
  Memory& offload_memory() override { return host_; }
  Copies* copies() override { return &copies_; }
  std::string device() const override { return *engine_, cuda::device_name(); }
  std::string arithmetic() const override { return device() + ", cuBLAS " + cuda::products_version(); }
  double peak_flops() const override { return cuda::peak_flops(device()); }
  std::int64_t free_bytes() override { return *engine_, cuda::free_device_bytes(); }
  std::int64_t released_bytes(const std::vector<Parameter>& parameters,
                              Precision activations) const override {
    return cuda::Outbox::buffer_bytes(parameters, activations);
  }
  std::unique_ptr<Network> network(const Setup& setup, Visible weights, scruple_policy policy,
                                   Ledger& ledger) override {
    return cuda::transformer(setup, weights, policy == SCRUPLE_RELEASED, engine_, stream_, copies_, memory_,
                             ledger);
  }
  std::unique_ptr<Generator> generator(const Description& shape, Visible weights, Ledger& ledger) override {
    return cuda::cached_transformer(shape, weights, engine_, stream_, memory_, ledger);
  }

 private:
  cuda::Stream stream_;
  cuda::DeviceMemory memory_;
  cuda::OffloadMemory host_;
  cuda::PinnedCopies copies_;
  cuda::StreamEngine engine_;
};

}  // namespace

bool has_cuda() {
  try {
    const Engine engine("cuda");
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::unique_ptr<Backend> cuda_backend(int) { return std::make_unique<Gpu>(); }

}  // namespace scruple::train
