// Bags of rows of embedding tables, pooled; ops/embedding/__init__.py defines the sequence of rounded
// operations.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "embedding_cache.h"
#include "float_mode.h"

namespace simd {

// Where a run of looked-up rows lies; each row is prefetched in time. Rows are asked for by the chunk, not one by one:
// on Zen 5 an instruction that asks for a line is held until its page is found, and then all that follow wait, so of
// rows between which others are summed fewer are under way.
class Lookups {
 public:
  struct Row {
    const char* at;
    bool cached;
  };

  // Row numbers out of range are replaced by row 0; `*bad` gets the first one's position.
  Lookups(const subulp_table& t, const int64_t* values, int64_t first, int64_t last, int64_t* bad)
      : t_(t), values_(values), last_(last), bad_(bad), ready_(first), located_(first) {
    for (int64_t k = first; k < first + CHUNK; ++k) announce(k);
    locate_chunk();
  }
  // To be called with the end of a run of lookups, run after run, then at() for those and BEFORE before them.
  void reach(int64_t end) {
    while (ready_ < end) locate_chunk();
  }
  static constexpr int64_t BEFORE = AHEAD;
  Row at(int64_t k) const { return ring_[k % RING]; }

 private:
  int64_t row(int64_t k) {
    if (static_cast<uint64_t>(values_[k]) < static_cast<uint64_t>(t_.rows)) return values_[k];
    if (bad_) *bad_ = std::min(*bad_, k);
    return 0;
  }
  void announce(int64_t k) {
    if (t_.sets && k < last_) prefetch(t_.tags + set_of(t_, static_cast<uint32_t>(row(k))) * t_.ways, t_.ways * 4);
  }
  void locate(int64_t k) {
    if (k >= last_) return;
    const int64_t number = row(k), place = find_row(t_, number);
    const char* const at = place < 0 ? stored_row(t_, number) : reinterpret_cast<const char*>(t_.cache + place * t_.dim);
    prefetch(at, place < 0 ? t_.row_bytes : t_.dim * 4);
    ring_[k % RING] = {at, place >= 0};
  }
  // Those of the chunk before have been asked for long enough.
  void locate_chunk() {
    ready_ = located_, located_ += CHUNK;
    for (int64_t k = located_; k < located_ + CHUNK; ++k) announce(k);
    for (int64_t k = ready_; k < located_; ++k) locate(k);
  }

  static constexpr int64_t CHUNK = AHEAD / 2, RING = BEFORE + 2 * CHUNK;
  const subulp_table& t_;
  const int64_t* values_;
  int64_t last_;
  int64_t* bad_;
  int64_t ready_, located_;
  Row ring_[RING];
};

constexpr int64_t BAGS = 64;  // bags of a task

// Calls work(feature, first bag, last bag) for all bags, in parallel.
template <class Work>
inline void each_task(const subulp_lookups& l, int threads, Work work) {
  const int64_t per_feature = (l.batch + BAGS - 1) / BAGS, tasks = l.features * per_feature;
  const int64_t bags = l.features * l.batch;
  const int64_t count = bags ? l.offsets[bags] : 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (tasks > 1 && count > 256 && threads > 1)
#endif
  {
    const IeeeMode ieee;
#if defined(_OPENMP)
#pragma omp for schedule(dynamic)
#endif
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t feature = task / per_feature, bag = task % per_feature * BAGS;
      work(feature, bag, std::min(bag + BAGS, l.batch));
    }
  }
  (void)threads;
  (void)count;
}

template <class Row, bool weighted>
class BagSums {
 public:
  BagSums(const subulp_table& t, const subulp_lookups& l, int64_t first, int64_t last, int64_t* bad)
      : dim_(t.dim), weights_(l.weights), lookups_(t, l.values, first, last, bad) {}

  // The sum of the rows of a bag, in their order.
  void sum(int64_t first, int64_t last, float* to) {
    int64_t stop = std::min(first + Lookups::BEFORE, last);
    add_run(first, stop, true, to);
    for (; stop < last; first = stop) {
      first = stop;
      stop = std::min(first + Lookups::BEFORE, last);
      add_run(first, stop, false, to);
    }
  }
  int64_t hits = 0;

 private:
  void add_run(int64_t first, int64_t last, bool begins, float* to) {
    lookups_.reach(last);
    for (int64_t k = first; k < last; ++k) hits += lookups_.at(k).cached;
    const int64_t i = add_columns<WIDEST>(0, first, last, begins, to);
    if (i == dim_) return;
    F sum = begins ? f32(0.0f) : load_part(to + i, dim_ - i);
    for (int64_t k = first; k < last; ++k)
      read(k, [&](const auto& row) { sum = simd::add(sum, scaled(row.part(i, dim_ - i), k)); });
    store_part(to + i, sum, dim_ - i);
  }

  // Columns from i on, as many as whole vectors have; returns where the rest begins.
  template <int N>
  int64_t add_columns(int64_t i, int64_t first, int64_t last, bool begins, float* to) {
    for (; i + N * W <= dim_; i += N * W) {
      F sum[N];
      for (int v = 0; v < N; ++v) sum[v] = begins ? f32(0.0f) : load_f32(to + i + v * W);
      for (int64_t k = first; k < last; ++k)
        read(k, [&](const auto& row) {
          for (int v = 0; v < N; ++v) sum[v] = simd::add(sum[v], scaled(row.whole(i + v * W), k));
        });
      for (int v = 0; v < N; ++v) store_f32(to + i + v * W, sum[v]);
    }
    if constexpr (N > 1) return add_columns<N / 2>(i, first, last, begins, to);
    return i;
  }

  template <class Visit>
  void read(int64_t k, Visit visit) const {
    const auto row = lookups_.at(k);
    if (row.cached) visit(FloatRow<Fp32>::Reader(row.at));
    else visit(typename Row::Reader(row.at));
  }
  F scaled(F value, int64_t k) const { return weighted ? mul(value, f32(weights_[k])) : value; }

  const int64_t dim_;
  const float* const weights_;
  Lookups lookups_;
};

inline int64_t run_embedding_pool(const subulp_table* tables, const subulp_lookups& l, float* out,
                                  int64_t* statistics, int threads) {
  if (!offsets_fit(l)) return SUBULP_BAD_OFFSETS;
  Buffer<int64_t> hits(l.features);
  int64_t bad = INT64_MAX;
  bool known = true;
  each_task(l, threads, [&](int64_t feature, int64_t bag, int64_t end) {
    const subulp_table& t = tables[l.table[feature]];
    int64_t found_cached = 0, mine = INT64_MAX;
    const int64_t* const offsets = l.offsets + feature * l.batch;
    // Without rows there is not even the one that stands for those out of range.
    const bool none = t.rows == 0 && offsets[bag] < offsets[end];
    if (none) mine = offsets[bag];
    const auto pool = [&](auto sums) {
      float* const column = out + l.column[feature];
      for (int64_t b = bag; b < end; ++b) sums.sum(offsets[b], offsets[b + 1], column + b * l.stride);
      found_cached = sums.hits;
    };
    const bool found = with_row_type(t.dtype, [&](auto row) {
      using Row = decltype(row);
      if (none) return;
      if (l.weights) pool(BagSums<Row, true>(t, l, offsets[bag], offsets[end], &mine));
      else pool(BagSums<Row, false>(t, l, offsets[bag], offsets[end], &mine));
    });
#if defined(_OPENMP)
#pragma omp critical(subulp_pool)
#endif
    {
      hits[feature] += found_cached;
      bad = std::min(bad, mine);
      known &= found;
    }
  });
  if (!known) return -1;
  if (bad != INT64_MAX) return bad + 1;
  for (int64_t feature = 0; feature < l.features; ++feature) {
    int64_t* const of_table = statistics + 2 * l.table[feature];
    of_table[0] += l.offsets[(feature + 1) * l.batch] - l.offsets[feature * l.batch];
    of_table[1] += hits[feature];
  }
  return 0;
}

inline int64_t run_embedding_weight_grad(const subulp_table* tables, const subulp_lookups& l, const float* grad,
                                         float* result, int threads) {
  if (const int64_t fault = fault_of(tables, l)) return fault;
  each_task(l, threads, [&](int64_t feature, int64_t bag, int64_t end) {
    const subulp_table& t = tables[l.table[feature]];
    const int64_t* const offsets = l.offsets + feature * l.batch;
    const float* const column = grad + l.column[feature];
    with_row_type(t.dtype, [&](auto type) {
      using Row = decltype(type);
      Lookups rows(t, l.values, offsets[bag], offsets[end], nullptr);
      for (int64_t b = bag; b < end; ++b) {
        const float* const g = column + b * l.stride;
        for (int64_t k = offsets[b]; k < offsets[b + 1]; ++k) {
          rows.reach(k + 1);
          F parts[PARTS];
          for (F& part : parts) part = f32(0.0f);
          const auto add_product = [&](int64_t i, F value) {
            F& part = parts[i / W % PARTS];
            part = simd::add(part, mul(load_part(g + i, t.dim - i), value));
          };
          const auto row = rows.at(k);
          if (row.cached) FloatRow<Fp32>::each(row.at, t.dim, add_product);
          else Row::each(row.at, t.dim, add_product);
          result[k] = sum_lanes(parts);
        }
      }
    });
  });
  return 0;
}

}  // namespace simd
