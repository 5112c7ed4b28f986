// Threads, their memory, and the activation.
#pragma once
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "block.h"

// Uninitialised memory on a 64-byte boundary.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count) {
    const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
    if (bytes && !(at_ = static_cast<T*>(std::aligned_alloc(64, bytes)))) throw std::bad_alloc();
  }
  Buffer(Buffer&& other) noexcept : at_(other.at_) { other.at_ = nullptr; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(at_); }
  T* get() const { return at_; }
  operator T*() const { return at_; }

 private:
  T* at_ = nullptr;
};

struct ThreadMemory {
  Buffer<uint8_t> side;
  Buffer<float> weights, sums;
  explicit ThreadMemory(int64_t columns)
      : side(kMaxBits * padded(columns) / 8),
        weights(kRowTile * weight_stride(columns)),
        sums(kRowTile * kTokenTile * 64) {}
  Scratch scratch() const { return {side, weights, sums}; }
};

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    if (count_ == 1) return;
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t round = round_;
    if (++here_ == count_) {
      here_ = 0, ++round_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  const int count_;
  int here_ = 0;
  int64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

// work(i) for i in [0, threads), i = 0 on the caller's thread. None begins before all are started:
// if the system refuses one, the others end without having worked and the refusal is thrown.
inline void in_parallel(int threads, const std::function<void(int)>& work) {
  std::vector<std::thread> started;
  started.reserve(size_t(threads));
  std::mutex mutex;
  std::condition_variable decided;
  enum { kWait, kGo, kCancel } state = kWait;
  const auto decide = [&](auto to) {
    const std::lock_guard<std::mutex> lock(mutex);
    state = to;
    decided.notify_all();
  };
  try {
    for (int i = 1; i < threads; ++i)
      started.emplace_back([&, i] {
        {
          std::unique_lock<std::mutex> lock(mutex);
          decided.wait(lock, [&] { return state != kWait; });
        }
        if (state == kGo) work(i);
      });
  } catch (...) {
    decide(kCancel);
    for (auto& thread : started) thread.join();
    throw;
  }
  decide(kGo);
  work(0);
  for (auto& thread : started) thread.join();
}

inline int64_t share(int64_t n, int part, int parts) { return n * part / parts; }

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// e^x to about 1e-7 relative, without a branch; NaN stays NaN. Coefficients: Cephes expf.
inline float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  // 2^n as two powers of two, each in range; a NaN gives any two and stays NaN in p.
  const uint32_t power = bits - 0x4b400000u, half = uint32_t(int32_t(power) >> 1);
  const uint32_t a = (half + 127u) << 23, b = (power - half + 127u) << 23;
  float first, second;
  std::memcpy(&first, &a, 4);
  std::memcpy(&second, &b, 4);
  return p * first * second;
}

// out[i] = act(gate[i]) * up[i]. GELU in its tanh form is z * sigmoid(2 u).
inline void activate(int32_t activation, int64_t n, const float* gate, const float* up,
                     float* out) {
  if (activation == kSilu) {
    for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
  } else {
    for (int64_t i = 0; i < n; ++i) {
      const float z = gate[i];
      const float u2 = 1.5957691216f * (z + 0.044715f * (z * z * z));
      out[i] = z / (1.0f + exponential(-u2)) * up[i];
    }
  }
}
