// New keys and values into open pages, eight channels a thread; bf16 becomes fp16 on the way.
#include "ptx.cuh"

struct AppendParams {
    const u16* k;       // [tokens, kv_heads, head_dim], fp16 or bf16; rows of a token are contiguous
    const u16* v;
    u16* open_pool;     // fp16 [pages, 2, kv_heads, 64, head_dim]
    const int* slots;   // [tokens]: page * 64 + place, -1: nothing to do
    long long k_stride; // elements from token to token
    long long v_stride;
    int tokens;
    int kv_heads;
    int head_dim;
    int is_bfloat;
};

DEVICE u32 to_halves(u32 pair, int is_bfloat) {
    return is_bfloat ? pack_halves(bfloat_low(pair), bfloat_high(pair)) : pair;
}

extern "C" __global__ void __launch_bounds__(256) append_tokens(const AppendParams p) {
    const int pieces = p.kv_heads * p.head_dim / 8;  // of K, and of V, of a token
    const long long index = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const int token = index / (2 * pieces);
    start_next_kernel();
    wait_for_previous_kernel();
    if (token >= p.tokens) return;
    const int slot = p.slots[token];
    const int piece = index - static_cast<long long>(token) * 2 * pieces;
    const bool is_value = piece >= pieces;
    const int element = (is_value ? piece - pieces : piece) * 8;
    const u16* from = is_value ? p.v + token * p.v_stride : p.k + token * p.k_stride;
    uint4 x = *reinterpret_cast<const uint4*>(from + element);  // beside the slot, so of a padded token, too
    if (slot < 0) return;
    x = make_uint4(to_halves(x.x, p.is_bfloat), to_halves(x.y, p.is_bfloat), to_halves(x.z, p.is_bfloat),
                   to_halves(x.w, p.is_bfloat));
    const int head = element / p.head_dim, channel = element - head * p.head_dim;
    const long long row = ((static_cast<long long>(slot / 64) * 2 + is_value) * p.kv_heads + head) * 64 + slot % 64;
    *reinterpret_cast<uint4*>(p.open_pool + row * p.head_dim + channel) = x;
}
