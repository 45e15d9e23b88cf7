// Tests on an engine with memory of its own, through the ABI alone: raw memory there, and a twin of host
// tensors in it, canaries and misalignment included. A CPU engine goes the same way.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/support.h"

namespace scruple_tests {

// SCRUPLE_TEST_ENGINE names the engine under test.
inline std::string engine_under_test() {
  const char* name = std::getenv("SCRUPLE_TEST_ENGINE");
  return name == nullptr || *name == 0 ? "cuda" : name;
}
inline bool is_cuda(const std::string& engine) { return engine.rfind("cuda", 0) == 0; }

// SCRUPLE_TEST_QUICK=1: every rule and recipe, but few of everything else; for compute-sanitizer.
inline bool quick() { return is_set("SCRUPLE_TEST_QUICK"); }

// Why this machine cannot run an engine, in the registry's words; "" where it can.
inline std::string why_unavailable(const std::string& engine) {
  const std::string family = engine.substr(0, engine.find(':'));
  for (const scruple_engine_info& info : engines()) {
    if (family != info.name) continue;
    if (info.available != 0) return "";
    return info.reason == nullptr || *info.reason == 0 ? "no reason given" : info.reason;
  }
  return family == "cpu" ? "" : "this build's registry has no engine " + family;
}

// Bytes in an engine's memory, aligned to 256.
class DeviceMemory {
 public:
  static constexpr std::size_t kAlignment = 256;

  explicit DeviceMemory(scruple_engine* engine, std::size_t bytes = 0) : engine_(engine) {
    if (bytes > 0) reserve(bytes);
  }
  ~DeviceMemory() { scruple_tensor_free(engine_, &row_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  // At least `bytes`, zeroed; what was there is lost where there were fewer.
  scruple_status try_reserve(std::size_t bytes) {
    if (bytes <= size_) return SCRUPLE_OK;
    scruple_tensor_free(engine_, &row_);
    size_ = 0;
    row_ = {};
    row_.optimizer = owner_;
    row_.size = static_cast<std::int64_t>((bytes + kAlignment + 3) / 4);
    row_.arrays[SCRUPLE_WEIGHT].format = scruple_format_find("fp32");
    const scruple_status status = scruple_tensor_alloc(engine_, &row_, 1u << SCRUPLE_WEIGHT);
    if (status == SCRUPLE_OK) size_ = bytes;
    return status;
  }
  void reserve(std::size_t bytes) { CHECK_OK(try_reserve(bytes)); }

  unsigned char* data() const {
    auto* start = static_cast<unsigned char*>(row_.arrays[SCRUPLE_WEIGHT].codes);
    return start + (kAlignment - reinterpret_cast<std::uintptr_t>(start) % kAlignment) % kAlignment;
  }
  std::size_t size() const { return size_; }
  // Both wait until the bytes are there.
  void write(const void* from, std::size_t bytes, std::size_t at = 0) {
    CHECK_OK(scruple_copy(engine_, data() + at, from, static_cast<std::int64_t>(bytes)));
    CHECK_OK(scruple_engine_synchronize(engine_));
  }
  void read(void* to, std::size_t bytes, std::size_t at = 0) const {
    CHECK_OK(scruple_copy(engine_, to, data() + at, static_cast<std::int64_t>(bytes)));
    CHECK_OK(scruple_engine_synchronize(engine_));
  }

 private:
  scruple_engine* engine_;
  Optimizer owner_{"sgd"};
  scruple_tensor row_{};
  std::size_t size_ = 0;
};

// One T in an engine's memory. `at` is its address there.
template <class T>
struct DeviceCell {
  explicit DeviceCell(scruple_engine* engine, const T& value = {}) : memory(engine, sizeof(T)) { set(value); }
  void set(const T& value) { memory.write(&value, sizeof(T)); }
  T get() const {
    T value{};
    memory.read(&value, sizeof(T));
    return value;
  }
  T* at() const { return reinterpret_cast<T*>(memory.data()); }

  DeviceMemory memory;
};

// Host tensors once more in an engine's memory: every plane with its canaries, at the same address modulo 16
// (modulo 256 where that is 0), all in one piece so that one copy moves them. `memory` is the caller's, so
// that many twins in turn cost one allocation.
class Twin {
 public:
  Twin(DeviceMemory& memory, const std::vector<Tensor>& tensors) : memory_(memory) {
    std::size_t at = 0;
    for (const bool gradients : {false, true}) {
      if (gradients) gradients_at_ = at;
      for (std::size_t i = 0; i < tensors.size(); ++i)
        for (int a = 0; a < SCRUPLE_ARRAYS; ++a)
          for (int p = 0; p < 2; ++p)
            if ((a == SCRUPLE_GRADIENT) == gradients) at = place(tensors[i], i, a, p, at);
    }
    image_.resize(at);
    memory_.reserve(at + 1);
    for (const Tensor& tensor : tensors) rows.push_back(tensor.row);
    for (scruple_tensor& row : rows)
      for (scruple_array& array : row.arrays) array.codes = array.aux = nullptr;
    for (const Place& place : places_) {
      scruple_array& array = rows[place.tensor].arrays[place.array];
      (place.plane == 0 ? array.codes : array.aux) = memory_.data() + place.at + place.begin;
    }
    upload(tensors);
  }

  void upload(const std::vector<Tensor>& tensors) { upload_from(tensors, 0); }
  void upload_gradients(const std::vector<Tensor>& tensors) { upload_from(tensors, gradients_at_); }

  // The tensors this was made from, or others with the same planes.
  void download(std::vector<Tensor>& tensors) {
    fetch();
    for (const Place& place : places_) {
      Plane& plane = const_cast<Plane&>(plane_of(tensors, place));
      std::memcpy(plane.memory.data(), image_.data() + place.at, plane.memory.size());
    }
  }

  // Where the twin and these tensors differ first, canaries included; "" where they do not.
  std::string difference(const std::vector<Tensor>& want) {
    fetch();
    for (const Place& place : places_) {
      const Plane& plane = plane_of(want, place);
      if (std::memcmp(image_.data() + place.at, plane.memory.data(), plane.memory.size()) == 0) continue;
      std::size_t first = plane.memory.size(), count = 0;
      for (std::size_t i = plane.memory.size(); i-- > 0;)
        if (image_[place.at + i] != plane.memory[i]) first = i, ++count;
      return describe(want[place.tensor].row, place, plane, first, count);
    }
    return "";
  }

  std::vector<scruple_tensor> rows;  // with addresses in the engine's memory; fields may be changed freely

 private:
  struct Place {
    std::size_t tensor;
    int array, plane;
    std::size_t at, begin;  // of the whole Plane in the image; of its data in the Plane
  };

  static const Plane& plane_of(const std::vector<Tensor>& tensors, const Place& place) {
    return tensors[place.tensor]
        .planes[static_cast<std::size_t>(place.array)][static_cast<std::size_t>(place.plane)];
  }

  std::size_t place(const Tensor& tensor, std::size_t i, int array, int which, std::size_t at) {
    const Plane& plane = tensor.planes[static_cast<std::size_t>(array)][static_cast<std::size_t>(which)];
    if (plane.memory.empty()) return at;
    const std::size_t odd = reinterpret_cast<std::uintptr_t>(plane.data()) % 16;
    const std::size_t align = odd == 0 ? DeviceMemory::kAlignment : 16;
    const std::size_t data = (at + plane.begin - odd + align - 1) / align * align + odd;
    places_.push_back({i, array, which, data - plane.begin, plane.begin});
    return data - plane.begin + plane.memory.size();
  }

  void upload_from(const std::vector<Tensor>& tensors, std::size_t from) {
    for (const Place& place : places_) {
      const Plane& plane = plane_of(tensors, place);
      if (place.at >= from) std::memcpy(image_.data() + place.at, plane.memory.data(), plane.memory.size());
    }
    memory_.write(image_.data() + from, image_.size() - from, from);
  }
  void fetch() { memory_.read(image_.data(), image_.size()); }

  std::string describe(const scruple_tensor& row, const Place& place, const Plane& plane, std::size_t first,
                       std::size_t count) const {
    const char* name = "?";
    scruple_tensor_array(&row, place.array, &name, nullptr, nullptr);
    char bytes[64];
    std::snprintf(bytes, sizeof bytes, ": got 0x%02x, want 0x%02x; ", unsigned{image_[place.at + first]},
                  unsigned{plane.memory[first]});
    const std::int64_t byte = static_cast<std::int64_t>(first) - static_cast<std::int64_t>(plane.begin);
    const bool outside = byte < 0 || byte >= static_cast<std::int64_t>(plane.size);
    return "tensor " + std::to_string(place.tensor) + " of " + std::to_string(row.size) + " elements, " +
           name + " (" + info_of(row.arrays[place.array].format).name + " rounding " +
           std::to_string(row.arrays[place.array].rounding) + "), " + (place.plane == 0 ? "codes" : "aux") +
           " of " + std::to_string(plane.size) + " bytes" +
           (outside ? " written OUTSIDE, byte " : ", byte ") + std::to_string(byte) + bytes +
           std::to_string(count) + " bytes of this plane differ";
  }

  DeviceMemory& memory_;
  std::vector<Place> places_;
  std::size_t gradients_at_ = 0;
  Bytes image_;
};

}  // namespace scruple_tests
