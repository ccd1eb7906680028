// Scratch memory of a kernel. Not std::vector: the linker keeps one instance of each template, perhaps
// one built for an instruction set that the processor lacks. In `simd` every build has its own.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <utility>

namespace simd {

// Zeros at first, unless it is `UNSET` since all is written before it is read; T is a number.
enum Unset { UNSET };
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) : size_(size), room_(size) {
    if (size) take(std::calloc(1, bytes_of(size)));
  }
  Buffer(int64_t size, Unset) { resize(size, UNSET); }
  ~Buffer() { std::free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }

  // What was there is lost if it grows.
  void resize(int64_t size, Unset) {
    if (size > room_) {
      std::free(memory_);
      take(std::malloc(bytes_of(size)));
      room_ = size;
    }
    size_ = size;
  }
  void swap(Buffer& other) {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(room_, other.room_);
  }

 private:
  // It begins where a line of the cache does, so that no vector is in two, nor two threads' numbers in one.
  static constexpr size_t LINE_BYTES = 64;
  static size_t bytes_of(int64_t size) { return static_cast<size_t>(size) * sizeof(T) + 2 * LINE_BYTES; }
  void take(void* memory) {
    if (!memory) std::abort();
    memory_ = memory;
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory) + LINE_BYTES - 1;
    data_ = reinterpret_cast<T*>(first / LINE_BYTES * LINE_BYTES);
  }

  void* memory_ = nullptr;
  T* data_ = nullptr;
  int64_t size_ = 0, room_ = 0;
};

}  // namespace simd
