// train/pass/guard.h on the GPU: kernels of one thread, which the host does not wait for.
#pragma once

#include <cuda_runtime_api.h>

#include "train/pass/guard.h"

namespace scruple::train::cuda {

// The loss is *loss_sum times *share, and the share has the weight of the micro-batch.
void judge_loss(Guard* guard, const double* loss_sum, const float* share, cudaStream_t stream);
void judge_step(Guard* guard, double* sum_squares, const float* loss_scale, cudaStream_t stream);

}  // namespace scruple::train::cuda
