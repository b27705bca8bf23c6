"""CUDA sources of the kernels in ``cuda.py``, which says what their names mean."""

from __future__ import annotations

__all__ = ["HEADER", "PARTS", "SCORES", "WHOLE"]

# Two numbers of 16 bits in a register. Codes become levels by bit arithmetic: placed in the mantissa of a power of two
# whose last place is worth a half, less that power and half the largest code.
HEADER = """
typedef unsigned int pair_t;

#define VQ_NOTHING __int_as_float(0xff800000)  // minus infinity

template <bool BF16>
__device__ __forceinline__ void vq_mma(float* c, pair_t a0, pair_t a1, pair_t a2, pair_t a3, pair_t b0, pair_t b1) {
    if (BF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

template <bool BF16>
__device__ __forceinline__ pair_t vq_fma(pair_t a, pair_t b, pair_t c) {
    pair_t d;
    if (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

template <bool BF16>
__device__ __forceinline__ pair_t vq_round(float low, float high) {
    pair_t d;
    if (BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

template <bool BF16>
__device__ __forceinline__ float2 vq_float(pair_t x) {
    if (BF16) return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    return __half22float2(*reinterpret_cast<__half2*>(&x));
}

__device__ __forceinline__ float vq_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Weight of a part whose logits were taken less ``at``; an empty part has none.
__device__ __forceinline__ float vq_weight(float at, float top) {
    return at == VQ_NOTHING ? 0.0f : vq_exp2(at - top);
}

// Levels of the codes at ``shift`` of both halves of a word.
template <bool BF16, int WIDTH>
__device__ __forceinline__ pair_t vq_levels(pair_t x, int shift) {
    constexpr pair_t mask = (1u << WIDTH) - 1;
    constexpr pair_t base = BF16 ? 0x42804280u : 0x60006000u;
    constexpr pair_t one = BF16 ? 0x3f803f80u : 0x3c003c00u;
    x = (shift == 0 ? x << 1 : x >> (shift - 1)) & (mask << 1 | mask << 17);
    return vq_fma<BF16>(x | base, one, (base | mask | mask << 16) ^ 0x80008000u);
}

// Levels of pair ``p`` of a thread's codes: which codes those are, only ``vq_channel`` needs to know.
template <int WIDTH>
__device__ __forceinline__ pair_t vq_key_levels(const pair_t* words, int p) {
    constexpr int per_word = 16 / WIDTH;
    if (16 % WIDTH == 0) return vq_levels<false, WIDTH>(words[p / per_word], p % per_word * WIDTH);
    pair_t both = 0;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int place = (2 * p + i) * WIDTH;
        const int at = place & 31;
        pair_t code = words[place >> 5] >> at;
        if (at + WIDTH > 32) code |= words[(place >> 5) + 1] << (32 - at);
        both |= (code & ((1u << WIDTH) - 1)) << (16 * i);
    }
    return vq_levels<false, WIDTH>(both, 0);
}

template <int WIDTH>
__device__ __forceinline__ int vq_channel(int p, int i) {
    constexpr int per_word = 16 / WIDTH;
    return 16 % WIDTH == 0 ? p / per_word * 2 * per_word + p % per_word + i * per_word : 2 * p + i;
}

// Levels of channel ``j`` of two rows' words of values.
template <int WIDTH>
__device__ __forceinline__ pair_t vq_value_levels(const pair_t* first, const pair_t* second, int j) {
    constexpr int per_half = 16 / WIDTH;
    const int word = j / (2 * per_half);
    const pair_t x = __byte_perm(first[word], second[word], j / per_half % 2 ? 0x7632 : 0x5410);
    const int shift = j % per_half * WIDTH;
    if (WIDTH < 8) return vq_levels<true, WIDTH < 8 ? WIDTH : 4>(x, shift);
    // bf16 has no room for eight bits: sixteen times one half, and the other.
    return vq_fma<true>(vq_levels<true, 4>(x, shift + 4), 0x41804180u, vq_levels<true, 4>(x, shift));
}

template <int N>
__device__ __forceinline__ void vq_load(pair_t* to, const void* from) {
    if (N % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < N / 4; ++i) {
            reinterpret_cast<uint4*>(to)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
        }
    } else if (N % 2 == 0) {
        #pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            reinterpret_cast<uint2*>(to)[i] = __ldg(reinterpret_cast<const uint2*>(from) + i);
        }
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i) to[i] = __ldg(reinterpret_cast<const pair_t*>(from) + i);
    }
}

// A Hadamard transform over the lanes of a warp with N neighbouring values each.
template <int N>
__device__ __forceinline__ void vq_transform(float* x, int lane) {
    #pragma unroll
    for (int b = 1; b < N; b *= 2) {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i & b) continue;
            const float sum = x[i] + x[i + b];
            x[i + b] = x[i] - x[i + b];
            x[i] = sum;
        }
    }
    #pragma unroll
    for (int b = 1; b < 32; b *= 2) {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], b);
            x[i] = lane & b ? other - x[i] : x[i] + other;
        }
    }
}
"""

# One block for each part of the rows of a KV head; part 0 is the rows that count as they came. Every part leaves its
# logits' reference, its sum of weights and its weighted sum of values.
PARTS = """
    constexpr int PAIRS = D / 8;
    constexpr int KEY_WORDS = D * WIDTH / 128;
    constexpr bool PACKED = VALUE_WIDTH > 0;
    constexpr int VALUE_WORDS = PACKED ? DV * VALUE_WIDTH / 256 : DV / 16;
    constexpr bool BF16 = PACKED || VALUE_BF16;
    // Weights reach further down in fp16 when the largest is not 1.
    constexpr float SHIFT = BF16 ? 0.0f : 14.0f;
    __shared__ float turned[8 * D];
    __shared__ float unit[8];
    __shared__ float sum_o[WARPS * M * DV];
    __shared__ float sum_l[WARPS * M];
    __shared__ float at[WARPS * M];

    const int warp = threadIdx.x >> 5;
    const int lane = threadIdx.x & 31;
    const int head = blockIdx.y;
    const int end = rows_shape[0];
    const int begin = FIRST ? first_keys_shape[2] : 0;
    const float factor = factors[0] * 1.4426950408889634f;

    if (blockIdx.x == 0) {
        constexpr int C = D / 32;
        constexpr int CV = DV / 32;
        constexpr int AHEAD = 4;
        const int newest = last_keys_shape[2];
        float q[M][C], o[M][CV], top[M], sum[M];
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            top[m] = VQ_NOTHING;
            sum[m] = 0.0f;
            #pragma unroll
            for (int i = 0; i < C; ++i) q[m][i] = (float)queries[((size_t)head * M + m) * D + i * 32 + lane] * factor;
            #pragma unroll
            for (int i = 0; i < CV; ++i) o[m][i] = 0.0f;
        }
        for (int row = warp * AHEAD; row < begin + newest; row += WARPS * AHEAD) {
            float k[AHEAD][C], v[AHEAD][CV];
            #pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                const int r = min(row + a, begin + newest - 1);
                const size_t key_row = r < begin ? (size_t)head * first_keys_shape[2] + r
                                                 : (size_t)head * newest + r - begin;
                // Values as they came are all in one buffer.
                const int newest_at = (OWN_VALUES ? 0 : end) - begin;
                const size_t value_row = r < begin ? (size_t)head * first_values_shape[2] + r
                                                   : (size_t)head * last_values_shape[2] + newest_at + r;
                #pragma unroll
                for (int i = 0; i < C; ++i) {
                    k[a][i] = (float)(r < begin ? first_keys : last_keys)[key_row * D + i * 32 + lane];
                }
                #pragma unroll
                for (int i = 0; i < CV; ++i) {
                    v[a][i] = (float)(r < begin ? first_values : last_values)[value_row * DV + i * 32 + lane];
                }
            }
            float s[AHEAD][M];
            #pragma unroll
            for (int a = 0; a < AHEAD; ++a) {
                #pragma unroll
                for (int m = 0; m < M; ++m) {
                    s[a][m] = 0.0f;
                    #pragma unroll
                    for (int i = 0; i < C; ++i) s[a][m] = fmaf(q[m][i], k[a][i], s[a][m]);
                }
            }
            #pragma unroll
            for (int b = 16; b > 0; b /= 2) {
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    #pragma unroll
                    for (int m = 0; m < M; ++m) s[a][m] += __shfl_xor_sync(0xffffffffu, s[a][m], b);
                }
            }
            #pragma unroll
            for (int m = 0; m < M; ++m) {
                float higher = top[m];
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    // The last L rows are those of the queries.
                    const bool later = CAUSAL && row + a - begin - newest + L > m % L;
                    if (later || row + a >= begin + newest) s[a][m] = VQ_NOTHING;
                    higher = fmaxf(higher, s[a][m]);
                }
                const float fade = vq_weight(top[m], higher);
                top[m] = higher;
                sum[m] *= fade;
                #pragma unroll
                for (int i = 0; i < CV; ++i) o[m][i] *= fade;
                #pragma unroll
                for (int a = 0; a < AHEAD; ++a) {
                    const float p = vq_weight(s[a][m], higher);
                    sum[m] += p;
                    #pragma unroll
                    for (int i = 0; i < CV; ++i) o[m][i] = fmaf(p, v[a][i], o[m][i]);
                }
            }
        }
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            if (lane == 0) {
                at[warp * M + m] = top[m];
                sum_l[warp * M + m] = sum[m];
            }
            #pragma unroll
            for (int i = 0; i < CV; ++i) sum_o[(warp * M + m) * DV + i * 32 + lane] = o[m][i];
        }
    } else {
        // Rotate the queries, a warp each, and make the largest coordinate of each 1.
        for (int m = warp; m < 8; m += WARPS) {
            constexpr int C = D / 32;
            float x[C];
            #pragma unroll
            for (int i = 0; i < C; ++i) {
                x[i] = m < M ? (float)queries[((size_t)head * M + m) * D + lane * C + i] * signs[lane * C + i] : 0.0f;
            }
            vq_transform<C>(x, lane);
            float largest = 0.0f;
            #pragma unroll
            for (int i = 0; i < C; ++i) x[i] *= signs[D + lane * C + i];
            vq_transform<C>(x, lane);
            #pragma unroll
            for (int i = 0; i < C; ++i) largest = fmaxf(largest, fabsf(x[i]));
            #pragma unroll
            for (int b = 16; b > 0; b /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, b));
            if (largest == 0.0f) largest = 1.0f;
            #pragma unroll
            for (int i = 0; i < C; ++i) turned[m * D + lane * C + i] = x[i] / largest;
            if (lane == 0) unit[m] = largest / D;
        }
        __syncthreads();

        // Tile of a product: rows 0 to 7 are the queries' first halves, 8 to 15 their second ones. This thread holds
        // query g there, keys' row g, and of values and weights the rows 2 t, 2 t + 1 and those 8 below.
        const int g = lane >> 2;
        const int t = lane & 3;
        pair_t high[PAIRS], low[PAIRS];
        #pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const float* mine = turned + g * D + t * (D / 4);
            const float x = mine[vq_channel<WIDTH>(p, 0)];
            const float y = mine[vq_channel<WIDTH>(p, 1)];
            high[p] = vq_round<false>(x, y);
            const float2 rounded = vq_float<false>(high[p]);
            low[p] = vq_round<false>((x - rounded.x) * 2048.0f, (y - rounded.y) * 2048.0f);
        }
        const float mine = unit[g] * factor * factors[1];

        const int tiles = (end - begin + 15) / 16;
        const int each = (tiles + gridDim.x - 2) / (gridDim.x - 1);
        const int stop = min(tiles, (int)blockIdx.x * each);
        int tile = ((int)blockIdx.x - 1) * each + warp;
        const unsigned int* key_at = words + (size_t)head * words_shape[2] * (4 * KEY_WORDS) + t * KEY_WORDS;
        const auto* scale_at = key_scales + (size_t)head * key_scales_shape[2];
        const char* value_at = reinterpret_cast<const char*>(values)
            + (size_t)head * values_shape[2] * (PACKED ? VALUE_WORDS * 32 : DV * 2)
            + g * (PACKED ? VALUE_WORDS * 4 : 16);
        const auto* value_scale_at = value_scales + (size_t)head * value_scales_shape[2];

        float o[DV / 8][4];
        #pragma unroll
        for (int j = 0; j < DV / 8; ++j) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;
        float top = VQ_NOTHING, sum = 0.0f;
        __align__(16) pair_t keys[2][KEY_WORDS];
        float scales[4];
        // Rows behind the last are that row again, and get no weight.
        const auto load_keys = [&](int from) {
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = min(begin + from * 16 + r * 8 + g, end - 1);
                vq_load<KEY_WORDS>(keys[r], key_at + (size_t)row * (4 * KEY_WORDS));
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                scales[i] = (float)scale_at[min(begin + from * 16 + i / 2 * 8 + 2 * t + i % 2, end - 1)];
            }
        };
        if (tile < stop) load_keys(tile);
        for (; tile < stop; tile += WARPS) {
            __align__(16) pair_t v[4][VALUE_WORDS];
            float value_scale[4];
            const int base = begin + tile * 16 + 2 * t;
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = min(base + i / 2 * 8 + i % 2, end - 1);
                if (PACKED) {
                    vq_load<VALUE_WORDS>(v[i], value_at + (size_t)row * (VALUE_WORDS * 32));
                    value_scale[i] = (float)value_scale_at[row];
                } else {
                    #pragma unroll
                    for (int h = 0; h < DV / 64; ++h) {
                        vq_load<4>(v[i] + 4 * h, value_at + (size_t)row * (DV * 2) + h * 128);
                    }
                }
            }
            float c[2][4] = {};
            #pragma unroll
            for (int p = 0; p < PAIRS; p += 2) {
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    vq_mma<false>(c[r], high[p], low[p], high[p + 1], low[p + 1],
                                  vq_key_levels<WIDTH>(keys[r], p), vq_key_levels<WIDTH>(keys[r], p + 1));
                }
            }
            float s[4];
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[i] = fmaf(c[i / 2][2 + i % 2], 1.0f / 2048, c[i / 2][i % 2]) * (mine * scales[i]);
                if (base + i / 2 * 8 + i % 2 >= end) s[i] = VQ_NOTHING;
            }
            if (tile + WARPS < stop) load_keys(tile + WARPS);

            float higher = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
            higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
            higher = fmaxf(fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2)) - SHIFT, top);
            if (__any_sync(0xffffffffu, higher > top)) {
                const float fade = higher > top ? vq_exp2(top - higher) : 1.0f;
                top = higher;
                sum *= fade;
                #pragma unroll
                for (int j = 0; j < DV / 8; ++j) {
                    #pragma unroll
                    for (int i = 0; i < 4; ++i) o[j][i] *= fade;
                }
            }
            #pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[i] = vq_exp2(s[i] - top);
                sum += s[i];
                if (PACKED) s[i] *= value_scale[i];
            }
            pair_t first[2], second[2];
            #pragma unroll
            for (int r = 0; r < 2; ++r) {
                first[r] = vq_round<BF16>(s[2 * r], s[2 * r + 1]);
                const float2 rounded = vq_float<BF16>(first[r]);
                second[r] = vq_round<BF16>(s[2 * r] - rounded.x, s[2 * r + 1] - rounded.y);
            }
            #pragma unroll
            for (int j = 0; j < DV / 8; ++j) {
                pair_t b[2];
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    if (PACKED) b[r] = vq_value_levels<PACKED ? VALUE_WIDTH : 4>(v[2 * r], v[2 * r + 1], j);
                    else b[r] = __byte_perm(v[2 * r][j / 2], v[2 * r + 1][j / 2], j % 2 ? 0x7632 : 0x5410);
                }
                vq_mma<BF16>(o[j], first[0], second[0], first[1], second[1], b[0], b[1]);
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (g < M) {
            if (t == 0) {
                at[warp * M + g] = top;
                sum_l[warp * M + g] = sum;
            }
            #pragma unroll
            for (int j = 0; j < DV / 8; ++j) {
                #pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int n = 2 * t + i;
                    const int channel = PACKED ? n * (DV / 8) + j : j / 8 * 64 + n * 8 + j % 8;
                    sum_o[(warp * M + g) * DV + channel] = o[j][i] + o[j][2 + i];
                }
            }
        }
    }
    __syncthreads();
    const size_t mine = ((size_t)head * gridDim.x + blockIdx.x) * M;
    for (int i = threadIdx.x; i < M * DV; i += WARPS * 32) {
        const int m = i / DV;
        float top = VQ_NOTHING, o = 0.0f, sum = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, at[w * M + m]);
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = vq_weight(at[w * M + m], top);
            o = fmaf(weight, sum_o[w * M * DV + i], o);
            sum = fmaf(weight, sum_l[w * M + m], sum);
        }
        part_o[mine * DV + i] = o;
        if (i % DV == 0) {
            part_at[mine + m] = top;
            part_l[mine + m] = sum;
        }
    }
"""

# One block for each query: WAYS threads a channel, each over its share of the parts.
WHOLE = """
    __shared__ float weights[MOST];
    __shared__ float over_warps[WAYS * DV / 32];
    __shared__ float swap[WAYS * DV];
    const int parts = part_at_shape[1];
    const int head = blockIdx.x / M;
    const int m = blockIdx.x % M;
    const int thread = threadIdx.x;
    const int d = thread % DV;
    const auto reduce = [&](float x, bool add) {
        #pragma unroll
        for (int b = 16; b > 0; b /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, x, b);
            x = add ? x + other : fmaxf(x, other);
        }
        __syncthreads();
        if (thread % 32 == 0) over_warps[thread / 32] = x;
        __syncthreads();
        x = over_warps[0];
        #pragma unroll
        for (int w = 1; w < WAYS * DV / 32; ++w) x = add ? x + over_warps[w] : fmaxf(x, over_warps[w]);
        return x;
    };
    const float logit = SINKS ? (float)sinks[head % HEADS * (M / L) + m / L] * 1.4426950408889634f : VQ_NOTHING;
    float top = logit, sum = 0.0f;
    for (int s = thread; s < parts; s += WAYS * DV) top = fmaxf(top, part_at[((size_t)head * parts + s) * M + m]);
    top = reduce(top, false);
    for (int s = thread; s < parts; s += WAYS * DV) {
        const size_t i = ((size_t)head * parts + s) * M + m;
        weights[s] = vq_weight(part_at[i], top);
        sum = fmaf(weights[s], part_l[i], sum);
    }
    sum = reduce(sum, true) + vq_weight(logit, top);
    const float* part = part_o + ((size_t)head * parts * M + m) * DV + d;
    float o = 0.0f;
    #pragma unroll 8
    for (int s = 1 + thread / DV; s < parts; s += WAYS) o = fmaf(weights[s], part[(size_t)s * M * DV], o);
    swap[thread] = o;
    __syncthreads();
    o = 0.0f;
    #pragma unroll
    for (int w = 0; w < WAYS; ++w) o += swap[w * DV + d];
    if (ROTATED) {
        #pragma unroll
        for (int round = 1; round >= 0; --round) {
            #pragma unroll
            for (int b = 1; b < DV; b *= 2) {
                float other;
                if (b < 32) {
                    other = __shfl_xor_sync(0xffffffffu, o, b);
                } else {
                    __syncthreads();
                    swap[thread] = o;
                    __syncthreads();
                    other = swap[thread ^ b];
                }
                o = d & b ? other - o : o + other;
            }
            o *= signs[round * DV + d];
        }
        o *= factors[2] / DV;
    }
    o = fmaf(weights[0], part[0], o) / sum;
    // What was rounded beyond the largest number of fp16 becomes that number.
    if (CLIP) o = o > 65504.0f ? 65504.0f : o < -65504.0f ? -65504.0f : o;
    if (thread < DV) out[(size_t)blockIdx.x * DV + d] = static_cast<T>(o);
"""

# A thread a row: all queries of its KV head meet every level once.
SCORES = """
    // Queries of this head, a column per query: all threads read the same address at once.
    __shared__ float shared_queries[D * M];
    __shared__ float shared_levels[1 << WIDTH];
    // Words of this block's rows, read side by side; the odd width keeps rows in different banks.
    __shared__ unsigned int tile[THREADS * (WORDS + 1)];
    const int head = blockIdx.y;
    for (int i = threadIdx.x; i < D * M; i += blockDim.x) {
        shared_queries[(i % D) * M + i / D] = queries[(size_t)head * M * D + i];
    }
    for (int i = threadIdx.x; i < (1 << WIDTH); i += blockDim.x) {
        shared_levels[i] = levels[i];
    }
    const int rows = live_shape[0];
    const int begin = blockIdx.x * THREADS;
    const int here = min(THREADS, rows - begin) * WORDS;
    const unsigned int* source = words + ((size_t)head * words_shape[2] + begin) * WORDS;
    for (int i = threadIdx.x; i < here; i += blockDim.x) {
        tile[i / WORDS * (WORDS + 1) + i % WORDS] = source[i];
    }
    __syncthreads();
    const int row = begin + threadIdx.x;
    if (row >= rows) return;

    const unsigned int* packed = tile + threadIdx.x * (WORDS + 1);
    const float first = shared_levels[0];
    // Over the whole grid: the difference of two levels far from zero would be off by as much as they are rounded.
    const float step = (shared_levels[(1 << WIDTH) - 1] - first) / (float)((1 << WIDTH) - 1);
    float sums[M];
    #pragma unroll
    for (int m = 0; m < M; ++m) sums[m] = 0.0f;
    #pragma unroll 8
    for (int d = 0; d < D; ++d) {
        unsigned int code = 0;
        #pragma unroll
        for (int s = 0; s < STREAMS; ++s) {
            const int bits = WIDTH / STREAMS;
            const int place = d * bits;
            const unsigned int* word = packed + s * (WORDS / STREAMS) + (place >> 5);
            unsigned int part = word[0] >> (place & 31);
            if ((place & 31) + bits > 32) part |= word[1] << (32 - (place & 31));
            code = (code << bits) | (part & ((1u << bits) - 1u));
        }
        const float level = UNIFORM ? fmaf((float)code, step, first) : shared_levels[code];
        #pragma unroll
        for (int m = 0; m < M; ++m) sums[m] = fmaf(level, shared_queries[d * M + m], sums[m]);
    }
    const float scale = (float)scales[(size_t)head * scales_shape[2] + row];
    #pragma unroll
    for (int m = 0; m < M; ++m) out[((size_t)head * M + m) * rows + row] = sums[m] * scale;
"""
