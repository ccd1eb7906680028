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
  explicit Buffer(int64_t size = 0) { resize(size); }
  Buffer(int64_t size, Unset) : size_(size), room_(size) {
    data_ = take(std::malloc(static_cast<size_t>(size) * sizeof(T)), size);
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  int64_t size() const { return size_; }

  // What was there is lost if it grows.
  void resize(int64_t size) {
    if (size > room_) {
      std::free(data_);
      data_ = take(std::calloc(static_cast<size_t>(size), sizeof(T)), size);
      room_ = size;
    }
    size_ = size;
  }
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(room_, other.room_);
  }

 private:
  static T* take(void* memory, int64_t size) {
    if (size && !memory) std::abort();
    return static_cast<T*>(memory);
  }

  T* data_ = nullptr;
  int64_t size_ = 0, room_ = 0;
};

}  // namespace simd
