// A pool of threads that share numbered pieces of work. Which thread takes which piece never matters to the
// result.
#pragma once

#include <functional>
#include <memory>

#include "formats/codec.h"

namespace scruple {

class Threads {
 public:
  explicit Threads(int count);  // the calling thread is one of them
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }
  // Calls piece(0) .. piece(pieces - 1), each once, and returns when all are done. Calls from several threads
  // wait for each other. The pool's threads compute in IEEE's default floating-point environment; the caller
  // sees to its own.
  void run(i64 pieces, const std::function<void(i64)>& piece);

 private:
  struct Pool;
  int count_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace scruple
