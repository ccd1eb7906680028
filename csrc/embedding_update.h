// One training step of the rows in bags ("Mixed-Precision Embedding Using a Cache", Algorithm 2);
// ops/embedding/__init__.py defines the sequence of rounded operations. Threads own sets of the cache (or
// rows, without one), so what they do does not depend on their number.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cmath>

#include "all_finite.h"
#include "embedding_cache.h"
#include "float_mode.h"

namespace simd {

constexpr int64_t GRADIENTS_AHEAD = 8;
// A lookup: row << 32 | its source. That is where its gradient begins, or its position where lookups have weights.
inline uint64_t entry_of(int64_t row, uint32_t source) { return static_cast<uint64_t>(row) << 32 | source; }

// Lookups of one table by row, those of a row as they were.
class RowOrder {
 public:
  // Sorts `size` entries; `other` has room for as many.
  void sort(uint64_t* entries, uint64_t* other, int64_t size, int64_t rows) {
    entries_ = entries;
    other_ = other;
    size_ = size;
    if (size_ < 128) {
      for (int64_t i = 1; i < size_; ++i) {
        const uint64_t e = entries_[i];
        int64_t j = i;
        for (; j && entries_[j - 1] >> 32 > e >> 32; --j) entries_[j] = entries_[j - 1];
        entries_[j] = e;
      }
    } else {
      sort_by_digits(rows);
    }
    starts_.resize(size_ + 1);
    runs_ = 0;
    int64_t before = -1;
    for (int64_t i = 0; i < size_; ++i) {
      starts_[runs_] = static_cast<uint32_t>(i);
      runs_ += row(i) != before;
      before = row(i);
    }
    starts_[runs_] = static_cast<uint32_t>(size_);
  }
  int64_t row(int64_t i) const { return static_cast<int64_t>(entries_[i] >> 32); }
  uint32_t source(int64_t i) const { return static_cast<uint32_t>(entries_[i]); }
  int64_t size() const { return size_; }
  // Runs of one row.
  int64_t runs() const { return runs_; }
  int64_t start(int64_t run) const { return starts_[run]; }

 private:
  static constexpr int DIGIT = 11, DIGITS = 3;  // bits of a digit; digits of a row number
  static constexpr uint64_t MASK = (1u << DIGIT) - 1;

  static int64_t digit_of(uint64_t entry, int digit) { return entry >> (32 + digit * DIGIT) & MASK; }
  void sort_by_digits(int64_t rows) {
    int digits = 0;
    while (digits < DIGITS && static_cast<uint64_t>(rows - 1) >> digits * DIGIT) ++digits;
    // How often each digit is there, then where its entries begin. The sums do not depend on the order.
    uint32_t begin[DIGITS][1 << DIGIT];
    std::memset(begin, 0, static_cast<size_t>(digits) * sizeof *begin);
    for (int64_t i = 0; i < size_; ++i)
      for (int d = 0; d < digits; ++d) ++begin[d][digit_of(entries_[i], d)];
    for (int d = 0; d < digits; ++d) {
      uint32_t sum = 0;
      for (uint32_t& b : begin[d]) {
        const uint32_t count = b;
        b = sum;
        sum += count;
      }
      for (int64_t i = 0; i < size_; ++i) other_[begin[d][digit_of(entries_[i], d)]++] = entries_[i];
      std::swap(entries_, other_);
    }
  }

  uint64_t *entries_ = nullptr, *other_ = nullptr;
  Buffer<uint32_t> starts_;
  int64_t size_ = 0, runs_ = 0;
};

struct UpdateCall {
  const subulp_lookups& lookups;
  const float* grad;
  const uint32_t* grad_at;  // of each position, where lookups have weights: where its bag's gradient begins
  uint32_t seed;
  uint32_t step;
};

template <class Row>
class TableUpdate {
 public:
  TableUpdate(const subulp_table& t, const UpdateCall& call)
      : t_(t),
        call_(call),
        width_(padded(t.dim)),
        direct_(t.dim == width_),
        bits_(call.seed, t.stream, call.step, t.dim),
        memory_(3 * width_) {
    x_ = memory_.data();
    g_ = x_ + width_;
    leaving_ = g_ + width_;
  }

  void run(const RowOrder& order) {
    const int64_t runs = order.runs();
    for (int64_t r = 0; r < std::min(2 * AHEAD, runs); ++r) announce(order.row(order.start(r)));
    for (int64_t r = 0; r < std::min(AHEAD, runs); ++r) bring(order, r);
    for (int64_t r = 0; r < runs; ++r) {
      const int64_t place = places_[r % AHEAD];
      if (r + 2 * AHEAD < runs) announce(order.row(order.start(r + 2 * AHEAD)));
      if (r + AHEAD < runs) bring(order, r + AHEAD);
      const int64_t first = order.start(r), last = order.start(r + 1);
      summed_ = merge(order, first, last);
      update(order.row(first), static_cast<uint32_t>(last - first), place);
    }
  }
  int64_t evictions = 0;
  bool known = true;  // whether all tags of full sets are rows of the table

 private:
  bool is_row(int32_t tag) {
    const bool found = static_cast<uint32_t>(tag) < static_cast<uint64_t>(t_.rows);
    known &= found;
    return found;
  }
  void announce(int64_t row) const {
    if (t_.sets) {
      const int64_t set = set_of(t_, static_cast<uint32_t>(row));
      prefetch(t_.tags + set * t_.ways, t_.ways * 4);
      if (t_.floors) fetch_line(t_.floors + set);
    }
    if (t_.counts) fetch_own_line(t_.counts + row);
    if (t_.rule == SUBULP_ROWWISE_ADAGRAD) fetch_own_line(t_.accumulator + row);
  }

  void bring(const RowOrder& order, int64_t run) {
    const int64_t start = order.start(run), row = order.row(start), place = find_row(t_, row);
    places_[run % AHEAD] = place;
    if (place < 0) prefetch_own(stored_row(t_, row), t_.row_bytes);
    else prefetch_own(t_.cache + place * t_.dim, t_.dim * 4);
    if (t_.rule == SUBULP_ADAGRAD) prefetch_own(t_.accumulator + row * t_.dim, t_.dim * 4);
    if (place >= 0 || !t_.sets || !t_.counts) return;
    // A row that may enter the cache is compared with all of its set.
    const int64_t set = set_of(t_, static_cast<uint32_t>(row)), lookups = order.start(run + 1) - start;
    if (t_.counts[row] + lookups <= t_.floors[set]) return;
    const int32_t* const tags = t_.tags + set * t_.ways;
    for (int w = 0; w < t_.ways; ++w) fetch_line(t_.counts + tags[w]);
  }

  // Where the gradients of a row's lookups are, summed in their order, span by span. One alone is read where it
  // lies; optimize() adds the zero that a sum begins with.
  const float* merge(const RowOrder& order, int64_t first, int64_t last) {
    const bool weighted = call_.lookups.weights != nullptr;
    for (int64_t e = first; e < last; ++e) {
      if (e + 2 * GRADIENTS_AHEAD >= order.size()) break;
      if (weighted) fetch_line(call_.grad_at + order.source(e + 2 * GRADIENTS_AHEAD));
      prefetch(gradient(order.source(e + GRADIENTS_AHEAD)), t_.dim * 4);
    }
    if (last - first == 1 && direct_ && !weighted && t_.weight_decay == 0.0f) return gradient(order.source(first));
    if (weighted) merge_columns<WIDEST, true>(0, order, first, last);
    else merge_columns<WIDEST, false>(0, order, first, last);
    return g_;
  }

  template <int N, bool weighted>
  void merge_columns(int64_t i, const RowOrder& order, int64_t first, int64_t last) {
    for (; N == 1 ? i < t_.dim : i + N * W <= t_.dim; i += N * W) {
      F total[N];
      for (int v = 0; v < N; ++v) total[v] = f32(0.0f);
      for (int64_t begin = first; begin < last; begin += SUBULP_GRADIENT_SPAN) {
        F sum[N];
        for (int v = 0; v < N; ++v) sum[v] = f32(0.0f);
        const int64_t end = std::min<int64_t>(begin + SUBULP_GRADIENT_SPAN, last);
        for (int64_t e = begin; e < end; ++e) {
          const uint32_t k = order.source(e);
          const float* const from = gradient(k) + i;
          for (int v = 0; v < N; ++v) {
            F g = N == 1 ? load_part(from, t_.dim - i) : load_f32(from + v * W);
            if (weighted) g = mul(g, f32(call_.lookups.weights[k]));
            sum[v] = simd::add(sum[v], g);
          }
        }
        for (int v = 0; v < N; ++v) total[v] = simd::add(total[v], sum[v]);
      }
      for (int v = 0; v < N; ++v) store_f32(g_ + i + v * W, total[v]);
    }
    if constexpr (N > 1) merge_columns<N / 2, weighted>(i, order, first, last);
  }
  const float* gradient(uint32_t source) const {
    return call_.grad + (call_.lookups.weights ? call_.grad_at[source] : source);
  }

  // `place` is where the row was in the cache some rows before. No other row's update brings it there.
  void update(int64_t row, uint32_t lookups, int64_t place) {
    if (t_.counts) {
      const uint32_t total = static_cast<uint32_t>(t_.counts[row]) + lookups;
      t_.counts[row] = static_cast<int32_t>(std::min<uint32_t>(total, SUBULP_COUNT_LIMIT));
    }
    if (t_.sets) {
      if (place >= 0 && t_.tags[place] == static_cast<int32_t>(row))
        return keep(place, row, FloatRow<Fp32>::Reader(cached(place)));
      const int64_t set = set_of(t_, static_cast<uint32_t>(row)), first = set * t_.ways;
      const int32_t* const tags = t_.tags + first;
      int way = find_tag(tags, t_.ways, SUBULP_EMPTY);
      if (way < 0) {
        way = loser(set, row);
        if (way >= 0 && !is_row(tags[way])) way = -1;
        if (way >= 0) evict(first + way, row);
      }
      if (way >= 0) {
        t_.tags[first + way] = static_cast<int32_t>(row);
        return keep(first + way, row, typename Row::Reader(stored_row(t_, row)));
      }
    }
    optimize(row, typename Row::Reader(stored_row(t_, row)), x_);
    encode(row, x_, SUBULP_BYPASS_SLOT);
  }

  // The way that has to be left to `row`, or -1: the row bypasses the cache.
  int loser(int64_t set, int64_t row) {
    const int32_t* const tags = t_.tags + set * t_.ways;
    int least = 0;
    if (t_.counts) {
      const int32_t own = t_.counts[row];
      if (own <= t_.floors[set]) return -1;
      int32_t low = SUBULP_COUNT_LIMIT;
      for (int w = 0; w < t_.ways; ++w) {
        if (!is_row(tags[w])) return -1;
        const int32_t count = t_.counts[tags[w]];
        if (count < low) low = count, least = w;
      }
      t_.floors[set] = low;
      return own > low ? least : -1;
    }
    // Direct-mapped LRU: the current row always wins.
    if (!t_.stamps) return 0;
    const int32_t* const stamps = t_.stamps + set * t_.ways;
    for (int w = 1; w < t_.ways; ++w)
      if (stamps[w] < stamps[least]) least = w;
    return static_cast<int32_t>(call_.step) > stamps[least] ? least : -1;
  }

  // Evicts the resident of a place for `row`.
  void evict(int64_t place, int64_t row) {
    float* leaving = t_.cache + place * t_.dim;
    if (!direct_) {
      std::memcpy(leaving_, leaving, static_cast<size_t>(t_.dim) * sizeof(float));
      leaving = leaving_;
    }
    const int64_t evicted = t_.tags[place];
    encode(evicted, leaving, evicted > row ? SUBULP_EVICT_SLOT : SUBULP_BYPASS_SLOT);
    ++evictions;
  }

  // The row, read from where it was, updated into its place of the cache.
  template <class Reader>
  void keep(int64_t place, int64_t row, const Reader& from) {
    float* const to = t_.cache + place * t_.dim;
    optimize(row, from, direct_ ? to : x_);
    if (!direct_) std::memcpy(to, x_, static_cast<size_t>(t_.dim) * sizeof(float));
    if (t_.stamps) t_.stamps[place] = static_cast<int32_t>(call_.step);
  }
  const char* cached(int64_t place) const { return reinterpret_cast<const char*>(t_.cache + place * t_.dim); }

  void encode(int64_t row, float* x, uint32_t slot) {
    const bool all = t_.taken == t_.period;  // rows taken, so that these are the whole table's
    const int64_t whole = all ? row : row / t_.taken * t_.period + t_.first + row % t_.taken;
    const uint64_t first = static_cast<uint64_t>(whole * t_.whole_dim + t_.column);
    const RowRounding rounding{t_.stochastic ? &bits_ : nullptr, first, slot};
    Row::encode(x, t_.dim, stored_row(t_, row), rounding);
  }

  // The row with its gradient applied; `x` has room for padding.
  template <class Reader>
  void optimize(int64_t row, const Reader from, float* x) {
    const F lr = f32(t_.lr), eps = f32(t_.eps);
    const float* const summed = summed_;  // a copy, for the compiler must take every store for one to it
    if (t_.weight_decay != 0.0f) {
      each_vector(from, t_.dim, [&](int64_t i, F value) {
        store_f32(g_ + i, simd::add(load_f32(g_ + i), mul(value, f32(t_.weight_decay))));
      });
      std::fill(g_ + t_.dim, g_ + width_, 0.0f);
    }
    if (t_.rule == SUBULP_ADAGRAD) {
      float* const kept = t_.accumulator + row * t_.dim;
      each_vector(from, t_.dim, [&](int64_t i, F value) {
        const F g = simd::add(f32(0.0f), load_f32(summed + i));
        const F total = simd::add(load_part(kept + i, t_.dim - i), mul(g, g));
        store_part(kept + i, total, t_.dim - i);
        store_f32(x + i, sub(value, div(mul(g, lr), simd::add(sqrt(total), eps))));
      });
      return;
    }
    F factor = lr;
    if (t_.rule == SUBULP_ROWWISE_ADAGRAD) {
      F parts[PARTS];
      for (F& part : parts) part = f32(0.0f);
      for (int64_t i = 0; i < width_; i += ROW_LANES)
        for (int p = 0; p < PARTS; ++p) {
          const F g = load_f32(summed + i + p * W);
          parts[p] = simd::add(parts[p], mul(g, g));
        }
      const float total = t_.accumulator[row] + sum_lanes(parts) / static_cast<float>(t_.dim);
      t_.accumulator[row] = total;
      factor = f32(t_.lr / (std::sqrt(total) + t_.eps));
    }
    each_vector(from, t_.dim, [=](int64_t i, F value) {
      store_f32(x + i, sub(value, mul(simd::add(f32(0.0f), load_f32(summed + i)), factor)));
    });
  }

  const subulp_table& t_;
  const UpdateCall& call_;
  const int64_t width_;
  const bool direct_;  // a cached row can be worked on in its place
  RowBits bits_;
  int64_t places_[AHEAD];  // in the cache, of the rows ahead
  Buffer<float> memory_;
  float *x_, *g_, *leaving_;
  const float* summed_ = nullptr;  // the gradient of the row at hand
};

// The thread that updates a row. Neighbouring rows, which may be equally popular, go to different ones.
inline uint16_t owner_of(const subulp_table& t, uint32_t row, uint32_t threads) {
  const uint32_t owned = t.sets ? static_cast<uint32_t>(set_of(t, row)) : row;
  return static_cast<uint16_t>(uint64_t{owned * 0x9E3779B1u} * threads >> 32);
}

// Lookups shared out among owners, the threads that update their rows: each one's table by table, in their order.
class Shares {
 public:
  Shares(const subulp_table* tables, int64_t count, const subulp_lookups& l, int64_t used, int threads)
      : tables_(tables),
        count_(count),
        l_(l),
        entries_(used, UNSET),
        other_(used, UNSET),
        grad_at_(l.weights ? used : 0, UNSET),
        owner_(threads > 1 ? used : 0, UNSET) {
    const int64_t bags = l.features * l.batch;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
#if defined(_OPENMP)
      const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
#else
      const int64_t thread = 0, team = 1;
#endif
      // Of each table and owner: how many lookups of this thread's bags go there, then where the next one does.
      Buffer<uint32_t> next(count * team);
      int64_t bad = INT64_MAX;
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
      for (int64_t bag = 0; bag < bags; ++bag) bad = std::min(bad, count_bag(bag, team, next.data()));
#if defined(_OPENMP)
#pragma omp single
#endif
      {
        owners_ = team;
        begin_.resize(team * count * team + 1);
      }
      for (int64_t i = 0; i < count; ++i)
        for (int64_t o = 0; o < team; ++o) begin_[place(o, i) + thread] = next[i * team + o];
#if defined(_OPENMP)
#pragma omp critical(subulp_shares)
#endif
      bad_ = std::min(bad_, bad);
#if defined(_OPENMP)
#pragma omp barrier
#pragma omp single
#endif
      {
        uint32_t sum = 0;
        for (int64_t p = 0; p < begin_.size(); ++p) {
          const uint32_t own = begin_[p];
          begin_[p] = sum;
          sum += own;
        }
      }
      for (int64_t i = 0; i < count; ++i)
        for (int64_t o = 0; o < team; ++o) next[i * team + o] = begin_[place(o, i) + thread];
      // The same bags as before.
#if defined(_OPENMP)
#pragma omp for schedule(static)
#endif
      for (int64_t bag = 0; bag < bags; ++bag) write_bag(bag, team, next.data());
    }
  }
  // As fault_of() returns it.
  int64_t fault() const { return bad_ == INT64_MAX ? 0 : bad_ + 1; }
  int64_t owners() const { return owners_; }
  const uint32_t* grad_at() const { return grad_at_.data(); }
  // Sorts an owner's lookups of a table.
  void sort(int64_t owner, int64_t table, RowOrder* order) {
    const int64_t first = begin_[place(owner, table)], last = begin_[place(owner, table + 1)];
    order->sort(entries_.data() + first, other_.data() + first, last - first, tables_[table].rows);
  }

 private:
  int64_t place(int64_t owner, int64_t table) const { return (owner * count_ + table) * owners_; }

  // The position of the first row that does not exist.
  int64_t count_bag(int64_t bag, int64_t team, uint32_t* next) {
    const int64_t table = l_.table[bag / l_.batch], first = l_.offsets[bag], last = l_.offsets[bag + 1];
    const subulp_table& t = tables_[table];
    uint64_t largest = 0;
    for (int64_t k = first; k < last; ++k) {
      const uint64_t row = static_cast<uint64_t>(l_.values[k]);
      largest = std::max(largest, row);
      const uint16_t owner = team > 1 ? owner_of(t, static_cast<uint32_t>(row), static_cast<uint32_t>(team)) : 0;
      if (team > 1) owner_[k] = owner;
      ++next[table * team + owner];
    }
    if (first == last || largest < static_cast<uint64_t>(t.rows)) return INT64_MAX;
    int64_t k = first;
    while (static_cast<uint64_t>(l_.values[k]) < static_cast<uint64_t>(t.rows)) ++k;
    return k;
  }
  void write_bag(int64_t bag, int64_t team, uint32_t* next) {
    const int64_t feature = bag / l_.batch, table = l_.table[feature];
    const uint32_t at = static_cast<uint32_t>(l_.column[feature] + bag % l_.batch * l_.stride);
    for (int64_t k = l_.offsets[bag]; k < l_.offsets[bag + 1]; ++k) {
      uint32_t& to = next[table * team + (team > 1 ? owner_[k] : 0)];
      entries_[to++] = entry_of(l_.values[k], l_.weights ? static_cast<uint32_t>(k) : at);
      if (l_.weights) grad_at_[k] = at;
    }
  }

  const subulp_table* const tables_;
  const int64_t count_;
  const subulp_lookups& l_;
  Buffer<uint64_t> entries_, other_;
  Buffer<uint32_t> grad_at_;
  Buffer<uint16_t> owner_;   // of each position, if there are several
  Buffer<uint32_t> begin_;   // of each owner's lookups of each table, from each thread's bags
  int64_t owners_ = 0, bad_ = INT64_MAX;
};

// How many rows of a table are evicted, or SUBULP_BAD_TAGS.
inline int64_t update_rows(const subulp_table& t, const UpdateCall& call, const RowOrder& order) {
  int64_t evictions = 0;
  with_row_type(t.dtype, [&](auto type) {
    TableUpdate<decltype(type)> update(t, call);
    update.run(order);
    evictions = update.known ? update.evictions : int64_t{SUBULP_BAD_TAGS};
  });
  return evictions;
}

inline int64_t run_embedding_update(const subulp_table* tables, int64_t count, const subulp_lookups& l,
                                    const float* grad, int64_t* evictions, uint32_t seed, uint32_t step, int threads) {
  if (!offsets_fit(l)) return SUBULP_BAD_OFFSETS;
  bool known = true;
  for (int64_t i = 0; i < count; ++i) known &= with_row_type(tables[i].dtype, [](auto) {});
  const int64_t bags = l.features * l.batch, used = bags ? l.offsets[bags] : 0;
  if (!known || used > INT64_C(0xFFFFFFFF) || l.batch * l.stride > INT64_C(0xFFFFFFFF)) return -1;
  threads = used < 256 ? 1 : std::min(threads, UINT16_MAX);
  Shares shares(tables, count, l, used, threads);
  if (const int64_t fault = shares.fault()) return fault;
  const int64_t numel = l.batch * l.stride;
  const int32_t fp32 = SUBULP_FP32;
  const void *gradients = grad, *weights = l.weights;
  if (!run_all_finite(1, &numel, &gradients, &fp32, threads)) return SUBULP_BAD_GRADIENT;
  if (weights && !run_all_finite(1, &l.count, &weights, &fp32, threads)) return SUBULP_BAD_WEIGHTS;
  const UpdateCall call{l, grad, shares.grad_at(), seed, step};
  int64_t damaged = 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
    const IeeeMode ieee;
    RowOrder order;
    // One each. The threads may be fewer than they were.
#if defined(_OPENMP)
#pragma omp for schedule(static, 1)
#endif
    for (int64_t owner = 0; owner < shares.owners(); ++owner) {
      for (int64_t i = 0; i < count; ++i) {
        shares.sort(owner, i, &order);
        const int64_t evicted = update_rows(tables[i], call, order);
        int64_t& total = evicted < 0 ? damaged : evictions[i];
        const int64_t more = evicted < 0 ? 1 : evicted;
#if defined(_OPENMP)
#pragma omp atomic
#endif
        total += more;
      }
    }
  }
  return damaged ? SUBULP_BAD_TAGS : 0;
}

}  // namespace simd
