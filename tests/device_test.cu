// What CUDA's errors become; needs no GPU.
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "train/cuda/device.h"

namespace scruple::train::cuda {
namespace {

std::string words_of(cudaError_t error) {
  try {
    check(error, "making a stream");
  } catch (const std::runtime_error& thrown) {
    return thrown.what();
  }
  return "nothing was thrown";
}

TEST(Device, ErrorsBlameWhatCanBeTheCause) {
  for (const cudaError_t error :
       {cudaErrorNoDevice, cudaErrorInvalidDevice, cudaErrorDevicesUnavailable,
        cudaErrorNoKernelImageForDevice, cudaErrorInitializationError, cudaErrorInsufficientDriver,
        cudaErrorCallRequiresNewerDriver, cudaErrorUnsupportedPtxVersion, cudaErrorStubLibrary,
        cudaErrorCompatNotSupportedOnDevice, cudaErrorSystemDriverMismatch, cudaErrorSystemNotReady}) {
    EXPECT_EQ(words_of(error).find("queued"), std::string::npos) << words_of(error);
    EXPECT_NE(words_of(error).find("--device cpu"), std::string::npos) << words_of(error);
  }
  for (const cudaError_t error : {cudaErrorIllegalAddress, cudaErrorLaunchFailure})
    EXPECT_NE(words_of(error).find("it may come from work queued earlier"), std::string::npos)
        << words_of(error);
  EXPECT_EQ(words_of(cudaErrorNoDevice).find("making a stream: CUDA says cudaErrorNoDevice, "), 0u);
  EXPECT_THROW(check(cudaErrorMemoryAllocation, "taking memory"), std::bad_alloc);
  EXPECT_NO_THROW(check(cudaSuccess, "nothing"));
}

}  // namespace
}  // namespace scruple::train::cuda
