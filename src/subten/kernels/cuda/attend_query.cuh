// Queries as a block takes them: steps of their integers, and what is known of them beside.
#ifndef SUBTEN_ATTEND_QUERY_CUH
#define SUBTEN_ATTEND_QUERY_CUH

#include "attend_device.cuh"

// Steps of the largest value of a query whose integers have 16 bits: 127 * 256.
#define MOST_STEPS 32512.0f

// The steps in which a query becomes integers, given each lane's largest magnitude. One that is not
// finite has steps of NaN.
struct QuerySteps {
    float step = 1, to_step = 0;

    INLINE QuerySteps() {}
    INLINE QuerySteps(float most, bool is_finite) {
        // Numbers that are not negative are in the order of their bits.
        most = bits_float(warp_max(float_bits(most)));
        // Rows that are not finite, or below all that matters to a score, have no steps.
        if (most > 0x1p-100f && most < 0x1p120f) to_step = MOST_STEPS / most;
        step = to_step > 0 ? most * (1.0f / MOST_STEPS) : 1.0f;
        if (!is_finite) step = bits_float(0x7fc00000);
    }

    // Adding 1.5 * 2^23 rounds to an integer.
    INLINE int round(float v) const { return float_bits(v * to_step + 12582912.0f) - 0x4b400000; }
};

// What a block knows of the queries of HEADS heads beside their bf16s or bytes.
template <int HEADS>
struct QueryFacts {
    // What a score counts in base 2, above 0, and the sum of q in the unit of scores.
    alignas(8) float factor[HEADS];
    alignas(8) float sum[HEADS];
    // Minus LOW_MIDDLE times the sum of the integers of q below D / 2.
    alignas(8) int first_sum[HEADS];
};

#endif
