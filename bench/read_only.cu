// read_only: reads chunks of memory and does nothing else: the bar for kernels that must read them.
typedef unsigned int u32;
typedef long long i64;

extern "C" __global__ void __launch_bounds__(256) read_only(
    const uint4* const* __restrict__ chunks,   // [num_chunks] addresses of CHUNK_BYTES each
    u32* __restrict__ sink,                    // [1], written only if all bytes cancel out
    i64 num_chunks) {
    constexpr int LOADS = CHUNK_BYTES / 16 / 256;
    static_assert(CHUNK_BYTES % (16 * 256) == 0, "whole vectors for each thread");
    u32 seen = 1;
    for (i64 c = blockIdx.x; c < num_chunks; c += gridDim.x) {
        uint4 v[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; i++) v[i] = __ldcs(chunks[c] + i * 256 + threadIdx.x);
#pragma unroll
        for (int i = 0; i < LOADS; i++) seen += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
    }
    if (seen == 0) *sink = seen;
}
