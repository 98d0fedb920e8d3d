// A sequence whose elements never move and are used again after clear(): recording an op allocates next to nothing.
#pragma once
#include <memory>
#include <vector>

namespace coexec {

// `T::reset()` makes an element as good as new; it may keep its own memory.
template <class T>
class Recycled {
  static constexpr size_t kBlock = 32;

  template <class Sequence, class Element>
  struct Iterator {
    Sequence* of;
    size_t at;
    Element& operator*() const {
      return (*of)[at];
    }
    Iterator& operator++() {
      at++;
      return *this;
    }
    bool operator!=(const Iterator& o) const {
      return at != o.at;
    }
  };

 public:
  T& emplace_back() {
    if (size_ == blocks_.size() * kBlock)
      blocks_.push_back(std::make_unique<T[]>(kBlock));
    return (*this)[size_++];
  }
  void pop_back() {
    (*this)[--size_].reset();
  }
  void clear() {
    while (size_)
      pop_back();
  }
  T& operator[](size_t i) {
    return blocks_[i / kBlock][i % kBlock];
  }
  const T& operator[](size_t i) const {
    return blocks_[i / kBlock][i % kBlock];
  }
  size_t size() const {
    return size_;
  }
  auto begin() {
    return Iterator<Recycled, T>{this, 0};
  }
  auto end() {
    return Iterator<Recycled, T>{this, size_};
  }
  auto begin() const {
    return Iterator<const Recycled, const T>{this, 0};
  }
  auto end() const {
    return Iterator<const Recycled, const T>{this, size_};
  }

 private:
  std::vector<std::unique_ptr<T[]>> blocks_;
  size_t size_ = 0;
};
} // namespace coexec
