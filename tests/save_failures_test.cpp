// Saving a checkpoint while the system fails: every call that touches the disk is refused once, cut short once,
// and is once the last that the process makes. Whatever happens, a complete checkpoint is there: the old one or
// the new one. Through both doors: io/ as the trainer calls it, and the C ABI as Python does.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "include/scruple/scruple.h"
#include "io/checkpoint.h"
#include "tests/failing_disk.h"
#include "tests/files.h"

namespace scruple_tests {
namespace {

using namespace scruple::io;

// Two tensors, and planes whose bytes say which save they are of.
Manifest manifest_of(std::int64_t step) {
  Manifest manifest;
  manifest.library = "0.1.0";
  manifest.step = step;
  manifest.groups = {{"sgd", 1, {}}};
  for (const char* name : {"a", "b"}) {
    TensorState tensor;
    tensor.name = name;
    tensor.shape = {300};
    tensor.arrays = {{"weight", "fp32", "nearest", {{"codes", Dtype::f32, {300}, 512, {}}}}};
    manifest.tensors.push_back(tensor);
  }
  return manifest;
}

enum class Door { io, abi };

void check(scruple_status status) {
  if (status != SCRUPLE_OK) throw std::runtime_error(scruple_last_error());
}

void save_by_abi(const std::string& folder, std::int64_t step, const std::string& data) {
  const std::int64_t shape = 300;
  const scruple_checkpoint_array weight = {"weight", "fp32", "nearest", 0, nullptr, 0};
  const scruple_checkpoint_tensor tensors[] = {{"a", &shape, 1, 0, 1, 0, 0, &weight, 1},
                                               {"b", &shape, 1, 0, 1, 0, 0, &weight, 1}};
  const scruple_checkpoint_group group = {"sgd", 1, nullptr, 0};
  scruple_checkpoint_contents contents = {};
  contents.recipe = "";
  contents.step = step;
  contents.groups = &group;
  contents.group_count = 1;
  contents.tensors = tensors;
  contents.tensor_count = 2;
  scruple_checkpoint_writer* writer = nullptr;
  check(scruple_checkpoint_begin(folder.c_str(), &contents, 2, &writer));
  const std::unique_ptr<scruple_checkpoint_writer, void (*)(scruple_checkpoint_writer*)> owner(
      writer, scruple_checkpoint_abandon);
  for (const std::int64_t tensor : {0, 1})
    for (const std::int64_t first : {0, 500}) {
      const std::int64_t bytes = first == 0 ? 500 : 700;
      check(scruple_checkpoint_write(writer, tensor, 0, 0, data.data() + first, bytes));
    }
  check(scruple_checkpoint_commit(writer));
}

void save(const std::string& folder, std::int64_t step, Door door = Door::io) {
  const std::string data(1200, static_cast<char>(step));
  if (door == Door::abi) return save_by_abi(folder, step, data);
  write_checkpoint(folder, manifest_of(step), 2, [&](auto...) { return bytes_of(data); });
}

// The step of a checkpoint all of whose planes are of that step; -1: it is not complete.
std::int64_t complete(const std::string& folder) {
  std::int64_t step = -1;
  const std::string message = message_of([&] {
    const Checkpoint checkpoint(folder);
    for (const TensorState& tensor : checkpoint.manifest().tensors) {
      std::string data(1200, '\0');
      const Array& weight = tensor.arrays[0];
      checkpoint.read(tensor, weight, weight.planes[0], std::as_writable_bytes(std::span(data)));
      if (data != std::string(1200, static_cast<char>(checkpoint.manifest().step))) return;
    }
    step = checkpoint.manifest().step;
  });
  return step;
}

struct Trial {
  Failure failure;
  int error;
  const char* what;
};
constexpr Trial kTrials[] = {{Failure::error, ENOSPC, "disk full"},
                             {Failure::error, EIO, "disk error"},
                             {Failure::error, EACCES, "no permission"},
                             {Failure::short_write, 0, "short write"},
                             {Failure::short_then_full, ENOSPC, "short write, then disk full"}};

class Saving : public Files, public testing::WithParamInterface<Door> {
 protected:
  // Saves step 2 with the plan; the message, or "no error".
  static std::string attempt(const std::string& folder, const Trial& trial, int target) {
    plan = {true, trial.failure, trial.error, target, 0, {}};
    const std::string message = message_of([&] { save(folder, 2, GetParam()); });
    plan.armed = false;
    return message;
  }
  // A folder with step 1 in "old", and nothing in "new".
  void begin() const {
    std::filesystem::remove_all(path("old"));
    std::filesystem::remove_all(path("new"));
    save(path("old"), 1);
  }
  // What is found under the name that step 2 was saved to: it, or what was there before.
  std::int64_t old_or_new(const std::string& to, const std::string& what) const {
    const std::int64_t found = complete(to);
    if (to == path("old")) {
      EXPECT_TRUE(found == 1 || found == 2) << what;
    } else {
      EXPECT_EQ(complete(path("old")), 1) << what;
      EXPECT_TRUE(found == 2 || !std::filesystem::exists(to)) << what;
    }
    return found;
  }
};

// `beside`: the new checkpoint gets a name of its own, as in a run; otherwise it takes the old one's.
TEST_P(Saving, OldOrNewWhateverFails) {
  for (const bool beside : {false, true})
    for (const Trial& trial : kTrials) {
      bool reached = true;
      for (int target = 0; reached; ++target) {
        begin();
        const std::string to = path(beside ? "new" : "old");
        const std::string message = attempt(to, trial, target);
        reached = plan.calls > plan.target;
        const std::string what = std::string(trial.what) + " at call " + std::to_string(target) + ": " +
                                 (reached ? plan.trace[static_cast<std::size_t>(target)] : "none") + "\n" +
                                 message;
        const std::int64_t found = old_or_new(to, what);
        ASSERT_FALSE(HasFailure());
        // A removal that fails leaves what it could not remove; nothing else leaves anything.
        const bool excused = !reached ||
                             plan.trace[static_cast<std::size_t>(plan.target)].starts_with("unlink") ||
                             message.find("the one before is in") != message.npos;
        ASSERT_TRUE(excused || files() == (beside && found == 2 ? 2u : 1u)) << what;
        remove_partial(folder_);
        if (message == "no error") {
          ASSERT_EQ(found, 2) << what;
        } else if (plan.trace[static_cast<std::size_t>(plan.target)].starts_with("exchange")) {
          ASSERT_NE(message.find("in one step"), message.npos) << what;
        } else {
          ASSERT_NE(message.find(path("")), message.npos) << "names no file: " << what;
        }
        if (!reached) {
          ASSERT_EQ(message, "no error") << what;
          ASSERT_GT(target, 20) << "the plan sees no calls";
        }
      }
      EXPECT_EQ(saved_steps(folder_).size(), 0u);
    }
}

TEST_P(Saving, OldOrNewWheneverKilled) {
  for (const bool beside : {false, true})
    for (const Failure failure : {Failure::kill_before, Failure::kill_after}) {
      int status = kKilled;
      for (int target = 0; status == kKilled; ++target) {
        begin();
        const std::string to = path(beside ? "new" : "old");
        const pid_t child = fork();
        if (child == 0) _exit(attempt(to, {failure, 0, ""}, target) == "no error" ? 0 : 1);
        int state = 0;
        ASSERT_EQ(waitpid(child, &state, 0), child);
        status = WEXITSTATUS(state);
        ASSERT_TRUE(status == 0 || status == kKilled) << status;
        const std::int64_t found = old_or_new(to, std::to_string(target));
        ASSERT_FALSE(HasFailure());
        ASSERT_TRUE(status != 0 || found == 2);
        remove_partial(folder_);
        ASSERT_EQ(files(), found == 2 && beside ? 2u : 1u) << "what a kill leaves is found and removed";
      }
    }
}

// Against a loss of power: a name may last longer than what it names, unless that was flushed before.
TEST_P(Saving, EverythingIsFlushedBeforeItIsNamed) {
  save(path("c"), 1);
  attempt(path("c"), {Failure::none, 0, ""}, -1);
  std::map<std::string, bool> dirty;
  bool named = false, lasting = false, removed = false;
  std::string partial;
  for (const std::string& call : plan.trace) {
    const std::string verb = call.substr(0, call.find(' ')), rest = call.substr(call.find(' ') + 1);
    if (verb == "mkdir") partial = rest;
    if (verb == "write") dirty[rest] = dirty[partial] = true;
    if (verb == "fsync") dirty[rest] = false;
    if (verb == "fsync" && named && rest == folder_) lasting = true;
    if (verb == "rename" && rest.starts_with(partial + "/")) {
      EXPECT_FALSE(dirty[rest.substr(0, rest.find(' '))]) << call;
      dirty[partial] = true;
    }
    if (verb == "exchange") {
      named = true;
      for (const auto& [path, is_dirty] : dirty) EXPECT_FALSE(is_dirty) << path << " before " << call;
    }
    EXPECT_TRUE(verb != "unlink" || lasting) << "the old one goes before the new one lasts";
    removed = removed || verb == "unlink";
  }
  EXPECT_TRUE(named && lasting && removed);
}

// ---- What is left behind ----

// A process that is killed while it writes the folder.
void leave_behind(const std::string& folder) {
  const pid_t child = fork();
  if (child == 0) {
    const NewFolder begun(folder);
    write_text(begun.partial() + "/model.safetensors", "half");
    _exit(kKilled);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  ASSERT_EQ(WEXITSTATUS(state), kKilled);
}

TEST_P(Saving, OnlyWhatTheDeadHaveLeftIsRemoved) {
  leave_behind(path("step-00000001"));
  leave_behind(path("step-00000002"));
  ASSERT_EQ(files(), 2u);
  NewFolder begun(path("step-00000003"));
  EXPECT_EQ(remove_partial(folder_, "step-"), std::vector<std::string>{begun.partial()});
  EXPECT_EQ(files(), 1u);
  write_text(begun.partial() + "/text", "whole");
  begun.finish();
  EXPECT_EQ(content("step-00000003/text"), "whole");
}

TEST_P(Saving, OthersMayHaveSuchNames) {
  put("mine", "x.partial-notes");
  put("mine", "step-00000001.partial-1-0");  // a file
  for (const char* name :
       {"step-00000001.partial-", "step-00000001.partial-1", "step-00000001.partial-1-",
        "step-00000001.partial-1-0x", "step-00000001.partial-1-0.old", "step-.partial-a-0",
        "step-00000001.partial--0", ".partial-1-0", "step-00000001-1-0", "other.partial-1-0"})
    std::filesystem::create_directory(path(name));
  std::filesystem::create_directory_symlink(path("step-00000001-1-0"), path("step-00000002.partial-1-0"));
  const std::size_t before = files();
  EXPECT_TRUE(remove_partial(folder_, "step-").empty());
  EXPECT_EQ(files(), before);
}

// There, a lock that another machine holds is not seen.
TEST_P(Saving, OnANetworkNothingIsTakenForDead) {
  leave_behind(path("step-00000001"));
  on_a_network = true;
  EXPECT_EQ(remove_partial(folder_, "step-").size(), 1u);
  EXPECT_EQ(files(), 1u);
  on_a_network = false;
  EXPECT_TRUE(remove_partial(folder_, "step-").empty());
  EXPECT_EQ(files(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Doors, Saving, testing::Values(Door::io, Door::abi),
                         [](const auto& door) { return door.param == Door::io ? "io" : "abi"; });

}  // namespace
}  // namespace scruple_tests
