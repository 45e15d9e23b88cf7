#include "engine/threads.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/float_environment.h"

namespace scruple {
struct Threads::Pool {
  explicit Pool(int workers) : owner(getpid()) {
    try {
      for (int i = 0; i < workers; ++i) threads.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~Pool() { stop(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void work() {
    for (i64 i = next.fetch_add(1); i < pieces; i = next.fetch_add(1)) (*piece)(i);
  }

  void serve() {
    const DefaultFloatEnvironment environment;  // a new thread inherits its creator's
    u64 seen = 0;
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return stopping || round != seen; });
      if (stopping) return;
      seen = round;
      lock.unlock();
      work();
      lock.lock();
      if (--busy == 0) done.notify_one();
    }
  }

  void run(i64 count, const std::function<void(i64)>& f) {
    {
      const std::lock_guard lock(mutex);
      piece = &f;
      pieces = count;
      next = 0;
      busy = static_cast<int>(threads.size());
      ++round;
    }
    wake.notify_all();
    work();
    std::unique_lock lock(mutex);
    done.wait(lock, [&] { return busy == 0; });
  }

  const pid_t owner;
  std::vector<std::thread> threads;
  std::mutex mutex, caller;
  std::condition_variable wake, done;
  const std::function<void(i64)>* piece = nullptr;
  i64 pieces = 0;
  std::atomic<i64> next{0};
  int busy = 0;
  u64 round = 0;
  bool stopping = false;
};

Threads::Threads(int count) : count_(count), pool_(std::make_unique<Pool>(count - 1)) {}

Threads::~Threads() {
  if (pool_->owner != getpid()) (void)pool_.release();  // a forked child has the pool but not its threads
}

void Threads::run(i64 pieces, const std::function<void(i64)>& piece) {
  if (pool_->owner != getpid()) {
    auto fresh = std::make_unique<Pool>(count_ - 1);
    (void)pool_.release();
    pool_ = std::move(fresh);
  }
  const std::lock_guard lock(pool_->caller);
  if (pieces == 1 || pool_->threads.empty()) {
    for (i64 i = 0; i < pieces; ++i) piece(i);
  } else if (pieces > 0) {
    pool_->run(pieces, piece);
  }
}

}  // namespace scruple
