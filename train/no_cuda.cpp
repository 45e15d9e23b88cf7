// A build without CUDA: there is no such backend, and whoever asks for it learns how to get one.
#include <stdexcept>

#include "train/backend.h"

namespace scruple::train {

std::unique_ptr<Backend> cuda_backend(int) {
  throw std::runtime_error(
      "this build has no trainer for GPUs; build it where a GPU and a CUDA toolkit with cuBLAS are (make "
      "build), or train with --device cpu");
}

bool has_cuda() { return false; }

}  // namespace scruple::train
