// A build without CUDA: there is no such backend, and whoever asks for it learns how to get one.
#include <stdexcept>

#include "train/pass/backend.h"

namespace scruple::train {

std::unique_ptr<Backend> cuda_backend(int) {
  throw std::runtime_error(
      "this build has no trainer for GPUs; build one where a CUDA toolkit with cuBLAS is (make build for the "
      "GPU that is there, make build CUDA=ON for all), or use --device cpu");
}

bool has_cuda() { return false; }

}  // namespace scruple::train
