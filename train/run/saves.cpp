#include "train/run/saves.h"

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "train/run/rows.h"

namespace scruple::train {
namespace {

constexpr std::int64_t kAlignment = 256;  // of a plane's copy
constexpr std::size_t kUsualSteps = 9;    // that say how long one takes

double seconds_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Calls visit(tensor, pointer to a plane, its bytes) for each plane of the contents.
template <class Visit>
void for_each_plane(Contents& contents, const Visit& visit) {
  for (std::size_t t = 0; t < contents.rows.size(); ++t) {
    scruple_tensor& row = contents.rows[t];
    const std::vector<int> arrays = stored_arrays(row);
    for (std::size_t a = 0; a < arrays.size(); ++a) {
      scruple_array& array = row.arrays[arrays[a]];
      const std::vector<io::Plane>& planes = contents.manifest.tensors[t].arrays[a].planes;
      for (std::size_t p = 0; p < planes.size(); ++p)
        visit(t, p == 0 ? array.codes : array.aux, planes[p].bytes());
    }
  }
}

std::int64_t room_of(Contents& contents) {
  std::int64_t room = 0;
  for_each_plane(contents, [&](std::size_t, void*&, std::int64_t bytes) { room += aligned(bytes); });
  return room;
}

double median(std::deque<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Saves::Saves(Trainer& trainer, std::string recipe, std::string run, std::int64_t keep,
             std::function<void(const std::string&)> warn)
    : trainer_(trainer),
      recipe_(std::move(recipe)),
      run_(std::move(run)),
      keep_(keep),
      host_(trainer.ledger().host()),
      warn_(std::move(warn)) {}

Saves::~Saves() {
  if (writing_.valid()) writing_.wait();
}

std::future<Block> Saves::taking(std::int64_t bytes) {
  return std::async(std::launch::async, [this, bytes] {
    host_.check_room("saves", bytes / 3 * 4);  // the rest is for data and the page cache
    return Block(host_, "saves", bytes, trainer_.copies()->memory());
  });
}

void Saves::prepare() {
  if (trainer_.copies() == nullptr || refused_ || block_.bytes() > 0 || taking_.valid()) return;
  Contents contents = contents_of(trainer_, recipe_, {});
  try {
    taking_ = taking(room_of(contents));
  } catch (const std::system_error&) {  // no thread: the first save takes it, or says that it cannot
  }
}

bool Saves::has_room(std::int64_t bytes) {
  if (trainer_.copies() == nullptr || refused_) return false;
  if (block_.bytes() > 0) return true;
  try {
    block_ = taking_.valid() ? taking_.get() : taking(bytes).get();
  } catch (const std::exception&) {
    refused_ = true;
    warn_("the host has no " + std::to_string((bytes >> 20) + 1) +
          " MiB free for copies of a checkpoint, so training waits while one is written; free some, or save "
          "less often (--save-every)");
  }
  return !refused_;
}

// Begins to copy the planes, and lets the rows point to the copies. Backward takes gradients from the last parameter to the
// first, so the last are copied first: their steps come first where gradients are released.
void Saves::copy(Contents& contents) {
  std::vector<Copies::Plane> planes;
  std::int64_t at = 0;
  for_each_plane(contents, [&](std::size_t tensor, void*& plane, std::int64_t bytes) {
    void* const to = block_.as<std::byte>() + at;
    planes.push_back({tensor, to, std::exchange(plane, to), bytes});
    at += aligned(bytes);
  });
  const std::size_t parameters =
      trainer_.state().parameters().size();  // averages come behind them, and step last
  const auto averages = std::find_if(planes.begin(), planes.end(),
                                     [&](const Copies::Plane& plane) { return plane.tensor >= parameters; });
  std::reverse(planes.begin(), averages);
  trainer_.copies()->take(planes);
}

Saves::Written Saves::write(const Contents& contents, Copies* copies) const {
  std::string problem;
  try {
    if (copies != nullptr) copies->wait();
    train::write(contents, copies != nullptr ? copies->memory() : trainer_.memory(), run_, keep_);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  return {Clock::now(), problem};
}

void Saves::save(const io::Metadata& notes, bool goes_on) {
  const Clock::time_point asked = Clock::now();
  wait();
  begun_ = Clock::now();
  current_ = {trainer_.steps_taken(), 0, 0, 0, ""};
  step_waits_ = false;
  std::promise<Written> written;
  writing_ = written.get_future();
  try {
    Contents contents = contents_of(trainer_, recipe_, notes);
    for_each_plane(contents, [&](std::size_t, void*&, std::int64_t bytes) { current_.bytes += bytes; });
    if (goes_on && has_room(room_of(contents))) {
      copy(contents);
      try {
        writing_ = std::async(std::launch::async, [this, contents = std::move(contents)] {
          return write(contents, trainer_.copies());
        });
      } catch (const std::system_error&) {  // no thread
        trainer_.copies()->wait();
        throw;
      }
      step_waits_ = true;
    } else {
      written.set_value(write(contents, nullptr));
    }
  } catch (const std::exception& error) {
    written.set_value({Clock::now(), error.what()});
  }
  current_.waited = seconds_between(asked, Clock::now());
  if (!step_waits_) wait();
}

void Saves::add_step(double seconds) {
  if (std::exchange(step_waits_, false)) {
    if (!steps_.empty()) current_.waited += std::max(0.0, seconds - median(steps_));
    return;
  }
  steps_.push_back(seconds);
  if (steps_.size() > kUsualSteps) steps_.pop_front();
}

void Saves::wait() {
  if (!writing_.valid()) return;
  const Written written = writing_.get();
  current_.seconds = seconds_between(begun_, written.at);
  current_.problem = written.problem;
  ended_.push_back(current_);
}

std::optional<Saved> Saves::ended() {
  if (writing_.valid() && writing_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) wait();
  if (ended_.empty()) return {};
  const Saved saved = ended_.front();
  ended_.pop_front();
  return saved;
}

}  // namespace scruple::train
