// Checkpoints that are written while training goes on: from copies that a device makes as late as it may, on a disk that is
// slow, full, or outlives the process. The device is the CPU with copies beside it; the GPU's are in cuda_runs_test.cpp.
#include "train/run/saves.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "tests/failing_disk.h"
#include "tests/files.h"
#include "tests/jobs.h"
#include "tests/support.h"

namespace scruple::train {
namespace {

using namespace std::chrono_literals;

// Nothing is copied before it must be: when a step would change it, or when no step has come for a while.
class LateCopies final : public Copies {
 public:
  Memory& memory() override { return host_memory(); }
  void take(std::span<const Plane> planes) override {
    const std::lock_guard lock(mutex_);
    planes_.assign(planes.begin(), planes.end());
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    if (!came_.wait_for(lock, 100ms, [&] { return planes_.empty(); })) copy();
  }
  void before_step(std::size_t) override { before_steps(); }
  void before_steps() override {
    const std::lock_guard lock(mutex_);
    copy();
    came_.notify_all();
  }

 private:
  void copy() {
    for (const Plane& plane : planes_)
      std::memcpy(plane.to, plane.from, static_cast<std::size_t>(plane.bytes));
    planes_.clear();
  }
  std::mutex mutex_;
  std::condition_variable came_;
  std::vector<Plane> planes_;
};

class WithCopies final : public Backend {
 public:
  Engine& engine() override { return cpu_->engine(); }
  Memory& memory() override { return cpu_->memory(); }
  Copies* copies() override { return &copies_; }
  std::int64_t released_bytes(const std::vector<Parameter>& parameters, Precision type) const override {
    return cpu_->released_bytes(parameters, type);
  }
  std::unique_ptr<Network> network(const Setup& setup, Visible weights, scruple_policy policy,
                                   Ledger& ledger) override {
    return cpu_->network(setup, weights, policy, ledger);
  }
  std::unique_ptr<Generator> generator(const Description&, Visible, Ledger&) override { return nullptr; }
  std::string device() const override { return "CPU, with copies"; }

 private:
  std::unique_ptr<Backend> cpu_ = cpu_backend(1);
  LateCopies copies_;
};

Job job_of(scruple_policy policy = SCRUPLE_STORED, double ema = 0) {
  Job job = job_of(gpt2({1, 32, 2, 16, 256}), 2, "scruple", 1e-2);
  job.threads = 1;
  job.backend = [](int) -> std::unique_ptr<Backend> { return std::make_unique<WithCopies>(); };
  job.gradients.policy = policy;
  job.gradients.micro_batches = policy == SCRUPLE_COMPRESSED ? 2 : 1;
  job.ema = ema;
  return job;
}

struct Session {
  explicit Session(const std::string& run, const Job& job = job_of(), const io::Checkpoint* from = nullptr,
                   std::int64_t room = 1 << 30)
      : training(job, from, Ledger::kNoLimit, room),
        saves(training, "scruple", run, 2, [this](const auto& words) { warnings.push_back(words); }) {}
  void step() {
    training.step();
    saves.add_step(1);
  }
  Training training;
  std::vector<std::string> warnings;
  Saves saves;
};

class SavesTest : public scruple_tests::Files {
 protected:
  ~SavesTest() override { plan = {}; }
  std::string checkpoint(const std::string& run, std::int64_t step) const {
    return path(run) + "/checkpoints/" + io::step_name(step);
  }
  std::string bytes_of(const std::string& run, std::int64_t step) const {
    const std::string folder = run + "/checkpoints/" + io::step_name(step);
    return content(folder + "/manifest.json") + content(folder + "/model.safetensors");
  }
  std::size_t partial(const std::string& run) const {
    std::size_t count = 0;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(path(run) + "/checkpoints", ignored))
      count += entry.path().filename().string().find(io::kPartialName) != std::string::npos ? 1 : 0;
    return count;
  }
};

TEST_F(SavesTest, TheBytesAreThoseOfASaveThatTrainingWaitsFor) {
  for (const auto& [policy, ema] : {std::pair(SCRUPLE_STORED, 0.0), std::pair(SCRUPLE_COMPRESSED, 0.9)}) {
    const std::string beside = "beside" + std::to_string(policy), waited = "waited" + std::to_string(policy);
    Session a(path(beside), job_of(policy, ema));
    Training b(job_of(policy, ema));
    for (int step = 1; step <= 5; ++step) {
      a.step(), b.step();
      if (step == 1 || step == 3) continue;
      a.saves.save({{"note", "one"}}, step < 5);
      EXPECT_EQ(a.saves.is_writing(), step < 5);
      save(b, "scruple", {{"note", "one"}}, path(waited), 2);
    }
    for (const std::int64_t step : {4, 5})
      EXPECT_TRUE(bytes_of(beside, step) == bytes_of(waited, step)) << step;
    for (const std::int64_t step : {2, 4, 5}) {
      const std::optional<Saved> ended = a.saves.ended();
      ASSERT_TRUE(ended);
      EXPECT_EQ(ended->step, step);
      EXPECT_EQ(ended->problem, "");
      EXPECT_GT(ended->bytes, 0);
    }
    EXPECT_FALSE(a.saves.ended());
    EXPECT_TRUE(a.warnings.empty());
    const io::Checkpoint from(checkpoint(beside, 4));
    Training c(job_of(policy, ema), &from);
    c.step();
    EXPECT_TRUE(c.planes() == b.planes()) << "it goes on to the bit";
  }
}

TEST_F(SavesTest, ASlowDiskHoldsOneSaveAtATime) {
  std::mutex gate;
  Session a(path("run"));
  plan.armed = true, plan.target = -1;
  plan.before_write = [&] { const std::lock_guard wait(gate); };
  std::unique_lock closed(gate);
  a.step();
  a.saves.save({}, true);
  for (int i = 0; i < 3; ++i) a.step();
  EXPECT_TRUE(a.saves.is_writing()) << "training goes on meanwhile";
  EXPECT_FALSE(a.saves.ended());
  const std::int64_t bytes = a.training.counted.host_peak();
  EXPECT_GT(bytes, 0);
  std::thread second([&] { a.saves.save({}, true); });
  while (partial("run") == 0) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(partial("run"), 1u) << "the second waits for the first";
  EXPECT_TRUE(io::saved_steps(path("run/checkpoints")).empty());
  closed.unlock();
  second.join();
  a.step();
  a.saves.wait();
  EXPECT_EQ(io::saved_steps(path("run/checkpoints")), (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(a.training.counted.host_peak(), bytes) << "the copies' memory is taken once";
  const Saved first = a.saves.ended().value(), then = a.saves.ended().value();
  EXPECT_GT(then.waited, 0);
  EXPECT_GE(first.seconds, 0.2);
  EXPECT_LT(first.waited, first.seconds);
}

TEST_F(SavesTest, AFullDiskIsToldAndNothingOlderIsLost) {
  bool reached = true;
  for (int target = 0; reached; ++target) {
    std::filesystem::remove_all(path("run"));
    Session a(path("run"));
    a.step();
    a.saves.save({}, true);
    a.step();
    a.saves.wait();
    ASSERT_EQ(a.saves.ended().value().problem, "");
    plan = {true, Failure::error, ENOSPC, target, 0, {}};
    a.saves.save({}, true);
    a.step();
    a.saves.wait();
    plan.armed = false;
    reached = plan.calls > plan.target;
    const Saved saved = a.saves.ended().value();
    EXPECT_EQ(saved.step, 2);
    if (saved.problem.empty()) {
      EXPECT_NO_THROW(io::Checkpoint(checkpoint("run", 2)));
    } else {
      EXPECT_TRUE(reached) << saved.problem;
      EXPECT_NO_THROW(io::Checkpoint(checkpoint("run", 1)));
      EXPECT_NE(saved.problem.find("No space left on device"), std::string::npos) << saved.problem;
    }
    a.saves.save({}, true);
    a.step();
    a.saves.wait();
    EXPECT_EQ(a.saves.ended().value().problem, "") << "there is room again";
    EXPECT_NO_THROW(io::Checkpoint(checkpoint("run", 3)));
    EXPECT_TRUE(reached || target > 10) << "the plan sees no calls";
  }
}

// A run of six steps that saves after every second one, and is killed at a call to the disk.
TEST_F(SavesTest, AKillLosesNothingThatWasSaved) {
  const auto train = [&](const std::string& run, const io::Checkpoint* from) {
    Session a(path(run), job_of(), from);
    while (a.training.steps_taken() < 6) {
      a.step();
      if (a.training.steps_taken() % 2 == 0) a.saves.save({}, a.training.steps_taken() < 6);
    }
  };
  const auto in_a_child = [](const auto& act) {
    const pid_t child = fork();
    if (child == 0) {
      act();
      _exit(0);
    }
    int state = 0;
    EXPECT_EQ(waitpid(child, &state, 0), child);
    return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
  };
  if (scruple_tests::kThreadSanitizer) GTEST_SKIP() << "it wants no threads in a forked process";
  text(16);  // once, and not in every child
  ASSERT_EQ(in_a_child([&] { train("whole", nullptr); }), 0);
  int in_a_save = 0, status = kKilled;
  bool was_saved = false;
  for (int target = 0; status == kKilled; ++target) {
    std::filesystem::remove_all(path("run"));
    status = in_a_child([&] {
      plan = {true, Failure::kill_before, 0, target, 0, {}};
      train("run", nullptr);
    });
    ASSERT_TRUE(status == 0 || status == kKilled) << status;
    in_a_save += partial("run") > 0 ? 1 : 0;
    io::remove_partial(path("run/checkpoints"), "step-");
    const std::vector<std::int64_t> steps = io::saved_steps(path("run/checkpoints"));
    ASSERT_TRUE(!steps.empty() || !was_saved) << "a kill one call earlier left a checkpoint, " << target;
    was_saved = !steps.empty();
    ASSERT_EQ(in_a_child([&] {
                if (steps.empty()) return train("run", nullptr);
                const io::Checkpoint from(checkpoint("run", steps.back()));
                for (const io::TensorState& tensor : from.manifest().tensors)
                  for (const io::Array& array : tensor.arrays)
                    for (const io::Plane& plane : array.planes) from.verify(tensor, array, plane);
                train("run", &from);
              }),
              0)
        << target;
    ASSERT_TRUE(bytes_of("run", 6) == bytes_of("whole", 6)) << target;
    ASSERT_EQ(partial("run"), 0u);
  }
  EXPECT_GT(in_a_save, 20);
}

TEST_F(SavesTest, WithoutTheMemoryTrainingWaitsAndIsToldOnce) {
  Session a(path("run"), job_of(), nullptr, 1000);
  for (int i = 0; i < 2; ++i) {
    a.step();
    a.saves.save({}, true);
    EXPECT_FALSE(a.saves.is_writing());
    EXPECT_EQ(a.saves.ended().value().problem, "");
  }
  ASSERT_EQ(a.warnings.size(), 1u);
  EXPECT_NE(a.warnings[0].find("training waits"), std::string::npos) << a.warnings[0];
  EXPECT_EQ(a.training.counted.host_peak(), 0);
  EXPECT_EQ(io::saved_steps(path("run/checkpoints")), (std::vector<std::int64_t>{1, 2}));
}

TEST_F(SavesTest, AThirdMoreThanTheCopiesMustBeFree) {
  std::int64_t bytes = 0;
  const auto is_waited_for = [&](std::int64_t room) {
    Session a(path("run"), job_of(), nullptr, room);
    a.step();
    a.saves.save({}, true);
    a.step();
    a.saves.wait();
    bytes = a.training.counted.host_peak();
    return !a.warnings.empty();
  };
  EXPECT_FALSE(is_waited_for(1 << 30));
  const std::int64_t enough = bytes / 3 * 4;
  EXPECT_FALSE(is_waited_for(enough));
  EXPECT_TRUE(is_waited_for(enough - 1));
}

TEST_F(SavesTest, TheMemoryMayBeTakenBefore) {
  for (const std::int64_t room : {std::int64_t{1} << 30, std::int64_t{1000}}) {
    Session a(path("run" + std::to_string(room)), job_of(), nullptr, room);
    a.step();
    a.saves.prepare();
    a.saves.prepare();
    EXPECT_TRUE(a.warnings.empty()) << "nothing is saved yet";
    a.step();
    a.saves.save({}, true);
    EXPECT_EQ(a.warnings.empty(), room > 1000);
    EXPECT_EQ(a.saves.is_writing(), room > 1000);
    a.step();
    a.saves.wait();
    EXPECT_EQ(a.saves.ended().value().problem, "");
  }
}

TEST_F(SavesTest, ALongerStepHasWaited) {
  Session a(path("run"));
  for (int i = 0; i < 5; ++i) a.step();
  a.saves.save({}, true);
  a.training.step();
  a.saves.add_step(1.75);
  a.saves.wait();
  EXPECT_GE(a.saves.ended().value().waited, 0.75);
}

// A save that turns out to have failed when the run ends is made again, though no step came after it.
TEST_F(SavesTest, TheLastSaveIsTriedAgain) {
  for (const bool fails : {false, true}) {
    Training training(job_of());
    std::vector<std::size_t> saved;
    Span span = {.steps = 4, .validate_every = 100, .validation_windows = 1};
    span.save_every = 2;
    span.go_on = [&] { return saved.empty(); };  // it is stopped right after the first
    span.saves_end = [&] { return !fails; };
    run(
        training, text(16), text(16), span, [](const Record&) {},
        [&](const Record& record) {
          saved.push_back(record.steps.size());
          return true;
        });
    EXPECT_EQ(saved, fails ? (std::vector<std::size_t>{2, 2}) : (std::vector<std::size_t>{2}));
  }
}

}  // namespace
}  // namespace scruple::train
