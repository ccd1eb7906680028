// Touches memory and does nothing with it: memory_alone.py says what for. Or sums beside it: memory_beside_sums.py.
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
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

typedef float vector __attribute__((vector_size(16)));

// Lines of a run are asked for SOON runs before it is touched, `chunk` runs at a time; beside each that is touched,
// `sums` lines of `near`, which has NEAR of them, are added up.
enum { NEAR = 64, SOON = 32 };
void touch_beside_sums(const struct run *runs, int64_t count, int64_t chunk, int64_t sums, const vector *near, vector *to) {
  vector a = {0}, b = {0}, c = {0}, d = {0};
  for (int64_t i = 0; i < SOON && i < count; ++i) ask_for(runs + i);
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t last = first + chunk < count ? first + chunk : count;
    for (int64_t i = first + SOON; i < last + SOON && i < count; ++i) ask_for(runs + i);
    for (int64_t i = first; i < last; ++i) {
      for (int64_t k = 0; k < sums; ++k) {
        const vector *const line = near + k % NEAR * 4;
        a += line[0], b += line[1], c += line[2], d += line[3];
      }
      touch(runs + i);
    }
  }
  *to = a + b + c + d;
}

// Two threads hand a number to and fro; how many seconds for one way, or -1 where there is but one thread.
enum { PATIENCE = 100000 };
static void wait_for(atomic_long *number, long value) {
  for (long tries = 1; atomic_load_explicit(number, memory_order_acquire) != value; ++tries)
    // Both may be on one core.
    if (tries % PATIENCE == 0) sched_yield();
}
double between_cores(long turns) {
  static struct { _Alignas(128) atomic_long number; char rest[128]; } ball;
  double seconds = -1;
  atomic_store(&ball.number, 0);
#pragma omp parallel num_threads(2)
  if (omp_get_num_threads() == 2) {
    const long mine = omp_get_thread_num();
    const double start = omp_get_wtime();
    for (long i = 0; i < turns; ++i) {
      wait_for(&ball.number, 2 * i + mine);
      atomic_store_explicit(&ball.number, 2 * i + mine + 1, memory_order_release);
    }
    if (mine == 1) seconds = (omp_get_wtime() - start) / (2 * turns);
  }
  return seconds;
}
