// Sealing: full fp16 pages become codes and parameters, in the operand order of operands.cuh, bit for bit what
// nibble/kernels/layout.py writes. One block a page and KV head.
//
//   page -> shared memory -> ranges -> scale and zero point -> codes -> the sealed page in shared memory -> its place
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
constexpr int kRowWords = kHeadDim / 2;
constexpr float kSmallestScale = 6.103515625e-05f;  // 2^-14
constexpr float kRound = 12582912.0f;               // 1.5 * 2^23: a float plus this has its rounded value in its low bits

// Does `kCount` things, the threads side by side; unrolled, since the turns are known.
template <int kCount, class Do>
DEVICE void share_out(Do do_one) {
#pragma unroll
    for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; ++turn) {
        const int i = threadIdx.x + turn * kThreads;
        if (kCount % kThreads == 0 || i < kCount) do_one(turn, i);
    }
}

// fp16 rows of K or V. Half of the rows have their 16-byte pieces in another order, so that the lanes of a quarter warp,
// whose tokens lie eight or sixteen apart, find them in different banks. (80 and 96 channels are no whole eights of pieces.)
struct Page {
    u32* words;

    DEVICE int place(int token, int piece) const {
        const int swizzle = kHeadDim % 64 == 0 ? ((token / 8 ^ token / 16) & 1) * 4 : 0;
        return token * kRowWords + (piece ^ swizzle) * 4;
    }
    DEVICE u32 pair(int token, int index) const { return words[place(token, index / 4) + index % 4]; }
};

struct Parameters {
    float scale[kHeadDim > kPageTokens ? kHeadDim : kPageTokens];  // of channels or tokens: 1 / scale
    float zero[kHeadDim > kPageTokens ? kHeadDim : kPageTokens];
};

DEVICE u32 min_halves(u32 a, u32 b) {
    u32 y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
DEVICE u32 max_halves(u32 a, u32 b) {
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// The ranges of a pair of fp16 numbers, over what was added.
struct PairRange {
    u32 low = 0x7bff7bff;   // 65504
    u32 high = 0xfbfffbff;

    DEVICE void add(u32 pair) { low = min_halves(low, pair), high = max_halves(high, pair); }
    template <int kLanes>
    DEVICE void add_neighbours() {
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) {
            low = min_halves(low, __shfl_xor_sync(kFullMask, low, step));
            high = max_halves(high, __shfl_xor_sync(kFullMask, high, step));
        }
    }
};

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

// A channel's range over the 64 tokens: four lanes a pair of channels.
template <int kBits>
DEVICE void find_channel_parameters(const Page& page, Parameters& to, u16* in_page) {
    share_out<(4 * kRowWords + 31) / 32 * 32>([&](int, int i) {
        const int pair = min(i / 4, kRowWords - 1), part = i & 3;
        PairRange range;
#pragma unroll
        for (int k = 0; k < kPageTokens / 4; ++k) range.add(page.pair(part + 4 * k, pair));
        range.add_neighbours<4>();
        const float low = part ? half_high(range.low) : half_low(range.low);
        const float high = part ? half_high(range.high) : half_low(range.high);
        if (i / 4 < kRowWords && part < 2) store_parameters<kBits>(to, in_page, kHeadDim, 2 * pair + part, low, high);
    });
}

// A token's range over its channels: four lanes a token.
template <int kBits>
DEVICE void find_token_parameters(const Page& page, Parameters& to, u16* in_page) {
    const int token = threadIdx.x / 4, part = threadIdx.x & 3;
    PairRange range;
#pragma unroll
    for (int k = 0; k < (kHeadDim / 8 + 3) / 4; ++k) {
        const int piece = min(part + 4 * k, kHeadDim / 8 - 1);
        const uint4 x = *reinterpret_cast<const uint4*>(page.words + page.place(token, piece));
        range.add(x.x), range.add(x.y), range.add(x.z), range.add(x.w);
    }
    range.add_neighbours<4>();
    const float low = fminf(half_low(range.low), half_high(range.low));
    const float high = fmaxf(half_low(range.high), half_high(range.high));
    if (part == 0) store_parameters<kBits>(to, in_page, kPageTokens, token, low, high);
}

template <int kBits, int kKind>
DEVICE void find_parameters(const Page& page, Parameters& to, u16* in_page, const float* scale, const float* zero) {
    if constexpr (kKind == kPageChannel) find_channel_parameters<kBits>(page, to, in_page);
    if constexpr (kKind == kToken) find_token_parameters<kBits>(page, to, in_page);
    if constexpr (kKind == kStaticChannel)
        for (int i = threadIdx.x; i < kHeadDim; i += kThreads)
            to.scale[i] = __fdiv_rn(1.0f, scale[i]), to.zero[i] = zero[i];
}

// The code of a value, plus what kRound leaves in the bits above. With a page's own parameters, no finite value leaves the
// range of codes; with static ones it may.
template <int kBits, int kKind>
DEVICE u32 code_of(u32 pair, int odd, float zero, float scale) {
    float code = __fmul_rn(__fsub_rn(odd ? half_high(pair) : half_low(pair), zero), scale);
    if (kKind == kStaticChannel) code = fminf(fmaxf(code, 0.0f), static_cast<float>((1 << kBits) - 1));
    return __float_as_uint(__fadd_rn(code, kRound));
}

// What one lane has of a tile, gathered code by code.
template <int kBits>
struct TileWords {
    u32 words[kBits / 4] = {};

    // The code of row g or g + 8, column 2j or 2j + 8, and that column or the next (operands.cuh).
    DEVICE void add(int upper_row, int upper_column, int odd, u32 code) {
        const int value = kBits == 4 ? upper_row + 2 * upper_column + 4 * odd : 2 * upper_row + 4 * upper_column + odd;
        words[value * kBits / 32] += code << value * kBits % 32;
    }
    // To its place among the codes of a page, without what kRound has left.
    DEVICE void store(u32* codes, int item, int tile, int lane) const {
        using Reader = CodeReader<kBits, kTokenTiles * kChannelTiles>;
        u32 rest = 0;
#pragma unroll
        for (int at = 0; at < 32; at += kBits) rest += 0x4b400000u << at;
        const int load = item * Reader::kLoads + tile / Reader::kLoadTiles;
        u32* to = codes + (load * 32 + lane) * Reader::kLoadWords + tile % Reader::kLoadTiles * Reader::kTileWords;
#pragma unroll
        for (int i = 0; i < Reader::kTileWords; ++i) to[i] = words[i] - rest;
    }
};

// A group of channels that a lane has of a row: eight side by side, in a chunk of two channel tiles, or four, in the single
// last tile of an odd number. Pair k belongs to tile `tile(k)`, `is_upper(k)` to its later rows or columns.
template <bool kWhole>
struct ChannelGroup {
    static constexpr int kPairs = kWhole ? 4 : 2;
    int channel;

    DEVICE ChannelGroup(int chunk, int j) : channel(32 * chunk + 2 * kPairs * j) {}
    static DEVICE constexpr int tile(int k) { return kWhole ? k & 1 : 0; }
    static DEVICE constexpr int is_upper(int k) { return kWhole ? k / 2 : k; }

    DEVICE void load(u32 (&pairs)[kPairs], const Page& page, int token) const {
        const u32* from = page.words + page.place(token, channel / 8) + channel % 8 / 2;
        if constexpr (kWhole) {
            const uint4 x = *reinterpret_cast<const uint4*>(from);
            pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
        } else {
            const uint2 x = *reinterpret_cast<const uint2*>(from);
            pairs[0] = x.x, pairs[1] = x.y;
        }
    }
    DEVICE void load(float (&y)[2 * kPairs], const float* of_channels) const {
#pragma unroll
        for (int i = 0; i < 2 * kPairs; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(of_channels + channel + i);
            y[i] = x.x, y[i + 1] = x.y, y[i + 2] = x.z, y[i + 3] = x.w;
        }
    }
};

constexpr int kPageTiles = kPageTokens / 16;

// One piece of a thread's work on K, tiles of tokens x channels: two tokens and a group of channels, for one lane.
template <int kBits, int kKind, bool kWhole>
struct KeyTiles {
    static constexpr int kPieces = 32 * kPageTiles;  // of a chunk
    TileWords<kBits> tiles[kWhole ? 2 : 1];

    DEVICE void make(const Page& page, const Parameters& by, int chunk, int piece) {
        const int lane = piece % 32, token_tile = piece / 32;
        const ChannelGroup<kWhole> group(chunk, lane & 3);
        float zero[2 * group.kPairs], scale[2 * group.kPairs];
        if (kKind != kToken) group.load(zero, by.zero), group.load(scale, by.scale);
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int token = token_tile / kTokenTiles * kItemTokens + 2 * kTokenTiles * (lane / 4) +
                              2 * (token_tile % kTokenTiles) + upper;
            u32 pairs[group.kPairs];
            group.load(pairs, page, token);
#pragma unroll
            for (int i = 0; i < 2 * group.kPairs; ++i) {
                const int k = i / 2, odd = i % 2;
                const float z = kKind == kToken ? by.zero[token] : zero[i];
                const float s = kKind == kToken ? by.scale[token] : scale[i];
                tiles[group.tile(k)].add(upper, group.is_upper(k), odd, code_of<kBits, kKind>(pairs[k], odd, z, s));
            }
        }
    }
    DEVICE void store(u32* codes, int chunk, int piece) const {
        const int lane = piece % 32, token_tile = piece / 32;
#pragma unroll
        for (int t = 0; t < (kWhole ? 2 : 1); ++t)
            tiles[t].store(codes, token_tile / kTokenTiles, (2 * chunk + t) * kTokenTiles + token_tile % kTokenTiles, lane);
    }
};

// The same for V, tiles of channels x tokens: four tokens and a group of channels, for the lanes of two rows side by side.
template <int kBits, int kKind, bool kWhole>
struct ValueTiles {
    static constexpr int kPieces = 16 * kPageTiles;
    TileWords<kBits> tiles[2][kWhole ? 2 : 1];  // of the even and the odd row

    DEVICE void make(const Page& page, const Parameters& by, int chunk, int piece) {
        const int row_pair = piece % 4, j = piece / 4 % 4, token_tile = piece / 16;
        const ChannelGroup<kWhole> group(chunk, row_pair);
        float zero[2 * group.kPairs], scale[2 * group.kPairs];
        if (kKind != kToken) group.load(zero, by.zero), group.load(scale, by.scale);
#pragma unroll
        for (int nth = 0; nth < 4; ++nth) {
            const int odd = nth / 2, upper = nth % 2;
            const int token = token_tile / kTokenTiles * kItemTokens + 2 * kTokenTiles * (2 * j + odd) +
                              2 * (token_tile % kTokenTiles) + upper;
            u32 pairs[group.kPairs];
            group.load(pairs, page, token);
#pragma unroll
            for (int i = 0; i < 2 * group.kPairs; ++i) {
                const int k = i / 2, row = i % 2;
                const float z = kKind == kToken ? by.zero[token] : zero[i];
                const float s = kKind == kToken ? by.scale[token] : scale[i];
                tiles[row][group.tile(k)].add(group.is_upper(k), upper, odd, code_of<kBits, kKind>(pairs[k], row, z, s));
            }
        }
    }
    DEVICE void store(u32* codes, int chunk, int piece) const {
        const int row_pair = piece % 4, j = piece / 4 % 4, token_tile = piece / 16;
#pragma unroll
        for (int row = 0; row < 2; ++row)
#pragma unroll
            for (int t = 0; t < (kWhole ? 2 : 1); ++t)
                tiles[row][t].store(codes, token_tile / kTokenTiles,
                                    token_tile % kTokenTiles * kChannelTiles + 2 * chunk + t, 4 * (2 * row_pair + row) + j);
    }
};

// All pieces that a thread has in `kChunks` chunks from `first_chunk` on.
template <class Tiles, int kFirstChunk, int kChunks>
struct Share {
    static constexpr int kPieces = Tiles::kPieces * kChunks;
    Tiles turns[kPieces / kThreads + 1];

    DEVICE void make(const Page& page, const Parameters& by) {
        share_out<kPieces>([&](int turn, int i) {
            turns[turn].make(page, by, kFirstChunk + i / Tiles::kPieces, i % Tiles::kPieces);
        });
    }
    DEVICE void store(u32* codes) const {
        share_out<kPieces>([&](int turn, int i) {
            turns[turn].store(codes, kFirstChunk + i / Tiles::kPieces, i % Tiles::kPieces);
        });
    }
};

// The codes of K or V of a page: whole chunks, and the last one of an odd number of channel tiles.
template <template <int, int, bool> class Tiles, int kBits, int kKind>
struct PageCodes {
    static constexpr int kWholeChunks = kChannelTiles / 2;
    Share<Tiles<kBits, kKind, true>, 0, kWholeChunks> whole;
    Share<Tiles<kBits, kKind, false>, kWholeChunks, kChannelTiles % 2> last;

    DEVICE void make(const Page& page, const Parameters& by) { whole.make(page, by), last.make(page, by); }
    DEVICE void store(u32* codes) const { whole.store(codes), last.store(codes); }
};

// Starts the copies of K and V of a page; each thread waits for its own.
DEVICE void load_page(const Page& page, const u8* from) {
    constexpr int kPieces = kHeadDim / 8;
    share_out<kPageTokens * kPieces>([&](int, int i) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         shared_address(page.words + page.place(i / kPieces, i % kPieces))),
                     "l"(from + i * 16)
                     : "memory");
    });
}
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int kBytes>
DEVICE void store_bytes(u8* to, const void* from) {
    share_out<kBytes / 16>([&](int, int i) { reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i]; });
}

// Shared memory: K rows, V rows, parameters. Once all codes are made they take the place of the rows.
DEVICE void seal_page(const SealParams& p, const u8* k, const u8* v, u8* sealed, int head, u32* memory) {
    __shared__ __align__(16) Parameters k_parameters, v_parameters;
    const Page k_page{memory}, v_page{memory + kPageTokens * kRowWords};
    u16* parameters = reinterpret_cast<u16*>(memory + 2 * kPageTokens * kRowWords);
    load_page(k_page, k);
    load_page(v_page, v);
    wait_for_copies();
    __syncthreads();
    const int at = head * kHeadDim;
    find_parameters<kKBits, kKScale>(k_page, k_parameters, parameters, p.k_scale + at, p.k_zero + at);
    find_parameters<kVBits, kVScale>(v_page, v_parameters, parameters + kKParameterBytes / 2, p.v_scale + at, p.v_zero + at);
    __syncthreads();
    PageCodes<KeyTiles, kKBits, kKScale> keys;
    PageCodes<ValueTiles, kVBits, kVScale> values;
    keys.make(k_page, k_parameters);
    values.make(v_page, v_parameters);
    __syncthreads();
    keys.store(k_page.words);
    values.store(v_page.words);
    __syncthreads();
    store_bytes<kKPageBytes>(sealed, k_page.words);
    store_bytes<kVPageBytes>(sealed + kKPageBytes, v_page.words);
    store_bytes<kKParameterBytes + kVParameterBytes>(sealed + kKPageBytes + kVPageBytes, parameters);
}

extern "C" __global__ void __launch_bounds__(kThreads, kHeadDim <= 128 ? 6 : 3) seal_pages(const SealParams p) {
    extern __shared__ __align__(16) u32 memory[];
    start_next_kernel();
    wait_for_previous_kernel();
    const int open_page = p.open_pages[blockIdx.x], sealed_page = p.sealed_pages[blockIdx.x], head = blockIdx.y;
    if (open_page < 0 || sealed_page < 0) return;
    constexpr int kHeadBytes = kPageTokens * kHalfRowBytes;
    const u8* k = p.open_pool + (static_cast<long long>(open_page) * 2 * p.kv_heads + head) * kHeadBytes;
    const u8* v = k + p.kv_heads * kHeadBytes;
    u8* sealed = p.sealed_pool + (static_cast<long long>(sealed_page) * p.kv_heads + head) * kPageBytes;
    if constexpr (kCoded) {
        seal_page(p, k, v, sealed, head, memory);
    } else {
        store_bytes<kHeadBytes>(sealed, k);
        store_bytes<kHeadBytes>(sealed + kHeadBytes, v);
    }
}
