// One training step of the rows in bags ("Mixed-Precision Embedding Using a Cache", Algorithm 2);
// ops/embedding/__init__.py defines the sequence of rounded operations. Threads own sets of the cache (or
// rows, without one), so what they do does not depend on their number.
#pragma once

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__unix__)
#include <unistd.h>
#endif

#include <cmath>

#include "all_finite.h"
#include "embedding_cache.h"
#include "float_mode.h"

namespace simd {

constexpr int64_t GRADIENTS_AHEAD = 8;
// Looked-up rows of a thread, in ascending order, those of a row as they came: row << 32 | source. That is where a
// lookup's gradient begins, or its position where lookups have weights.
class RowOrder {
 public:
  // Room for `count`, and for one that is not taken; none yet.
  void clear(int64_t count) {
    entries_.resize(count + 1, UNSET);
    other_.resize(count + 1, UNSET);
    size_ = 0;
  }
  // Appends entry(k) of the k from first to last that are taken: without a branch, which no processor could foresee,
  // and counted apart from the entries, which the compiler takes for what may be the count.
  template <class Entry, class Taken>
  void append(int64_t first, int64_t last, Entry entry, Taken taken) {
    uint64_t* const to = entries_.data();
    int64_t size = size_;
    for (int64_t k = first; k < last; ++k) {
      to[size] = entry(k);
      size += taken(k);
    }
    size_ = size;
  }
  void sort(int64_t rows) {
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
    starts_.resize(size_ + 1, UNSET);
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
      entries_.swap(other_);
    }
  }

  Buffer<uint64_t> entries_, other_;
  Buffer<uint32_t> starts_;
  int64_t size_ = 0, runs_ = 0;
};

// The features of each table, in their order.
class FeaturesOf {
 public:
  FeaturesOf(const subulp_lookups& l, int64_t tables) : begin_(tables + 1), features_(l.features, UNSET) {
    for (int64_t f = 0; f < l.features; ++f) ++begin_[l.table[f]];
    int64_t end = 0;
    for (int64_t t = 0; t <= tables; ++t) begin_[t] = end += begin_[t];
    // Each begins where the last of those of its table has been put.
    for (int64_t f = l.features; f-- > 0;) features_[--begin_[l.table[f]]] = f;
  }
  const int64_t* begin(int64_t table) const { return features_.data() + begin_[table]; }
  const int64_t* end(int64_t table) const { return begin(table + 1); }

 private:
  Buffer<int64_t> begin_, features_;
};

// Whether the gradient of the output, once read, stays in a core's second cache until it is read again.
inline bool stays_near(const subulp_lookups& l, int64_t used) {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  return used >= 2 * l.features * l.batch && l.batch * l.stride * 4 <= sysconf(_SC_LEVEL2_CACHE_SIZE);
#else
  (void)l, (void)used;
  return false;
#endif
}

struct UpdateCall {
  const subulp_lookups& lookups;
  const FeaturesOf& features;
  const float* grad;
  bool gradients_are_near;  // not to be asked for
  const uint32_t* grad_at;  // of each position: where its bag's gradient begins
  const uint16_t* owner;    // of each position, if there are several threads: the one that updates its row
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
        memory_(5 * width_),
        waiting_numbers_(Row::is_chain ? WAITING * width_ : 0) {
    float* const m = memory_.data();
    x_ = m, leaving_ = m + width_, decayed_ = m + 2 * width_, sums_[0] = m + 3 * width_, sums_[1] = m + 4 * width_;
  }

  void run(const RowOrder& order) {
    const int64_t runs = order.runs();
    for (int64_t r = 0; r < std::min(2 * AHEAD, runs); ++r) announce(order.row(order.start(r)));
    for (int64_t r = 0; r < std::min(AHEAD, runs); ++r) bring(order, r);
    for (int64_t r = 0; r < std::min(SOON, runs); ++r) fetch_accumulator(order.row(order.start(r)));
    // A row's factor comes of a chain of operations, which the processor works on beside the row before.
    Gradient next = runs ? gradient_of(order, 0) : Gradient{};
    for (int64_t r = 0; r < runs; ++r) {
      const int64_t place = places_[r % AHEAD];
      const Gradient own = next;
      if (r + 2 * AHEAD < runs) announce(order.row(order.start(r + 2 * AHEAD)));
      if (r + AHEAD < runs) bring(order, r + AHEAD);
      if (r + SOON < runs) fetch_accumulator(order.row(order.start(r + SOON)));
      const int64_t first = order.start(r), last = order.start(r + 1);
      if (r + 1 < runs) next = gradient_of(order, r + 1);
      update(order.row(first), static_cast<uint32_t>(last - first), place, own);
    }
    encode_waiting();
  }
  int64_t evictions = 0;
  bool known = true;  // whether all tags of full sets are rows of the table

 private:
  struct Gradient {
    const float* summed;  // of a row's lookups
    float factor;         // what it is multiplied by, but for Adagrad
  };

  bool is_row(int32_t tag) {
    const bool found = static_cast<uint32_t>(tag) < static_cast<uint64_t>(t_.rows);
    known &= found;
    return found;
  }
  // Counts and accumulators are asked for as this core's own. Lines of them hold rows of other threads too: where
  // cores share no cache, a write waits for what another core last wrote there.
  void announce(int64_t row) const {
    if (t_.sets) {
      const int64_t set = set_of(t_, static_cast<uint32_t>(row));
      prefetch(t_.tags + set * t_.ways, t_.ways * 4);
      if (t_.floors) fetch_line(t_.floors + set);
    }
    if (t_.counts) prefetch_own(t_.counts + row, sizeof *t_.counts);
  }
  // Not in the same breath as the row's count. Both are four bytes a row, so where both arrays begin at the same place
  // of a page they lie at the same place of one, and of two such lines asked for together Zen 4 had the later one late.
  void fetch_accumulator(int64_t row) const {
    if (t_.rule == SUBULP_ROWWISE_ADAGRAD) prefetch_own(t_.accumulator + row, sizeof *t_.accumulator);
  }

  void bring(const RowOrder& order, int64_t run) {
    const int64_t start = order.start(run), row = order.row(start), place = find_row(t_, row);
    places_[run % AHEAD] = place;
    if (place < 0) prefetch_own(stored_row(t_, row), t_.row_bytes);
    else prefetch_own(t_.cache + place * t_.dim, t_.dim * 4);
    if (t_.rule == SUBULP_ADAGRAD) prefetch_own(t_.accumulator + row * t_.dim, t_.dim * 4);
    if (place >= 0 || !t_.sets || !t_.counts) return;
    // A row that may enter the cache is compared with all of its set, if that is full.
    const int64_t set = set_of(t_, static_cast<uint32_t>(row)), lookups = order.start(run + 1) - start;
    if (t_.counts[row] + lookups <= t_.floors[set]) return;
    const int32_t* const tags = t_.tags + set * t_.ways;
    if (find_tag(tags, t_.ways, SUBULP_EMPTY) >= 0) return;
    for (int w = 0; w < t_.ways; ++w) fetch_line(t_.counts + tags[w]);
  }

  // Of a row's lookups, summed in their order, span by span. One alone is read where it lies: optimize() adds the
  // zero that a sum begins with.
  Gradient gradient_of(const RowOrder& order, int64_t run) {
    const int64_t first = order.start(run), last = order.start(run + 1);
    const bool weighted = call_.lookups.weights != nullptr;
    const bool near = call_.gradients_are_near;
    for (int64_t e = first; e < last && (weighted || !near); ++e) {
      if (e + 2 * GRADIENTS_AHEAD >= order.size()) break;
      if (weighted) fetch_line(call_.grad_at + order.source(e + 2 * GRADIENTS_AHEAD));
      if (!near) prefetch(gradient(order.source(e + GRADIENTS_AHEAD)), t_.dim * 4);
    }
    const float* summed = sums_[run % 2];
    if (last - first == 1 && direct_ && !weighted) summed = gradient(order.source(first));
    else if (weighted) merge_columns<WIDEST, true>(0, order, first, last, sums_[run % 2]);
    else merge_columns<WIDEST, false>(0, order, first, last, sums_[run % 2]);
    return {summed, t_.weight_decay == 0.0f ? factor_of(order.row(first), summed) : 0.0f};
  }

  template <int N, bool weighted>
  void merge_columns(int64_t i, const RowOrder& order, int64_t first, int64_t last, float* to) {
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
      for (int v = 0; v < N; ++v) store_f32(to + i + v * W, total[v]);
    }
    if constexpr (N > 1) merge_columns<N / 2, weighted>(i, order, first, last, to);
  }
  const float* gradient(uint32_t source) const {
    return call_.grad + (call_.lookups.weights ? call_.grad_at[source] : source);
  }

  // `place` is where the row was in the cache some rows before. No other row's update brings it there.
  void update(int64_t row, uint32_t lookups, int64_t place, Gradient g) {
    if (t_.counts) {
      const uint32_t total = static_cast<uint32_t>(t_.counts[row]) + lookups;
      t_.counts[row] = static_cast<int32_t>(std::min<uint32_t>(total, SUBULP_COUNT_LIMIT));
    }
    if (t_.sets) {
      if (place >= 0 && t_.tags[place] == static_cast<int32_t>(row))
        return keep(place, row, FloatRow<Fp32>::Reader(cached(place)), g);
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
        return keep(first + way, row, typename Row::Reader(stored_row(t_, row)), g);
      }
    }
    const typename Row::Reader stored(stored_row(t_, row));
    if constexpr (Row::is_chain) {
      optimize(row, stored, g, waiting_numbers_.data() + waiting_ * width_);
      waiting_rows_[waiting_++] = row;
      if (waiting_ == WAITING) encode_waiting();
    } else {
      optimize(row, stored, g, x_);
      encode(row, x_, SUBULP_BYPASS_SLOT);
    }
  }

  // Rows that stay where they are stored. Between rows of other kinds, which no processor foresees, a chain of operations
  // is waited for to its end; one after the other, several of them are under way.
  void encode_waiting() {
    for (int64_t i = 0; i < waiting_; ++i)
      encode(waiting_rows_[i], waiting_numbers_.data() + i * width_, SUBULP_BYPASS_SLOT);
    waiting_ = 0;
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
  void keep(int64_t place, int64_t row, const Reader& from, Gradient g) {
    float* const to = t_.cache + place * t_.dim;
    optimize(row, from, g, direct_ ? to : x_);
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

  // What a gradient is multiplied by, after its squares have been added to the row's accumulator.
  float factor_of(int64_t row, const float* summed) {
    if (t_.rule != SUBULP_ROWWISE_ADAGRAD) return t_.lr;
    F parts[PARTS];
    for (F& part : parts) part = f32(0.0f);
    for (int64_t i = 0; i < width_; i += ROW_LANES)
      for (int p = 0; p < PARTS; ++p) {
        const F g = load_f32(summed + i + p * W);
        parts[p] = simd::add(parts[p], mul(g, g));
      }
    const float total = t_.accumulator[row] + sum_lanes(parts) / static_cast<float>(t_.dim);
    t_.accumulator[row] = total;
    return t_.lr / (std::sqrt(total) + t_.eps);
  }

  // The row with its gradient applied; `x` has room for padding.
  template <class Reader>
  void optimize(int64_t row, const Reader from, Gradient gradient, float* x) {
    if (t_.weight_decay != 0.0f) {
      each_vector(from, t_.dim, [&](int64_t i, F value) {
        store_f32(decayed_ + i, simd::add(load_f32(gradient.summed + i), mul(value, f32(t_.weight_decay))));
      });
      std::fill(decayed_ + t_.dim, decayed_ + width_, 0.0f);
      gradient = {decayed_, factor_of(row, decayed_)};
    }
    const float* const summed = gradient.summed;
    if (t_.rule == SUBULP_ADAGRAD) {
      const F lr = f32(t_.lr), eps = f32(t_.eps);
      float* const kept = t_.accumulator + row * t_.dim;
      each_vector(from, t_.dim, [&](int64_t i, F value) {
        const F g = simd::add(f32(0.0f), load_f32(summed + i));
        const F total = simd::add(load_part(kept + i, t_.dim - i), mul(g, g));
        store_part(kept + i, total, t_.dim - i);
        store_f32(x + i, sub(value, div(mul(g, lr), simd::add(sqrt(total), eps))));
      });
      return;
    }
    const F factor = f32(gradient.factor);
    each_vector(from, t_.dim, [=](int64_t i, F value) {
      store_f32(x + i, sub(value, mul(simd::add(f32(0.0f), load_f32(summed + i)), factor)));
    });
  }

  const subulp_table& t_;
  const UpdateCall& call_;
  const int64_t width_;
  const bool direct_;  // a cached row can be worked on in its place
  RowBits bits_;
  static constexpr int64_t SOON = AHEAD * 3 / 4;  // rows between the request for an accumulator and its use
  int64_t places_[AHEAD];                         // in the cache, of the rows ahead
  static constexpr int64_t WAITING = 8;
  int64_t waiting_ = 0, waiting_rows_[WAITING];
  Buffer<float> memory_, waiting_numbers_;
  float *x_, *leaving_, *decayed_, *sums_[2];
};

// The thread that updates a row. Neighbouring rows, which may be equally popular, go to different ones.
inline uint16_t owner_of(const subulp_table& t, uint32_t row, uint32_t threads) {
  const uint32_t owned = t.sets ? static_cast<uint32_t>(set_of(t, row)) : row;
  return static_cast<uint16_t>(uint64_t{owned * 0x9E3779B1u} * threads >> 32);
}

// The share of a thread in a table: how many rows it evicts, or SUBULP_BAD_TAGS.
inline int64_t update_share(const subulp_table& t, int64_t index, const UpdateCall& call, uint32_t thread,
                            uint32_t threads, RowOrder* order) {
  const subulp_lookups& l = call.lookups;
  const int64_t *const begin = call.features.begin(index), *const end = call.features.end(index);
  int64_t count = 0;
  for (const int64_t* f = begin; f < end; ++f) count += l.offsets[(*f + 1) * l.batch] - l.offsets[*f * l.batch];
  order->clear(count);
  for (const int64_t* f = begin; f < end; ++f) {
    const int64_t first = l.offsets[*f * l.batch], last = l.offsets[(*f + 1) * l.batch];
    const auto entry = [&](int64_t k) {
      const uint32_t source = l.weights ? static_cast<uint32_t>(k) : call.grad_at[k];
      return static_cast<uint64_t>(l.values[k]) << 32 | source;
    };
    order->append(first, last, entry, [&](int64_t k) { return threads == 1 || call.owner[k] == thread; });
  }
  order->sort(t.rows);
  int64_t evictions = 0;
  with_row_type(t.dtype, [&](auto type) {
    TableUpdate<decltype(type)> update(t, call);
    update.run(*order);
    evictions = update.known ? update.evictions : int64_t{SUBULP_BAD_TAGS};
  });
  return evictions;
}

inline int64_t run_embedding_update(const subulp_table* tables, int64_t count, const subulp_lookups& l,
                                    const float* grad, int64_t* evictions, uint32_t seed, uint32_t step, int threads) {
  if (const int64_t fault = fault_of(tables, l)) return fault;
  const int64_t bags = l.features * l.batch, used = bags ? l.offsets[bags] : 0;
  threads = used < 256 ? 1 : std::min(threads, UINT16_MAX);
  Buffer<uint32_t> grad_at(used, UNSET);
  Buffer<uint16_t> owner(threads > 1 ? used : 0, UNSET);
  const FeaturesOf features(l, count);
  const UpdateCall call{l, features, grad, stays_near(l, used), grad_at.data(), owner.data(), seed, step};
  bool known = true;
  for (int64_t i = 0; i < count; ++i) known &= with_row_type(tables[i].dtype, [](auto) {});
  if (!known || used > INT64_C(0xFFFFFFFF) || l.batch * l.stride > INT64_C(0xFFFFFFFF)) return -1;
  const int64_t numel = l.batch * l.stride;
  const int32_t fp32 = SUBULP_FP32;
  const void *gradients = grad, *weights = l.weights;
  if (!run_all_finite(1, &numel, &gradients, &fp32, threads)) return SUBULP_BAD_GRADIENT;
  if (weights && !run_all_finite(1, &l.count, &weights, &fp32, threads)) return SUBULP_BAD_WEIGHTS;
  int64_t damaged = 0;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
    const IeeeMode ieee;
#if defined(_OPENMP)
    const uint32_t thread = static_cast<uint32_t>(omp_get_thread_num());
    const uint32_t team = static_cast<uint32_t>(omp_get_num_threads());
#else
    const uint32_t thread = 0, team = 1;
#endif
    // A run of the bags, feature by feature: no bag is divided by the batch.
    int64_t bag = bags * thread / team;
    const int64_t stop = bags * (thread + 1) / team;
    for (int64_t feature = bag < stop ? bag / l.batch : 0; bag < stop; ++feature) {
      const int64_t begin = feature * l.batch, end = std::min(begin + l.batch, stop);
      const subulp_table& t = tables[l.table[feature]];
      for (; bag < end; ++bag) {
        const uint32_t at = static_cast<uint32_t>(l.column[feature] + (bag - begin) * l.stride);
        for (int64_t k = l.offsets[bag]; k < l.offsets[bag + 1]; ++k) {
          grad_at[k] = at;
          if (team > 1) owner[k] = owner_of(t, static_cast<uint32_t>(l.values[k]), team);
        }
      }
    }
#if defined(_OPENMP)
#pragma omp barrier
#endif
    RowOrder order;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t evicted = update_share(tables[i], i, call, thread, team, &order);
      int64_t& total = evicted < 0 ? damaged : evictions[i];
      const int64_t more = evicted < 0 ? 1 : evicted;
#if defined(_OPENMP)
#pragma omp atomic
#endif
      total += more;
    }
  }
  return damaged ? SUBULP_BAD_TAGS : 0;
}

}  // namespace simd
