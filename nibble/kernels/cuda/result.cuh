// A normalised result of a head, four channels at a time, and where it goes.
#pragma once
#include "config.cuh"

constexpr float kLowest = -1e30f;  // stands for minus infinity, without its NaNs
constexpr int kQuads = kHeadDim / 4;
constexpr float kLn2 = 0.6931471805599453f;

struct Merged {
    float4 value;  // normalised
    float lse;     // log2 units; minus infinity when nothing was seen
};

DEVICE float4 scaled(float4 x, float by) { return make_float4(x.x * by, x.y * by, x.z * by, x.w * by); }
DEVICE float4 scaled_plus(float4 x, float by, float4 plus) {
    return make_float4(__fmaf_rn(x.x, by, plus.x), __fmaf_rn(x.y, by, plus.y), __fmaf_rn(x.z, by, plus.z),
                       __fmaf_rn(x.w, by, plus.w));
}

// The channel of row g + 8 `upper` of a channel tile of the output; the same order as a lane's pieces of a row.
DEVICE int value_channel(int tile, int g, int upper) {
    const bool is_last_of_odd = (kChannelTiles & 1) && tile == kChannelTiles - 1;
    const int within = is_last_of_odd ? 4 * (g / 2) + 2 * upper : 8 * (g / 2) + 2 * (tile & 1) + 4 * upper;
    return 32 * (tile / 2) + within + (g & 1);
}

DEVICE void store_result(const DecodeParams& p, int batch, int kv_head, int head, int quad, const Merged& m) {
    const long long row = (static_cast<long long>(batch) * p.kv_heads + kv_head) * p.group + head;
    const float4 v = m.value;
    const u32 first = p.is_bfloat ? pack_bfloats(v.x, v.y) : pack_halves(v.x, v.y);
    const u32 second = p.is_bfloat ? pack_bfloats(v.z, v.w) : pack_halves(v.z, v.w);
    const int tile = quad / 4, upper = quad / 2 & 1, g = quad * 4 & 7;
    u16* out = p.out + row * kHeadDim;
    *reinterpret_cast<u32*>(out + value_channel(tile, g, upper)) = first;
    *reinterpret_cast<u32*>(out + value_channel(tile, g + 2, upper)) = second;
    if (quad == 0 && p.log_sum_exp) p.log_sum_exp[row] = m.lse * kLn2;
}
