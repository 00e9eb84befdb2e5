// One instance of the decode kernel: the macros the host compiles it with, as constants, and its launch parameters.
#pragma once
#include "ptx.cuh"

constexpr int kHeadDim = HEAD_DIM;          // channels of a head: a multiple of 16
constexpr int kKBits = K_BITS;              // 4, 8 or 16
constexpr int kVBits = V_BITS;
constexpr int kHeadTiles = HEAD_TILES;      // query heads of a group in units of 8: 1 or 2
constexpr int kTokenTiles = TOKEN_TILES;    // tokens of a work item of a sealed page in units of 16: 2 or 4
constexpr int kMaxConsumers = MAX_CONSUMERS;  // consumer warps at most
constexpr int kMergers = MERGERS;             // warps that merge consumers' states
constexpr int kHelpers = 2 + kMergers;        // the producer, the query warp and the mergers: a warpgroup

// Sixteen heads of many channels need more registers than each thread's share: the helpers give theirs.
// Other architectures than sm_90 and sm_100 cannot, and have fewer consumers.
constexpr bool kWantsRegisters = kHeadTiles == 2 && HEAD_DIM > 96;
constexpr bool kShiftsRegisters = kWantsRegisters && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
constexpr int kBlockConsumers = kWantsRegisters && !kShiftsRegisters ? 4 : MAX_CONSUMERS;
constexpr int kHelperRegisters = 72, kConsumerRegisters = 216;

enum ScaleKind : int { kNone = 0, kPageChannel = 1, kToken = 2, kStaticChannel = 3 };
constexpr int kKScale = K_SCALE;
constexpr int kVScale = V_SCALE;  // kToken or kStaticChannel

// A query times a scale of K does not fit fp16. With kSplit, what its rounding lost is multiplied with the codes as well. Sixteen
// heads have no time for that: what was lost is multiplied with the middle of the codes' range, once a page.
constexpr bool kScaledByPage = kKScale == kPageChannel;
constexpr bool kScalesQueries = kScaledByPage || kKScale == kStaticChannel;
constexpr bool kSplit = kScalesQueries && kHeadTiles == 1;
constexpr bool kAddsMiddle = kScalesQueries && !kSplit;
constexpr float kMiddleCode = ((1 << kKBits) - 1) * 0.5f;

constexpr int kPageTokens = 64;
constexpr bool kCoded = kKBits < 16;
constexpr int kChannelTiles = kHeadDim / 16;
constexpr int kQueryChunks = (kChannelTiles + 1) / 2;  // 16-byte pieces a lane holds of a query: two channel tiles each
constexpr int kHeadSlots = 8 * kHeadTiles;
constexpr int kItemTokens = 16 * kTokenTiles;
constexpr int kItemsPerPage = kPageTokens / kItemTokens;
// Tokens of a work item of an fp16 page: as many as make it no larger than an item of a sealed page.
constexpr int kHalfItemTokens = kCoded && kHeadDim > 192 ? 8 : 16;
constexpr int kHalfRowBytes = 2 * kHeadDim;
constexpr int kKItemBytes = kItemTokens * kHeadDim * kKBits / 8;
constexpr int kVItemBytes = kItemTokens * kHeadDim * kVBits / 8;
constexpr int kKPageBytes = kItemsPerPage * kKItemBytes;
constexpr int kVPageBytes = kItemsPerPage * kVItemBytes;
// Consumers' results that are to be merged: in fp16 where there are sixteen heads, which take much of shared memory.
constexpr bool kMergesHalves = kHeadTiles == 2;
template <bool kHalves> struct MergeNumberOf { using Type = float; };
template <> struct MergeNumberOf<true> { using Type = u16; };
using MergeNumber = MergeNumberOf<kMergesHalves>::Type;
constexpr int kMergeStride = kHeadDim + 16 / sizeof(MergeNumber);  // numbers of a head
constexpr int kUnitTable = 128;                        // units of work listed at a time

DEVICE constexpr int parameter_bytes(int kind) {
    return kind == kPageChannel ? 4 * kHeadDim : kind == kToken ? 4 * kPageTokens : 0;
}
constexpr int kKParameterBytes = parameter_bytes(kKScale);  // scales, then zero points
constexpr int kVParameterBytes = parameter_bytes(kVScale);
constexpr int kPageBytes = kKPageBytes + kVPageBytes + kKParameterBytes + kVParameterBytes;
constexpr int kHalfPageBytes = 2 * kPageTokens * kHalfRowBytes;  // of one KV head

// Mirrored field by field by nibble/kernels/decode.py.
struct DecodeParams {
    const u16* q;              // [batch, kv_heads * group, head_dim], fp16 or bf16
    u16* out;                  // like q
    float* log_sum_exp;        // [batch, kv_heads * group] or null
    const u8* open_pool;       // fp16 [pages, 2, kv_heads, 64, head_dim]
    const u8* sealed_pool;     // [pages, kv_heads, page_bytes]
    const int* block_table;    // [batch, max_pages]
    const int* seq_lens;       // [batch]
    const float* k_scale;      // [kv_heads, head_dim], static formats
    const float* k_zero;
    const float* v_scale;
    const float* v_zero;
    u16* partial_out;          // fp16 [batch, kv_heads, max_splits, group, head_dim], channels in tile order
    float* partial_lse;        // [batch, kv_heads, max_splits, group], log2 units
    float softmax_scale;
    int batch;
    int kv_heads;
    int group;
    int max_pages;
    int max_splits;
    int sink_pages;
    int recent_pages;
    int sliding_window;        // 0: none
    int is_bfloat;
    int consumers;             // of this launch
    int stages;                // stages of the ring
    int stage_bytes;
    int split_pages;           // pages of a split at most; 0: chosen from the length
};
