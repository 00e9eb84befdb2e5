// Sealing: full fp16 pages become codes and parameters, in the operand order of operands.cuh, bit for bit what
// nibble/kernels/layout.py writes. One block a page and KV head.
//
//   page -> shared memory -> ranges -> scale and zero point -> codes, gathered 16 (or 8) bytes a thread
#include "operands.cuh"

struct SealParams {
    const u8* open_pool;    // fp16 [pages, 2, kv_heads, 64, head_dim]
    u8* sealed_pool;        // [pages, kv_heads, page_bytes]
    const int* open_pages;  // [count], -1: nothing to do
    const int* sealed_pages;
    const float* k_scale;   // [kv_heads, head_dim], static formats
    const float* k_zero;
    const float* v_scale;
    const float* v_zero;
    int kv_heads;
};

constexpr int kThreads = 256;
constexpr int kRowPairs = kHeadDim / 2;
constexpr int kRowStride = kRowPairs + 4;  // words of a row in shared memory, padded
constexpr float kSmallestScale = 6.103515625e-05f;  // 2^-14

struct Parameters {
    float scale[256];  // of channels or tokens
    float zero[256];
};

DEVICE float page_value(const u32* page, int token, int channel) {
    const u32 pair = page[token * kRowStride + channel / 2];
    return channel & 1 ? half_high(pair) : half_low(pair);
}

DEVICE u32 half_bits_rounded_up(float positive) {
    u32 bits = pack_halves(positive, 0) & 0xffff;
    return half_low(bits) < positive ? bits + 1 : bits;
}

// Stores the parameters of one channel or token, in fp16 in the page and in fp32 for the codes.
template <int kBits>
DEVICE void store_parameters(Parameters& to, u16* in_page, int count, int index, float minimum, float maximum) {
    constexpr float kStep = static_cast<float>(1.0 / ((1 << kBits) - 1));
    const u32 scale = half_bits_rounded_up(fmaxf(__fmul_rn(__fsub_rn(maximum, minimum), kStep), kSmallestScale));
    in_page[index] = scale;
    in_page[count + index] = pack_halves(minimum, 0) & 0xffff;
    to.scale[index] = __fdiv_rn(1.0f, half_low(scale));
    to.zero[index] = minimum;
}

// A channel's range over the 64 tokens: two lanes a pair of channels.
template <int kBits>
DEVICE void find_channel_parameters(const u32* page, Parameters& to, u16* in_page) {
    for (int i = threadIdx.x; i < (2 * kRowPairs + 31) / 32 * 32; i += kThreads) {
        const int pair = min(i / 2, kRowPairs - 1), half = i & 1;
        float low[2] = {65504, 65504}, high[2] = {-65504, -65504};
#pragma unroll 8
        for (int token = half * 32; token < half * 32 + 32; ++token) {
            const u32 x = page[token * kRowStride + pair];
            low[0] = fminf(low[0], half_low(x)), high[0] = fmaxf(high[0], half_low(x));
            low[1] = fminf(low[1], half_high(x)), high[1] = fmaxf(high[1], half_high(x));
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float minimum = fminf(low[e], __shfl_xor_sync(kFullMask, low[e], 1));
            const float maximum = fmaxf(high[e], __shfl_xor_sync(kFullMask, high[e], 1));
            if (half == e && i / 2 < kRowPairs)
                store_parameters<kBits>(to, in_page, kHeadDim, 2 * pair + e, minimum, maximum);
        }
    }
}

// A token's range over its channels: four lanes a token.
template <int kBits>
DEVICE void find_token_parameters(const u32* page, Parameters& to, u16* in_page) {
    const int token = threadIdx.x / 4, part = threadIdx.x & 3;
    float low = 65504, high = -65504;
#pragma unroll 8
    for (int pair = part; pair < kRowPairs; pair += 4) {
        const u32 x = page[token * kRowStride + pair];
        low = fminf(low, fminf(half_low(x), half_high(x)));
        high = fmaxf(high, fmaxf(half_low(x), half_high(x)));
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        low = fminf(low, __shfl_xor_sync(kFullMask, low, step));
        high = fmaxf(high, __shfl_xor_sync(kFullMask, high, step));
    }
    if (part == 0) store_parameters<kBits>(to, in_page, kPageTokens, token, low, high);
}

template <int kBits, int kKind>
DEVICE void find_parameters(const u32* page, Parameters& to, u16* in_page, const float* scale, const float* zero) {
    if constexpr (kKind == kPageChannel) find_channel_parameters<kBits>(page, to, in_page);
    if constexpr (kKind == kToken) find_token_parameters<kBits>(page, to, in_page);
    if constexpr (kKind == kStaticChannel)
        for (int i = threadIdx.x; i < kHeadDim; i += kThreads)
            to.scale[i] = __fdiv_rn(1.0f, scale[i]), to.zero[i] = zero[i];
}

DEVICE int lane_channel(int tile, int j, int nth) {
    const bool is_last_of_odd = (kChannelTiles & 1) && tile == kChannelTiles - 1;
    const int within = is_last_of_odd ? 4 * j + nth : 8 * j + 2 * (tile & 1) + 4 * (nth / 2) + nth % 2;
    return 32 * (tile / 2) + within;
}

// The code at one value of a lane's part of a tile; layout.py has the same map.
template <int kBits, int kKind, bool kIsKey>
DEVICE u32 code_at(const u32* page, const Parameters& by, int item, int tile, int lane, int value) {
    const int g = lane / 4, j = lane & 3;
    const int upper_row = kBits == 4 ? value & 1 : value >> 1 & 1;
    const int upper_column = kBits == 4 ? value >> 1 & 1 : value >> 2;
    const int odd = kBits == 4 ? value >> 2 : value & 1;
    int token = item * kItemTokens, channel;
    if (kIsKey) {
        channel = lane_channel(tile / kTokenTiles, j, 2 * upper_column + odd);
        token += 2 * kTokenTiles * g + 2 * (tile % kTokenTiles) + upper_row;
    } else {
        channel = lane_channel(tile % kChannelTiles, g / 2, 2 * upper_row + g % 2);
        token += 2 * kTokenTiles * (2 * j + odd) + 2 * (tile / kChannelTiles) + upper_column;
    }
    const int index = kKind == kToken ? token : channel;
    const float code = rintf(__fmul_rn(__fsub_rn(page_value(page, token, channel), by.zero[index]), by.scale[index]));
    return static_cast<u32>(fminf(fmaxf(code, 0.0f), static_cast<float>((1 << kBits) - 1)));
}

template <int kBits, int kKind, bool kIsKey>
DEVICE void write_codes(const u32* page, const Parameters& by, u32* to) {
    using Reader = CodeReader<kBits, kTokenTiles * kChannelTiles>;
    constexpr int kWords = kPageTokens * kHeadDim * kBits / 32;
    for (int word = threadIdx.x; word < kWords; word += kThreads) {
        const int in_load = word % Reader::kLoadWords, lane = word / Reader::kLoadWords % 32;
        const int load = word / Reader::kLoadWords / 32;
        const int tile = load % Reader::kLoads * Reader::kLoadTiles + in_load / Reader::kTileWords;
        const int first = in_load % Reader::kTileWords * 4;
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < 32 / kBits; ++i)
            bits |= code_at<kBits, kKind, kIsKey>(page, by, load / Reader::kLoads, tile, lane, first + i) << (i * kBits);
        to[word] = bits;
    }
}

DEVICE void load_page(u32* page, const uint4* from) {
    for (int i = threadIdx.x; i < kPageTokens * kHeadDim / 8; i += kThreads)
        *reinterpret_cast<uint4*>(page + i / (kHeadDim / 8) * kRowStride + i % (kHeadDim / 8) * 4) = from[i];
}

extern "C" __global__ void __launch_bounds__(kThreads) seal_pages(const SealParams p) {
    extern __shared__ __align__(16) u32 pages[];  // K, then V
    __shared__ Parameters k_parameters, v_parameters;
    const int open_page = p.open_pages[blockIdx.x], sealed_page = p.sealed_pages[blockIdx.x], head = blockIdx.y;
    if (open_page < 0 || sealed_page < 0) return;
    constexpr long long kHeadBytes = static_cast<long long>(kPageTokens) * kHalfRowBytes;
    const u8* k = p.open_pool + (static_cast<long long>(open_page) * 2 * p.kv_heads + head) * kHeadBytes;
    const u8* v = k + p.kv_heads * kHeadBytes;
    u8* sealed = p.sealed_pool + (static_cast<long long>(sealed_page) * p.kv_heads + head) * kPageBytes;
    if constexpr (!kCoded) {
        for (int i = threadIdx.x; i < kHeadBytes / 16; i += kThreads) {
            reinterpret_cast<uint4*>(sealed)[i] = reinterpret_cast<const uint4*>(k)[i];
            reinterpret_cast<uint4*>(sealed + kHeadBytes)[i] = reinterpret_cast<const uint4*>(v)[i];
        }
    } else {
        u32* k_page = pages;
        u32* v_page = pages + kPageTokens * kRowStride;
        load_page(k_page, reinterpret_cast<const uint4*>(k));
        load_page(v_page, reinterpret_cast<const uint4*>(v));
        __syncthreads();
        u16* in_page = reinterpret_cast<u16*>(sealed + kKPageBytes + kVPageBytes);
        const int at = head * kHeadDim;
        find_parameters<kKBits, kKScale>(k_page, k_parameters, in_page, p.k_scale + at, p.k_zero + at);
        find_parameters<kVBits, kVScale>(v_page, v_parameters, in_page + kKParameterBytes / 2, p.v_scale + at,
                                         p.v_zero + at);
        __syncthreads();
        write_codes<kKBits, kKScale, true>(k_page, k_parameters, reinterpret_cast<u32*>(sealed));
        write_codes<kVBits, kVScale, false>(v_page, v_parameters, reinterpret_cast<u32*>(sealed + kKPageBytes));
    }
}
