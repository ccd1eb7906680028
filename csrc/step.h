// One fused optimizer step: decode to FP32 registers, update, encode once (ops/adam and ops/sgd
// define the arithmetic; this is the same sequence of rounded operations).
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#if defined(_OPENMP)
#include <omp.h>
#endif
#include "float_mode.h"
#include "pair.h"
#include "random_bits.h"
#include "tails.h"

// The body of the inner loop must be one piece of code: a call would pass vectors through memory.
#define SUBULP_INLINE __attribute__((always_inline)) inline
#define SUBULP_COLD __attribute__((noinline, cold))

namespace simd {

// ---------------------------------------------------------------------------- what is stored how

// See low_scale in src/subulp/ops/strategy.py.
template <class Format> constexpr float low_scale = std::is_same_v<Format, E4m3> ? SUBULP_E4M3_LOW_SCALE : 1.0f;

enum class Weight { plain, stochastic, kahan, expansion, master, extra_bits, signed_bits };
enum class State { plain, stochastic, expansion };
// Sets of parameter dtypes, by their bytes.
struct Bytes { int least, most; };
namespace dtypes { constexpr Bytes whole = {4, 4}, halves = {2, 2}, narrow = {1, 2}; }

// A strategy, as csrc/subulp.h's table has it.
template <subulp_strategy> struct Strategy;
#define SUBULP_STRATEGY(code, name, weight_, slow_, wide, random_, dtypes_)   \
  template <> struct Strategy<SUBULP_##code> {                                \
    static constexpr Weight weight = Weight::weight_;                         \
    static constexpr State slow = State::slow_;                                 \
    static constexpr bool wide_states = wide, random = random_;               \
    template <class Format> static constexpr bool has =                       \
        dtypes::dtypes_.least <= Format::bytes && Format::bytes <= dtypes::dtypes_.most; \
  };
SUBULP_STRATEGIES(SUBULP_STRATEGY)
#undef SUBULP_STRATEGY

// Formats of narrow states, see fast_format and slow_format in src/subulp/ops/strategy.py.
template <class P> struct FastFormat { using type = P; };
template <> struct FastFormat<Consecutive<Fp16>> { using type = Consecutive<Bf16>; };
template <class P> struct SlowFormat : FastFormat<P> {};
template <> struct SlowFormat<Consecutive<E4m3>> { using type = Consecutive<E5m2>; };

// How a narrow format lies in pairs of vectors; FP32 states are in order, and so is what goes with them.
template <class Format> struct Narrow { using type = Consecutive<Format>; };
template <> struct Narrow<Bf16> { using type = SplitBf16; };

// The formats of a strategy's streams, for parameters of a format.
template <subulp_strategy S, class Format>
struct Layout {
  using Kept = Strategy<S>;
  static constexpr Weight weight = Kept::weight;
  static constexpr bool wide_states = Kept::wide_states;
  static constexpr bool expansion = weight == Weight::expansion;
  static constexpr bool slow_expansion = Kept::slow == State::expansion;
  static constexpr bool signed_tails = weight == Weight::signed_bits;
  static constexpr bool tails = signed_tails || weight == Weight::extra_bits;
  static constexpr bool random = Kept::random;
  static constexpr bool random_parameter = weight == Weight::stochastic || (tails && random);
  static constexpr bool random_slow = Kept::slow == State::stochastic;
  // See dithered in src/subulp/ops/strategy.py.
  static constexpr bool dithered = Kept::slow != State::plain;
  static constexpr bool scaled_states = std::is_same_v<Format, E4m3>;
  using Wide = Consecutive<Fp32>;
  using Param = std::conditional_t<wide_states, Consecutive<Format>, typename Narrow<Format>::type>;
  using Fast = std::conditional_t<wide_states, Wide, typename FastFormat<Param>::type>;
  using Slow = std::conditional_t<wide_states, Wide, typename SlowFormat<Param>::type>;
  // Bytes of the role `extra` for one element; packed bits are moved group by group.
  static constexpr int extra_bytes =
      weight == Weight::master ? 4 : weight == Weight::kahan || expansion ? Format::bytes : 0;
  static constexpr int low_bytes = slow_expansion ? Slow::bytes : 0;
};

struct Pointers {
  char *param, *grad, *fast, *slow, *extra, *low;
};

// What a thread keeps beside the registers.
struct Work {
  RandomBits bits;
  alignas(64) uint32_t tail[BLOCK];
  alignas(64) float grad[BLOCK];
};

// ------------------------------------------------------------------------------------ the rules

struct Adam {
  static constexpr bool has_fast = true;
  F beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, step_size, inv_sqrt_bias2, decay, floor;
  bool coupled, decoupled, floored;

  Adam(const subulp_step& s, const subulp_scalars& t)
      : beta1(f32(s.beta1)), one_minus_beta1(f32(s.one_minus_beta1)), beta2(f32(s.beta2)),
        one_minus_beta2(f32(s.one_minus_beta2)), eps(f32(s.eps)), weight_decay(f32(s.weight_decay)),
        step_size(f32(t.step_size)), inv_sqrt_bias2(f32(t.inv_sqrt_bias2)), decay(f32(t.decay)),
        floor(f32(t.slow_floor)), coupled(!s.decoupled && s.weight_decay != 0.0f), decoupled(s.decoupled && t.decay != 0.0f),
        floored(t.slow_floor != 0.0f) {}

  // Updates the states and returns what is to be subtracted from the parameter.
  SUBULP_INLINE F operator()(F theta, F g, F* m, F* v) const {
    if (coupled) g = add(g, mul(theta, weight_decay));
    *m = add(mul(*m, beta1), mul(g, one_minus_beta1));
    *v = add(mul(*v, beta2), mul(mul(g, one_minus_beta2), g));
    const F known = floored ? max(floor, *v) : *v;
    const F denominator = add(mul(sqrt(known), inv_sqrt_bias2), eps);
    F delta = div(mul(*m, step_size), denominator);
    if (decoupled) delta = add(delta, mul(theta, decay));
    return delta;
  }
};

struct Sgd {
  static constexpr bool has_fast = false;
  F momentum, one_minus_dampening, weight_decay, lr;
  bool coupled, has_momentum, first, nesterov;

  Sgd(const subulp_step& s, const subulp_scalars& t)
      : momentum(f32(s.beta1)), one_minus_dampening(f32(s.one_minus_beta1)), weight_decay(f32(s.weight_decay)),
        lr(f32(t.step_size)), coupled(s.weight_decay != 0.0f), has_momentum(s.slow != nullptr),
        first(t.first != 0), nesterov(s.nesterov != 0) {}

  SUBULP_INLINE F operator()(F theta, F g, F*, F* buffer) const {
    if (coupled) g = add(g, mul(theta, weight_decay));
    if (has_momentum) {
      *buffer = first ? g : add(mul(*buffer, momentum), mul(g, one_minus_dampening));
      g = nesterov ? add(g, mul(*buffer, momentum)) : *buffer;
    }
    return mul(g, lr);
  }
};

// ------------------------------------------------------------------------------------- the pass

template <class Format>
inline void decode_block(const char* from, float* to) {
  for (int i = 0; i < BLOCK; i += W) store_f32(to + i, Format::load(from + i * Format::bytes));
}

inline void decode_gradient(int format, const char* from, float* to) {
  switch (format) {
#define SUBULP_CASE(code, name, Format) case SUBULP_##code: return decode_block<Format>(from, to);
    SUBULP_FLOATS(SUBULP_CASE)
#undef SUBULP_CASE
    default: return;
  }
}

template <subulp_strategy S, class Base, class Rule>
class Pass {
  using L = Layout<S, Base>;
  using P = typename L::Param;
  using Fast = typename L::Fast;
  using Slow = typename L::Slow;

 public:
  static int run(const subulp_step& s) {
    int64_t blocks = 0;
    for (int64_t i = 0; i < s.count; ++i) blocks += blocks_of(s.numel[i]);
    // Fewer than 16 blocks (8,192 elements) are not worth waking a thread for.
    const int64_t useful = std::max<int64_t>(1, blocks / 16);
    const int threads = static_cast<int>(std::min<int64_t>(s.threads, useful));
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (threads > 1)
    share(s, blocks, omp_get_thread_num(), omp_get_num_threads());
#else
    (void)threads;
    share(s, blocks, 0, 1);
#endif
    return 0;
  }

 private:
  static int64_t blocks_of(int64_t numel) { return (numel + BLOCK - 1) / BLOCK; }

  // The blocks of all tensors form one line, cut into one contiguous share per thread.
  static void share(const subulp_step& s, int64_t blocks, int thread, int threads) {
    const IeeeMode ieee;
    const int64_t begin = blocks * thread / threads, end = blocks * (thread + 1) / threads;
    int64_t first = 0;
    for (int64_t i = 0; i < s.count && first < end; ++i) {
      const int64_t count = blocks_of(s.numel[i]);
      const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, count);
      if (from < to) Pass(s, i).blocks(from, to);
      first += count;
    }
  }

  Pass(const subulp_step& s, int64_t i)
      : rule_(s, s.scalars[i]),
        scalars_(s.scalars[i]),
        numel_(s.numel[i]),
        base_{role(s.param, i), const_cast<char*>(static_cast<const char*>(s.grad[i])), role(s.fast, i),
              role(s.slow, i), role(s.extra, i), role(s.slow_low, i)},
        grad_dtype_(s.grad_dtype),
        grad_bytes_(format_bytes(s.grad_dtype)),
        same_grad_(s.grad_dtype == s.param_dtype),
        narrow_grad_(!same_grad_ && s.grad_dtype != SUBULP_FP32),
        maximize_(s.maximize != 0),
        has_slow_(s.slow != nullptr),
        tail_width_(s.extra_bits + (L::tails && !L::signed_tails && L::random)),
        tail_bytes_(tail_width_ == 8 ? 1 : tail_width_ == 16 ? 2 : 0),
        tails_(tail_width_),
        k_(u32(static_cast<uint32_t>(s.extra_bits))),
        work_{{s.seed, scalars_}, {}, {}} {}

  static char* role(void* const* pointers, int64_t i) {
    return pointers ? static_cast<char*>(pointers[i]) : nullptr;
  }

  void blocks(int64_t from, int64_t to) {
    const int64_t whole = numel_ / BLOCK, end = std::min(to, whole);
    if (L::random || (L::tails && !tail_bytes_) || narrow_grad_) {
      for (int64_t b = from; b < end; ++b) block(at(b), b);
    } else if (from < end) {
      // Nothing to prepare per block: one loop over all of them.
      elements(at(from), (end - from) * BLOCK);
    }
    if (to > whole) ragged(whole);
  }

  Pointers at(int64_t block) const {
    const int64_t n = block * BLOCK;
    return {base_.param + n * P::bytes,  base_.grad + n * grad_bytes_,   base_.fast + n * Fast::bytes,
            base_.slow + n * Slow::bytes, base_.extra + extra_bytes(n), base_.low + n * L::low_bytes};
  }
  int64_t extra_bytes(int64_t n) const {
    return L::tails ? (n + 31) / 32 * 4 * tail_width_ : n * L::extra_bytes;
  }

  // The last, partial block goes through a copy padded with zeros.
  void ragged(int64_t index) {
    alignas(64) char copy[6][BLOCK * 4] = {};
    const int64_t n = numel_ - index * BLOCK;
    const int64_t bytes[6] = {n * P::bytes,
                              n * grad_bytes_,
                              Rule::has_fast ? n * Fast::bytes : 0,
                              has_slow_ ? n * Slow::bytes : 0,
                              extra_bytes(n),
                              has_slow_ ? n * L::low_bytes : 0};
    const Pointers p = at(index);
    char* const from[6] = {p.param, p.grad, p.fast, p.slow, p.extra, p.low};
    for (int i = 0; i < 6; ++i)
      if (bytes[i]) std::memcpy(copy[i], from[i], static_cast<size_t>(bytes[i]));
    block({copy[0], copy[1], copy[2], copy[3], copy[4], copy[5]}, index);
    if constexpr (L::tails) {
      tails_.unpack(copy[4], work_.tail);
      std::fill(work_.tail + n, work_.tail + BLOCK, 0u);
      tails_.pack(work_.tail, copy[4]);
    }
    for (int i = 0; i < 6; ++i)
      if (bytes[i] && i != 1) std::memcpy(from[i], copy[i], static_cast<size_t>(bytes[i]));
  }

  void block(const Pointers& p, int64_t index) {
    const uint64_t first = static_cast<uint64_t>(index) * BLOCK;
    if constexpr (L::tails)
      if (!tail_bytes_) tails_.unpack(p.extra, work_.tail);
    if constexpr (L::random) work_.bits.template draw<Base::random_width>(first);
    if (narrow_grad_) decode_gradient(grad_dtype_, p.grad, work_.grad);
    elements(p, BLOCK);
    if constexpr (L::tails)
      if (!tail_bytes_) tails_.pack(work_.tail, p.extra);
  }

  void elements(const Pointers& p, int64_t n) {
    // Copies on the stack: stores through the streams' pointers cannot change them.
    const float* const wide_grad = narrow_grad_ ? work_.grad : reinterpret_cast<const float*>(p.grad);
    const Context c = {rule_, p, k_, tail_bytes_, wide_grad, same_grad_, maximize_, Rule::has_fast || has_slow_};
    for (int64_t i = 0; i < n; i += W2) lanes<!P::looks_once || L::wide_states>(c, i);
  }

  struct Context {
    Rule rule;
    Pointers p;
    U k;
    int tail_bytes;
    const float* wide_grad;
    bool same_grad, maximize, has_slow;
  };

  // `careful` encodes any value; otherwise extraordinary ones are noticed before anything is stored.
  template <bool careful>
  SUBULP_INLINE void lanes(const Context& c, int64_t i) {
    const Pointers& p = c.p;
    F2 g = c.same_grad ? P::load(p.grad + i * P::bytes) : P::floats(c.wide_grad + i);
    if (c.maximize) g = mul(g, f32(-1.0f));
    const F2 theta = decode_parameter(c, i);
    F2 m = {f32(0.0f), f32(0.0f)}, v = m;
    if constexpr (Rule::has_fast) m = scaled(Fast::load(p.fast + i * Fast::bytes), scalars_.fast_decode);
    if (c.has_slow) {
      v = Slow::load(p.slow + i * Slow::bytes);
      if constexpr (L::slow_expansion) v = add(v, Slow::load(p.low + i * Slow::bytes));
      v = scaled(v, scalars_.slow_decode);
    }
    const F2 delta = {c.rule(theta.a, g.a, &m.a, &v.a), c.rule(theta.b, g.b, &m.b, &v.b)};
    m = scaled(m, scalars_.fast_encode);
    v = scaled(v, scalars_.slow_encode);

    F2 change = {};
    if constexpr (L::weight == Weight::kahan) {
      const F2 rest = P::load(p.extra + i * P::bytes);
      change = sub({believed<Base>(theta.a, rest.a), believed<Base>(theta.b, rest.b)}, delta);
    }
    const F2 wide = L::weight == Weight::kahan ? add(theta, change) : sub(theta, delta);
    if constexpr (!careful) {
      // A first moment needs no look: it is no larger than the largest value when it was stored or
      // the gradient, and a gradient beyond 2^69, infinite or NaN shows in the second moment.
      U worst = c.has_slow ? worse(v, wide) : max(worse(wide), worse(g));
      if constexpr (L::weight == Weight::kahan) worst = max(worst, worse(change));
      if (__builtin_expect(any_at_least(worst, P::ordinary_bound), 0)) return careful_lanes(c, i);
    }

    if constexpr (Rule::has_fast) {
      char* const fast = p.fast + i * Fast::bytes;
      if constexpr (L::dithered) Fast::template store_stochastic<careful>(fast, m, dither<Fast>(scalars_.fast_dither));
      else Fast::template store_nearest<careful>(fast, m);
    }
    if (c.has_slow) encode_slow<careful>(p, v, i);
    encode_parameter<careful>(c, theta, wide, change, i);
  }

  SUBULP_COLD void careful_lanes(const Context& c, int64_t i) { lanes<true>(c, i); }

  static F2 scaled(F2 x, float scale) {
    if constexpr (L::scaled_states) return mul(x, f32(scale));
    else return x;
  }

  SUBULP_INLINE F2 decode_parameter(const Context& c, int64_t i) const {
    const Pointers& p = c.p;
    const char* const param = p.param + i * P::bytes;
    const char* const extra = p.extra + i * L::extra_bytes;
    if constexpr (L::weight == Weight::master) {
      const F2 wide = L::Wide::load(extra);
      const U2 code = P::load_code(param);
      return {master(wide.a, code.a), master(wide.b, code.b)};
    } else if constexpr (L::expansion) {
      const F2 high = P::load(param);
      F2 low = P::load(extra);
      if constexpr (low_scale<Base> != 1.0f) low = mul(low, f32(1.0f / low_scale<Base>));
      return add(high, {believed<Base>(high.a, low.a), believed<Base>(high.b, low.b)});
    } else if constexpr (L::tails) {
      const F2 head = P::load(param);
      const U2 tail = load_tails(c, i);
      return {Base::template join<L::signed_tails, L::random>(head.a, tail.a, c.k),
              Base::template join<L::signed_tails, L::random>(head.b, tail.b, c.k)};
    } else {
      return P::load(param);
    }
  }

  SUBULP_INLINE U2 load_tails(const Context& c, int64_t i) const {
    const char* const p = c.p.extra + i * c.tail_bytes;
    if (c.tail_bytes == 1) return {load_u8(p), load_u8(p + W)};
    if (c.tail_bytes == 2) return {load_u16(p), load_u16(p + 2 * W)};
    return P::words(work_.tail + i);
  }
  SUBULP_INLINE void store_tails(const Context& c, U2 tail, int64_t i) {
    char* const p = c.p.extra + i * c.tail_bytes;
    if (c.tail_bytes == 1) {
      store_u8(p, tail.a);
      store_u8(p + W, tail.b);
    } else if (c.tail_bytes == 2) {
      store_u16(p, tail.a);
      store_u16(p + 2 * W, tail.b);
    } else {
      store_u32(work_.tail + i, tail.a);
      store_u32(work_.tail + i + W, tail.b);
    }
  }

  // A master weight, or the parameter itself where it is not the master weight rounded.
  static SUBULP_INLINE F master(F wide, U code) {
    const U rounded = Base::nearest(wide);
    const U differ = sub(max(rounded, code), min(rounded, code));
    return as_f32(select(greater(differ, u32(0)), as_u32(Base::value(code)), as_u32(wide)));
  }

  template <bool careful>
  SUBULP_INLINE void encode_slow(const Pointers& p, F2 v, int64_t i) const {
    char* const slow = p.slow + i * Slow::bytes;
    if constexpr (L::random_slow) {
      // The parameter's bits with their halves swapped: see numerics/random_bits.py.
      U2 bits = P::swapped(random_at(i));
      if constexpr (Slow::Base::random_width < Base::random_width) bits = {shr<16>(bits.a), shr<16>(bits.b)};
      Slow::template store_stochastic<careful>(slow, v, bits);
    } else {
      const F2 hi = Slow::template store_nearest<careful>(slow, v);
      if constexpr (L::slow_expansion)
        Slow::template store_stochastic<careful>(p.low + i * Slow::bytes, remainder<careful>(sub(v, hi)),
                                                 dither<Slow>(scalars_.slow_dither));
    }
  }

  template <bool careful>
  SUBULP_INLINE void encode_parameter(const Context& c, F2 theta, F2 wide, F2 change, int64_t i) {
    const Pointers& p = c.p;
    char* const param = p.param + i * P::bytes;
    char* const extra = p.extra + i * L::extra_bytes;
    if constexpr (L::tails) {
      U2 bits = {u32(0), u32(0)};
      if constexpr (L::random_parameter) bits = P::random(random_at(i));
      const U2 tail = P::template split<L::signed_tails, L::random>(param, wide, bits, c.k);
      store_tails(c, tail, i);
    } else if constexpr (L::random_parameter) {
      P::template store_stochastic<careful>(param, wide, P::random(random_at(i)));
    } else {
      const F2 hi = P::template store_nearest<careful>(param, wide);
      if constexpr (L::weight == Weight::master) {
        L::Wide::template store_nearest<careful>(extra, wide);
      } else if constexpr (L::expansion) {
        F2 low = sub(wide, hi);
        if constexpr (low_scale<Base> != 1.0f) low = mul(low, f32(low_scale<Base>));
        low = remainder<careful>(low);
        if constexpr (L::dithered) P::template store_stochastic<careful>(extra, low, dither<P>(scalars_.extra_dither));
        else P::template store_nearest<careful>(extra, low);
      } else if constexpr (L::weight == Weight::kahan) {
        P::template store_nearest<careful>(extra, remainder<careful>(sub(change, sub(hi, theta))));
      }
    }
  }

  // The same random bits for all elements.
  template <class Format>
  static SUBULP_INLINE U2 dither(uint32_t word) {
    const U bits = u32(word >> (32 - Format::Base::random_width));
    return {bits, bits};
  }

  const char* random_at(int64_t i) const { return work_.bits.template at<Base::random_width>(i); }

  // What rounding left over; zero where the rounded value is not finite (inf - inf).
  template <bool careful>
  static F2 remainder(F2 x) {
    if constexpr (careful) return zero_nan(x);
    else return x;
  }

  Rule rule_;
  subulp_scalars scalars_;
  int64_t numel_;
  Pointers base_;
  int grad_dtype_, grad_bytes_;
  bool same_grad_, narrow_grad_, maximize_, has_slow_;
  int tail_width_, tail_bytes_;
  std::conditional_t<L::tails, Tails, int> tails_;
  U k_;
  Work work_;
};

// ---------------------------------------------------------------------------- which passes exist

template <class Rule, class Format>
int run_format(const subulp_step& s) {
  switch (s.strategy) {
#define SUBULP_CASE(code, ...)                                                                       \
  case SUBULP_##code:                                                                                \
    if constexpr (Strategy<SUBULP_##code>::template has<Format>)                                     \
      return Pass<SUBULP_##code, Format, Rule>::run(s);                                              \
    else return -1;
    SUBULP_STRATEGIES(SUBULP_CASE)
#undef SUBULP_CASE
    default: return -1;
  }
}

// E5M2 holds gradients and states, no parameters.
template <class Rule>
int run_step(const subulp_step& s) {
  if (s.strategy == SUBULP_EXTRA_NEAREST && s.param_dtype == SUBULP_BF16 && s.extra_bits == 16) {
    // All of FP32's bits are kept: random ones have nothing to round.
    subulp_step exact = s;
    exact.strategy = SUBULP_EXTRA_DETERMINISTIC;
    return run_format<Rule, Bf16>(exact);
  }
  switch (s.param_dtype) {
    case SUBULP_FP32: return run_format<Rule, Fp32>(s);
    case SUBULP_BF16: return run_format<Rule, Bf16>(s);
    case SUBULP_FP16: return run_format<Rule, Fp16>(s);
    case SUBULP_E4M3: return run_format<Rule, E4m3>(s);
    default: return -1;
  }
}

}  // namespace simd
