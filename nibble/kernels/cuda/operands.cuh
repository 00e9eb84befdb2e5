// From packed codes to tensor-core operands. A 16 x 16 tile of codes is one A operand: K as tokens x channels, V as
// channels x tokens. A lane's codes of a tile lie together, and a code c becomes the fp16 number c 2^-24 (a subnormal, so
// its bits are the code itself): no conversion, only masks. In 4-bit tiles the rows g + 8 come out as whole bytes: the code of
// the row g and 16 times their own.
//
//   4 bits, one word a tile:   bits 0-3 (g, 2j)   4-7 (g+8, 2j)   8-11 (g, 2j+8)   12-15 (g+8, 2j+8)   and the same
//                              from bit 16 for columns 2j+1 and 2j+9
//   8 bits, two words a tile:  bytes (g, 2j) (g, 2j+1) (g+8, 2j) (g+8, 2j+1), then the same for columns 2j+8, 2j+9
#pragma once
#include "config.cuh"

constexpr float kCodeUnit = 16777216.0f;  // 2^24: from c 2^-24 to c


// The codes of `kTiles` tiles, fetched in the widest loads that divide them: [load][lane][words of a load].
template <int kBits, int kTiles>
struct CodeReader {
    static constexpr int kTileWords = kBits / 4;
    static constexpr int kLoadWords = (kTiles * kTileWords) % 4 == 0 ? 4 : 2;
    static constexpr int kLoadTiles = kLoadWords / kTileWords;
    static constexpr int kLoads = kTiles / kLoadTiles;
    static_assert(kLoads * kLoadTiles == kTiles, "tiles must fill whole loads");

    static DEVICE void load(u32 (&words)[kLoadWords], u32 codes, int index, int lane) {
        const u32 address = codes + (index * 32 + lane) * kLoadWords * 4;
        if constexpr (kLoadWords == 4) {
            const uint4 x = load_shared16(address);
            words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        } else {
            const uint2 x = load_shared8(address);
            words[0] = x.x, words[1] = x.y;
        }
    }
    static DEVICE void unpack(u32 (&a)[4], const u32 (&words)[kLoadWords], int tile) {
        if constexpr (kBits == 4) {
            a[1] = words[tile] & 0x00ff00ffu;
            a[3] = __byte_perm(words[tile], 0, 0x4341);
            a[0] = a[1] & 0x000f000fu;
            a[2] = a[3] & 0x000f000fu;
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[2 * half] = __byte_perm(words[2 * tile + half], 0, 0x4140);
                a[2 * half + 1] = __byte_perm(words[2 * tile + half], 0, 0x4342);
            }
        }
    }
};
