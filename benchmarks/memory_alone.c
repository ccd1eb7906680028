// Touches memory and does nothing with it: memory_alone.py says what for.
#include <stdint.h>

struct run {
  volatile char *at;
  int32_t bytes;
  int32_t written;
};

enum { LINE = 64, AHEAD = 96 };

static void ask_for(const struct run *run) {
  for (const char *at = (const char *)((uintptr_t)run->at & ~(uintptr_t)(LINE - 1)); at < run->at + run->bytes; at += LINE)
    if (run->written) __builtin_prefetch(at, 1, 3);
    else __builtin_prefetch(at, 0, 3);
}

// A byte of each line. What is written is what was there.
static void touch(const struct run *run) {
  volatile char *const end = run->at + run->bytes;
  volatile char *at = run->at;
  while (at < end) {
    const char byte = *at;
    if (run->written) *at = byte;
    at = (volatile char *)(((uintptr_t)at & ~(uintptr_t)(LINE - 1)) + LINE);
  }
}

void touch_runs(const struct run *runs, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int thread = 0; thread < threads; ++thread) {
    const int64_t first = count * thread / threads, last = count * (thread + 1) / threads;
    for (int64_t i = first; i < first + AHEAD && i < last; ++i) ask_for(runs + i);
    for (int64_t i = first; i < last; ++i) {
      if (i + AHEAD < last) ask_for(runs + i + AHEAD);
      touch(runs + i);
    }
  }
}
