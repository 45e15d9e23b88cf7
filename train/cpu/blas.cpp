#include "train/cpu/blas.h"

#include <cblas.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <sstream>

namespace scruple::train {
namespace {

CBLAS_TRANSPOSE order_of(const Factor& factor) { return factor.is_transposed ? CblasTrans : CblasNoTrans; }
int narrow(Index size) { return static_cast<int>(size); }  // problem_with() bounds every size

// A threaded OpenBLAS divides a product by the number of processors, and so changes its bits. Called once per
// thread, because OpenMP builds keep the setting per thread.
bool be_serial() {
  openblas_set_num_threads(1);
  return true;
}

// A lock for builds of OpenBLAS without threads, such as Debian's libopenblas-serial. They may not lock their
// table of buffers: two calls at a time can get the same one, and then about one product in a million is
// wrong.
std::unique_lock<std::mutex> rope() {
  static std::mutex mutex;
  static const bool unlocked = openblas_get_parallel() == 0;
  return unlocked ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

constexpr std::size_t kBufferBytes = std::size_t{32} << 20;  // what Debian's builds ask for

}  // namespace

void reserve_buffers(int threads) {
  const std::size_t bytes = kBufferBytes * static_cast<std::size_t>(threads);
  constexpr int kHow = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;  // a limit on addresses is what matters
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kHow, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  munmap(memory, bytes);
}

std::string products_by() {
  std::istringstream config(openblas_get_config());  // "OpenBLAS 0.3.21 NO_AFFINITY..."
  std::string name, version;
  config >> name >> version;
  return name + " " + version + " for " + openblas_get_corename();
}

void product(Index m, Index n, Index k, float alpha, Factor a, Factor b, float beta, Target c) {
  thread_local const bool serial = be_serial();
  (void)serial;
  const auto lock = rope();
  cblas_sgemm(CblasRowMajor, order_of(a), order_of(b), narrow(m), narrow(n), narrow(k), alpha, a.view.data,
              narrow(a.view.stride), b.view.data, narrow(b.view.stride), beta, c.data, narrow(c.stride));
}

}  // namespace scruple::train
