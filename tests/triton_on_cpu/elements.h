// Operations of Triton's intermediate code on single elements, for a CPU: one function each, named as the operation
// with an underscore for the dot. `R` is the type of the result. translation.py reads the names from this file, so that
// a function that is added here is an operation that is known.
//
// Where C++ leaves a result undefined, it is what the instructions of a GPU give (PTX ISA), since lanes that a mask
// rules out compute too. Where a GPU only approximates (exp2, log2, division), the result is that of the C library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

typedef bool i1;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef float f32;
typedef double f64;

template <class To, class From> To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// What a load gives where its mask is false and no other value is named: on a GPU whatever a register held. All bits
// are set, which is NaN in every format of floats and -1 in every integer.
template <class T> T unset() {
    T value;
    memset((void*)&value, 0xff, sizeof value);
    return value;
}

// ---- Floats of 8 and 16 bits ----
// Each is widened to f32 to compute, and rounded to nearest even afterwards, once for each operation.

// A float of `MANTISSA` bits behind the point and exponents biased by `BIAS`, from a finite f32: rounds to nearest even,
// subnormal numbers included. Returns exponent and mantissa side by side, which overflow into the next exponent.
template <int MANTISSA, int BIAS> uint32_t rounded(float magnitude) {
    if (magnitude == 0) return 0;
    int exponent = std::ilogb(magnitude);
    if (exponent < 1 - BIAS) exponent = 1 - BIAS;
    uint32_t steps = (uint32_t)std::nearbyint(std::ldexp((double)magnitude, MANTISSA - exponent));
    bool is_normal = steps >> MANTISSA;
    return is_normal ? ((uint32_t)(exponent + BIAS) << MANTISSA) + steps - (1u << MANTISSA) : steps;
}

template <int MANTISSA, int BIAS> float widened(uint32_t bits) {
    int exponent = bits >> MANTISSA;
    int mantissa = bits & ((1 << MANTISSA) - 1);
    if (exponent == 0) return std::ldexp((float)mantissa, 1 - BIAS - MANTISSA);
    return std::ldexp((float)(mantissa + (1 << MANTISSA)), exponent - BIAS - MANTISSA);
}

struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) {
        uint32_t wide = bits_as<uint32_t>(value);
        bool is_nan = value != value;
        bits = is_nan ? 0x7fc0 : (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
    }
    operator float() const { return bits_as<float>((uint32_t)bits << 16); }
};

struct f16 {
    uint16_t bits;
    f16() = default;
    f16(float value) {
        uint32_t wide = bits_as<uint32_t>(value);
        uint32_t sign = (wide >> 16) & 0x8000;
        wide &= 0x7fffffff;
        if (wide > 0x7f800000) {
            bits = (uint16_t)(sign | 0x7e00);
        } else if (wide >= 0x477ff000) {  // 65520, half way from the largest number to the next that there is not
            bits = (uint16_t)(sign | 0x7c00);
        } else if (wide >= 0x38800000) {  // normal: 13 bits are dropped, and the bias falls from 127 to 15
            bits = (uint16_t)(sign | ((wide + 0xfff + ((wide >> 13) & 1) - (112u << 23)) >> 13));
        } else {
            bits = (uint16_t)(sign | rounded<10, 15>(bits_as<float>(wide)));
        }
    }
    f16(double value) : f16(once_rounded(value)) {}
    operator float() const {
        uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
        uint32_t rest = bits & 0x7fff;
        if (rest >= 0x7c00) return bits_as<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
        float magnitude = rest >= 0x400 ? bits_as<float>((rest << 13) + (112u << 23)) : widened<10, 15>(rest);
        return bits_as<float>(sign | bits_as<uint32_t>(magnitude));
    }

  private:
    // An f32 that rounds to the same f16 as the f64 does: its last bit says whether anything was cut off.
    static float once_rounded(double value) {
        float nearest = (float)value;
        if ((double)nearest == value || nearest != nearest || std::isinf(nearest)) return nearest;
        float towards_zero = std::fabs((double)nearest) > std::fabs(value) ? std::nextafter(nearest, 0.0f) : nearest;
        return bits_as<float>(bits_as<uint32_t>(towards_zero) | 1);
    }
};

// e4m3 without infinities: what is too large, infinities included, becomes the largest number (cvt.rn.satfinite).
struct f8E4M3FN {
    uint8_t bits;
    f8E4M3FN() = default;
    f8E4M3FN(float value) {
        uint8_t sign = std::signbit(value) ? 0x80 : 0;
        float magnitude = std::fabs(value);
        if (magnitude != magnitude) bits = 0x7f;
        else if (magnitude >= 448) bits = sign | 0x7e;
        else bits = sign | (uint8_t)rounded<3, 7>(magnitude);
    }
    operator float() const {
        float magnitude = (bits & 0x7f) == 0x7f ? NAN : widened<3, 7>(bits & 0x7f);
        return bits & 0x80 ? -magnitude : magnitude;
    }
};

// e5m2: as e4m3 when it is converted to; infinities are read as such.
struct f8E5M2 {
    uint8_t bits;
    f8E5M2() = default;
    f8E5M2(float value) {
        uint8_t sign = std::signbit(value) ? 0x80 : 0;
        float magnitude = std::fabs(value);
        if (magnitude != magnitude) bits = 0x7f;
        else if (magnitude >= 57344) bits = sign | 0x7b;
        else bits = sign | (uint8_t)rounded<2, 15>(magnitude);
    }
    operator float() const {
        int rest = bits & 0x7f;
        float magnitude = rest > 0x7c ? NAN : rest == 0x7c ? INFINITY : widened<2, 15>(rest);
        return bits & 0x80 ? -magnitude : magnitude;
    }
};

// ---- Integers ----
// They wrap around (-fwrapv). i1 is signed where it is extended: true is -1.

template <class T> struct unsigned_of { typedef typename std::make_unsigned<T>::type type; };
template <> struct unsigned_of<bool> { typedef bool type; };
template <class T> typename unsigned_of<T>::type U(T value) { return (typename unsigned_of<T>::type)value; }

// As a signed number, which i1 is where a signed operation reads it.
template <class T> T S(T value) { return value; }
inline int S(bool value) { return value ? -1 : 0; }

template <class R> R arith_addi(R a, R b) { return (R)(a + b); }
template <> inline i1 arith_addi(i1 a, i1 b) { return a != b; }
template <class R> R arith_subi(R a, R b) { return (R)(a - b); }
template <class R> R arith_muli(R a, R b) { return (R)(a * b); }
template <class R> R arith_andi(R a, R b) { return (R)(a & b); }
template <class R> R arith_ori(R a, R b) { return (R)(a | b); }
template <class R> R arith_xori(R a, R b) { return (R)(a ^ b); }
template <class R> R arith_minsi(R a, R b) { return S(a) < S(b) ? a : b; }
template <class R> R arith_maxsi(R a, R b) { return S(a) > S(b) ? a : b; }
template <class R> R arith_minui(R a, R b) { return U(a) < U(b) ? a : b; }
template <class R> R arith_maxui(R a, R b) { return U(a) > U(b) ? a : b; }
template <class R> R math_absi(R a) { return (R)(a < 0 ? -a : a); }

// A divisor of 0 gives all bits; the smallest integer by -1 is itself, with no remainder.
template <class R> R arith_divsi(R a, R b) { return b == 0 ? (R)-1 : b == (R)-1 ? (R)-a : (R)(a / b); }
template <class R> R arith_remsi(R a, R b) { return b == 0 ? (R)-1 : b == (R)-1 ? (R)0 : (R)(a % b); }
template <class R> R arith_divui(R a, R b) { return b == 0 ? (R)-1 : (R)(U(a) / U(b)); }
template <class R> R arith_remui(R a, R b) { return b == 0 ? (R)-1 : (R)(U(a) % U(b)); }

// Shifts by more than there are bits shift all of them out.
template <class R> bool is_beyond(R shift) { return U(shift) >= 8 * sizeof(R); }
template <class R> R arith_shli(R a, R b) { return is_beyond(b) ? (R)0 : (R)(U(a) << b); }
template <class R> R arith_shrui(R a, R b) { return is_beyond(b) ? (R)0 : (R)(U(a) >> b); }
template <class R> R arith_shrsi(R a, R b) { return is_beyond(b) ? (R)(a < 0 ? -1 : 0) : (R)(a >> b); }

template <class R, class A> R arith_extsi(A a) { return (R)S(a); }
template <class R, class A> R arith_extui(A a) { return (R)U(a); }
template <class R, class A> R arith_trunci(A a) { return std::is_same<R, bool>::value ? (R)(a & (A)1) : (R)a; }
template <class R, class A> R arith_index_cast(A a) { return (R)a; }
template <class R> R tt_mulhiui(R a, R b) {
    return (R)((unsigned __int128)U(a) * U(b) >> (8 * sizeof(R)));
}

// ---- Floats ----

template <class R> R arith_addf(R a, R b) { return R(a + b); }
template <class R> R arith_subf(R a, R b) { return R(a - b); }
template <class R> R arith_mulf(R a, R b) { return R(a * b); }
template <class R> R arith_divf(R a, R b) { return R(a / b); }
template <class R> R tt_precise_divf(R a, R b) { return R(a / b); }
template <class R> R arith_remf(R a, R b) { return R(std::fmod(+a, +b)); }
template <class R> R arith_negf(R a) { return R(-a); }
template <class R> R math_absf(R a) { return R(std::fabs(+a)); }
template <class R> R math_floor(R a) { return R(std::floor(+a)); }
template <class R> R math_ceil(R a) { return R(std::ceil(+a)); }
template <class R> R math_sqrt(R a) { return R(std::sqrt(+a)); }
template <class R> R tt_precise_sqrt(R a) { return R(std::sqrt(+a)); }
template <class R> R math_rsqrt(R a) { return R(1 / std::sqrt(+a)); }
template <class R> R math_exp(R a) { return R(std::exp(+a)); }
template <class R> R math_exp2(R a) { return R(std::exp2(+a)); }
template <class R> R math_log(R a) { return R(std::log(+a)); }
template <class R> R math_log2(R a) { return R(std::log2(+a)); }
template <class R> R math_sin(R a) { return R(std::sin(+a)); }
template <class R> R math_cos(R a) { return R(std::cos(+a)); }
template <class R> R math_erf(R a) { return R(std::erf(+a)); }
template <class R> R math_tanh(R a) { return R(std::tanh(+a)); }
template <class R> R math_fma(R a, R b, R c) { return R(std::fma(+a, +b, +c)); }

// Of a number and NaN: ...numf give the number, ...imumf NaN.
template <class R> R arith_maxnumf(R a, R b) { return a != a ? b : b != b ? a : a > b ? a : b; }
template <class R> R arith_minnumf(R a, R b) { return a != a ? b : b != b ? a : a < b ? a : b; }
template <class R> R arith_maximumf(R a, R b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <class R> R arith_minimumf(R a, R b) { return a != a ? a : b != b ? b : a < b ? a : b; }

template <class R, class A> R arith_extf(A a) { return R(+a); }
template <class R, class A> R arith_truncf(A a) { return R(+a); }
template <class R, class A> R tt_fp_to_fp(A a) { return R((float)a); }
template <class R> struct computed_in { typedef typename std::conditional<std::is_same<R, f64>::value, f64, f32>::type type; };
template <class R, class A> R arith_sitofp(A a) { return R((typename computed_in<R>::type)S(a)); }
template <class R, class A> R arith_uitofp(A a) { return R((typename computed_in<R>::type)U(a)); }

// Towards zero; what does not fit becomes the nearest integer that does, and NaN becomes 0 (cvt.rzi).
template <class R, class A> R saturated(A a) {
    f64 whole = std::trunc((f64)a);
    if (whole != whole) return 0;
    const int bits = 8 * sizeof(R) - (std::is_signed<R>::value ? 1 : 0);
    const f64 end = std::ldexp(1.0, bits);  // the first that is too large
    const R largest = (R)(~0ull >> (64 - bits));
    if (whole >= end) return largest;
    if (whole < (std::is_signed<R>::value ? -end : 0.0)) return (R)(largest + 1);
    return (R)whole;
}
template <class R, class A> R arith_fptosi(A a) { return saturated<R>(+a); }
template <class R, class A> R arith_fptoui(A a) { return (R)saturated<typename unsigned_of<R>::type>(+a); }

// ---- Bits, pointers, choice ----

template <class R, class A> R tt_bitcast(A a) { return bits_as<R>(a); }
template <class R, class A> R arith_bitcast(A a) { return bits_as<R>(a); }
template <class R, class A> R tt_ptr_to_int(A a) { return (R)(intptr_t)a; }
template <class R, class A> R tt_int_to_ptr(A a) { return (R)(intptr_t)a; }
template <class R, class A> R tt_addptr(R a, A b) { return a + (i64)S(b); }
template <class R> R arith_select(i1 a, R b, R c) { return a ? b : c; }

// ---- Comparisons: the operation and its predicate ----
// "o" is false where one is NaN, "u" is true there; for integers "s" and "u" are signed and unsigned.

template <class A> i1 arith_cmpi_eq(A a, A b) { return a == b; }
template <class A> i1 arith_cmpi_ne(A a, A b) { return a != b; }
template <class A> i1 arith_cmpi_slt(A a, A b) { return S(a) < S(b); }
template <class A> i1 arith_cmpi_sle(A a, A b) { return S(a) <= S(b); }
template <class A> i1 arith_cmpi_sgt(A a, A b) { return S(a) > S(b); }
template <class A> i1 arith_cmpi_sge(A a, A b) { return S(a) >= S(b); }
template <class A> i1 arith_cmpi_ult(A a, A b) { return U(a) < U(b); }
template <class A> i1 arith_cmpi_ule(A a, A b) { return U(a) <= U(b); }
template <class A> i1 arith_cmpi_ugt(A a, A b) { return U(a) > U(b); }
template <class A> i1 arith_cmpi_uge(A a, A b) { return U(a) >= U(b); }
template <class A> i1 arith_cmpf_ord(A a, A b) { return a == a && b == b; }
template <class A> i1 arith_cmpf_uno(A a, A b) { return a != a || b != b; }
template <class A> i1 arith_cmpf_oeq(A a, A b) { return a == b; }
template <class A> i1 arith_cmpf_one(A a, A b) { return a < b || a > b; }
template <class A> i1 arith_cmpf_olt(A a, A b) { return a < b; }
template <class A> i1 arith_cmpf_ole(A a, A b) { return a <= b; }
template <class A> i1 arith_cmpf_ogt(A a, A b) { return a > b; }
template <class A> i1 arith_cmpf_oge(A a, A b) { return a >= b; }
template <class A> i1 arith_cmpf_ueq(A a, A b) { return !(a < b || a > b); }
template <class A> i1 arith_cmpf_une(A a, A b) { return a != b; }
template <class A> i1 arith_cmpf_ult(A a, A b) { return !(a >= b); }
template <class A> i1 arith_cmpf_ule(A a, A b) { return !(a > b); }
template <class A> i1 arith_cmpf_ugt(A a, A b) { return !(a <= b); }
template <class A> i1 arith_cmpf_uge(A a, A b) { return !(a < b); }

// ---- Atomic operations: what is at the address afterwards ----
// Programs run one after another, so that nothing else has to be done for them to be atomic.

template <class T> T atomic_add(T old, T given) { return (T)(old + given); }
template <class T> T atomic_fadd(T old, T given) { return T(old + given); }
template <class T> T atomic_and(T old, T given) { return (T)(old & given); }
template <class T> T atomic_or(T old, T given) { return (T)(old | given); }
template <class T> T atomic_xor(T old, T given) { return (T)(old ^ given); }
template <class T> T atomic_max(T old, T given) { return old > given ? old : given; }
template <class T> T atomic_min(T old, T given) { return old < given ? old : given; }
template <class T> T atomic_umax(T old, T given) { return U(old) > U(given) ? old : given; }
template <class T> T atomic_umin(T old, T given) { return U(old) < U(given) ? old : given; }
template <class T> T atomic_exch(T old, T given) { return given; }

// ---- Memory ----
// A launch may name the memory that it is given, as ranges of addresses. An access elsewhere then does nothing; the
// first is kept, to be raised as a fault of the launch.

struct Range {
    uintptr_t first;
    uintptr_t end;
};

struct Fault {
    i32 place;  // number of the access among those of the kernel, from 1; 0 while there is no fault
    i32 program[3];
    i64 address;
};

struct Memory {
    const Range* ranges;
    i64 num_ranges;  // 0: any address will do
    i64 latest;      // where the last access was
    Fault* fault;

    bool allows(const void* pointer, size_t size, i32 place, const i32* program) {
        uintptr_t address = (uintptr_t)pointer;
        if (num_ranges == 0) return true;
        for (i64 tried = 0; tried < num_ranges; tried++) {
            const Range& range = ranges[latest];
            if (address >= range.first && address + size <= range.end) return true;
            latest = latest + 1 < num_ranges ? latest + 1 : 0;
        }
        if (fault->place == 0) *fault = {place, {program[0], program[1], program[2]}, (i64)address};
        return false;
    }
};

// ---- Products ----

// out [M, N] = c + a [M, K] b [K, N]; sums of floats are in f32 (f64 for f64), in the order of K.
template <int M, int N, int K, class A, class B, class C> void tt_dot(const A* a, const B* b, const C* c, C* out) {
    typedef typename std::conditional<std::is_same<C, f64>::value, f64,
        typename std::conditional<std::is_integral<C>::value, i32, f32>::type>::type Sum;
    static thread_local Sum wide[K * N];
    for (int i = 0; i < K * N; i++) wide[i] = (Sum)b[i];
    for (int m = 0; m < M; m++) {
        Sum sums[N];
        for (int n = 0; n < N; n++) sums[n] = (Sum)c[m * N + n];
        for (int k = 0; k < K; k++) {
            Sum left = (Sum)a[m * K + k];
            for (int n = 0; n < N; n++) sums[n] += left * wide[k * N + n];
        }
        for (int n = 0; n < N; n++) out[m * N + n] = (C)sums[n];
    }
}
