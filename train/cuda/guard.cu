#include "train/cuda/guard.h"
#include "train/cuda/lanes.cuh"

namespace scruple::train::cuda {
namespace {

__global__ void loss_judge(Guard* guard, const double* loss_sum, const float* share) {
  train::judge_loss(*guard, *loss_sum * static_cast<double>(*share));
}

__global__ void step_judge(Guard* guard, double* sum_squares, const float* loss_scale) {
  train::judge_step(*guard, *sum_squares, *loss_scale);
}

}  // namespace

void judge_loss(Guard* guard, const double* loss_sum, const float* share, cudaStream_t stream) {
  loss_judge<<<1, 1, 0, stream>>>(guard, loss_sum, share);
  launched("judging a loss");
}

void judge_step(Guard* guard, double* sum_squares, const float* loss_scale, cudaStream_t stream) {
  step_judge<<<1, 1, 0, stream>>>(guard, sum_squares, loss_scale);
  launched("judging a step");
}

}  // namespace scruple::train::cuda
