// Moments and extra bits that lie in pinned host memory, on their way through the device. A step takes such a tensor piece
// by piece: its planes are copied into a slot of device memory, stepped there, and copied back. Copies in, steps and copies
// out of different pieces run at once; so a step costs what the link takes, not what it takes twice.
// Kernels could reach the planes over the link, and take 1.4 to 1.9 times as long (bench/results/2026-11-19-h200.md).
#pragma once

#include <array>

#include "engine/cuda_device.h"
#include "engine/engine.h"

namespace scruple {

class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    for (cudaStream_t stream : {in_, out_})
      if (stream != nullptr) cudaStreamSynchronize(stream), cudaStreamDestroy(stream);
    for (Slot& slot : slots_)
      for (cudaEvent_t event : {slot.came, slot.stepped, slot.left})
        if (event != nullptr) cudaEventDestroy(event);
    if (reached_ != nullptr) cudaEventDestroy(reached_);
  }

  // Before it is used: a test has small slots. The least holds one tile of any tensor.
  void set_slot(i64 bytes) { slot_bytes_ = round_up(std::max<i64>(bytes, 16 * kTiles)); }
  // How many elements of such a tensor fit into a slot.
  i64 elements(const scruple_tensor& t) const {
    i64 bytes = 0;
    for_host_planes(t, kTiles, [&](void*&, i64 n) { bytes += round_up(n); });
    return bytes == 0 ? t.size : std::max<i64>(slot_bytes_ / bytes, 1) * kTiles;
  }

  // Takes its memory, which may not be had: before a step writes anything.
  void begin() {
    if (memory_.size() > 0) return;
    const auto event = [](cudaEvent_t& made) {
      if (made == nullptr)
        check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "creating an event");
    };
    event(reached_);
    for (Slot& slot : slots_) event(slot.came), event(slot.stepped), event(slot.left);
    for (cudaStream_t* stream : {&in_, &out_})
      if (*stream == nullptr)
        check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream");
    memory_.reserve(kSlots * slot_bytes_, false);
  }

  // The planes of a piece, which then points at its slot; they are there for what is queued on `stream` from now on.
  void bring(scruple_tensor& piece, cudaStream_t stream) {
    if (has_new_) wait_for(in_, stream);
    has_new_ = false;
    slot_ = &slots_[next_];
    next_ = (next_ + 1) % slots_.size();
    slot_->planes.clear();
    for_host_planes(piece, piece.size, [&](void*& plane, i64 bytes) {
      slot_->planes.push_back({static_cast<u8*>(plane), bytes});
    });
    // Its memory must be free, and what was written to these planes must have arrived.
    for (const Slot& other : slots_)
      if (&other == slot_ || share_a_plane(other, *slot_))
        check(cudaStreamWaitEvent(in_, other.left), kDoing);
    u8* at = memory_of(*slot_);
    for_host_planes(piece, piece.size, [&](void*& plane, i64 bytes) {
      copy(at, plane, bytes, in_);
      plane = at;
      at += round_up(bytes);
    });
    check(cudaEventRecord(slot_->came, in_), kDoing);
    check(cudaStreamWaitEvent(stream, slot_->came), kDoing);
  }

  // They go back, once what is queued on `stream` is done.
  void send_back(cudaStream_t stream) {
    check(cudaEventRecord(slot_->stepped, stream), kDoing);
    check(cudaStreamWaitEvent(out_, slot_->stepped), kDoing);
    u8* at = memory_of(*slot_);
    for (const Plane& plane : slot_->planes) {
      copy(plane.at, at, plane.bytes, out_);
      at += round_up(plane.bytes);
    }
    check(cudaEventRecord(slot_->left, out_), kDoing);
    is_out_ = true;
  }

  // What is queued on `stream` from now on may read and write planes in host memory.
  void join(cudaStream_t stream) {
    if (is_out_) wait_for(stream, out_);
    is_out_ = false, has_new_ = true;
  }
  void wait() {
    if (out_ != nullptr) check(cudaStreamSynchronize(out_), kDoing);
  }

 private:
  static constexpr const char* kDoing = "copying moments between the host and the device";
  static constexpr i64 kSlots = 32;
  static constexpr i64 kTiles = 4096;  // elements: whole tiles of every kernel
  struct Plane {
    u8* at;
    i64 bytes;
  };
  struct Slot {
    std::vector<Plane> planes;  // of the last piece, in host memory
    cudaEvent_t came = nullptr, stepped = nullptr, left = nullptr;
  };

  static i64 round_up(i64 bytes) { return (bytes + 255) / 256 * 256; }
  u8* memory_of(const Slot& slot) const { return memory_.at<u8>((&slot - slots_.data()) * slot_bytes_); }
  // Pieces of one tensor overlap in all planes or in none.
  static bool share_a_plane(const Slot& a, const Slot& b) {
    if (a.planes.empty() || b.planes.empty()) return false;
    const Plane &x = a.planes[0], &y = b.planes[0];
    return x.at < y.at + y.bytes && y.at < x.at + x.bytes;
  }
  static void for_host_planes(scruple_tensor& t, i64 size, const auto& visit) {
    for (int a = 0; a < SCRUPLE_ARRAYS; ++a) {
      if (!is_used(t, a)) continue;
      scruple_array& array = t.arrays[a];
      const Bytes bytes = bytes_of(*array.format, size);
      if (bytes.codes > 0 && is_on_host(t, a, false)) visit(array.codes, bytes.codes);
      if (bytes.aux > 0 && is_on_host(t, a, true)) visit(array.aux, bytes.aux);
    }
  }
  static void for_host_planes(const scruple_tensor& t, i64 size, const auto& visit) {
    scruple_tensor copy = t;
    for_host_planes(copy, size, visit);
  }
  static void copy(void* to, const void* from, i64 bytes, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream), kDoing);
  }
  void wait_for(cudaStream_t waits, cudaStream_t queued) {
    check(cudaEventRecord(reached_, queued), kDoing);
    check(cudaStreamWaitEvent(waits, reached_), kDoing);
  }

  i64 slot_bytes_ = SCRUPLE_HOST_RING_BYTES / kSlots;
  DeviceBuffer memory_;
  std::array<Slot, kSlots> slots_;
  Slot* slot_ = nullptr;  // of the piece under way
  std::size_t next_ = 0;
  cudaStream_t in_ = nullptr, out_ = nullptr;
  cudaEvent_t reached_ = nullptr;
  bool is_out_ = false;  // something was sent back that nothing has waited for
  bool has_new_ = true;  // planes in host memory may have been written on the caller's stream
};

}  // namespace scruple
