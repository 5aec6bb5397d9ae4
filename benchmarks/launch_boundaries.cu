// What it costs a small kernel to depend on the one before it, in a CUDA graph on sm_90.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -o launch_boundaries benchmarks/launch_boundaries.cu
//     ./launch_boundaries
//
// 288 launches, as a token of qwen3-30b-a3b takes: 128 blocks of 256 threads that read their weights
// ahead, then 2048 numbers that the launch ahead wrote, norm them, and write 2048. How a launch learns
// that they are there:
//
//   ordinary   it starts when the one ahead has ended
//   wait       programmatic dependent launch, and `griddepcontrol.wait`
//   flags      early start; each block of the launch ahead releases a flag of its own, all are polled
//   counter    the same with one counter that the blocks add to
//   tags       each number is written with a tag and polled for
//   nothing    early start without waiting: wrong, and the least there could be
//   one launch all 288 phases in one launch of resident blocks, with flags
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

#define CHECK(call)                                                                       \
    do {                                                                                  \
        const cudaError_t error = (call);                                                 \
        if (error != cudaSuccess) {                                                       \
            std::printf("%s: %s\n", #call, cudaGetErrorString(error));                    \
            std::exit(1);                                                                 \
        }                                                                                 \
    } while (0)

using u32 = unsigned int;
enum Way { ORDINARY, WAIT, FLAGS, COUNTER, TAGS, NOTHING };
constexpr int NUMBERS = 2048, BLOCKS = 128, THREADS = 256, ROWS = NUMBERS / BLOCKS, LAUNCHES = 288;
constexpr size_t WEIGHTS = size_t(1) << 26;  // of 16 bytes: 1 GiB, cold in every round

__device__ u32 load_acquire(const u32* at) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
__device__ void store_release(u32* to, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ void add_release(u32* to, u32 v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ uint4 load_weights(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
__device__ uint4 load_relaxed(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ float sum_of_warp(float v) {
    for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
    return v;
}

struct Phase {
    const uint4* weights;
    const float* x;
    float* y;
    const u32* before;  // flags of the launch ahead, or the counter
    u32* own;
    const uint2* tagged_x;
    uint2* tagged_y;
    u32 number;
    bool is_first;
};

// LOADS: 16-byte weights of a thread.
template <Way WAY, int LOADS>
__device__ void run(const Phase& phase, const u32* round) {
    __shared__ float x[NUMBERS], part[THREADS / 32][ROWS], squares[THREADS / 32];
    const int thread = threadIdx.x, block = blockIdx.x, lane = thread % 32, warp = thread / 32;
    uint4 ring[LOADS > 0 ? LOADS : 1] = {};
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
        ring[i] = load_weights(phase.weights + (size_t(block) * LOADS + i) * THREADS + thread);
    if (WAY == WAIT) asm volatile("griddepcontrol.wait;" ::: "memory");
    const u32 epoch = phase.number + *round;
    if (!phase.is_first && WAY == FLAGS) {
        if (thread < BLOCKS)
            while ((int)(load_acquire(phase.before + thread) - epoch) < 0) {}
        __syncthreads();
    }
    if (!phase.is_first && WAY == COUNTER) {
        if (thread == 0)
            while ((int)(load_acquire(phase.before) - epoch * BLOCKS) < 0) {}
        __syncthreads();
    }
    if (WAY == TAGS) {
        for (int i = thread; i < NUMBERS / 2; i += THREADS) {
            uint4 two;
            do two = load_relaxed(reinterpret_cast<const uint4*>(phase.tagged_x) + i);
            while (two.y != epoch || two.w != epoch);
            x[2 * i] = __uint_as_float(two.x), x[2 * i + 1] = __uint_as_float(two.z);
        }
    } else {
        for (int i = thread; i < NUMBERS / 4; i += THREADS)
            reinterpret_cast<uint4*>(x)[i] =
                load_relaxed(reinterpret_cast<const uint4*>(phase.x) + i);
    }
    __syncthreads();
    float square = 0;
    for (int i = thread; i < NUMBERS; i += THREADS) square += x[i] * x[i];
    square = sum_of_warp(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < THREADS / 32; ++w) square += squares[w];
    const float inverse = rsqrtf(square / NUMBERS + 1e-6f);
    float sum[ROWS] = {};
#pragma unroll
    for (int i = 0; i < (LOADS > 0 ? LOADS : 1); ++i) {
        const u32 bits = ring[i].x ^ ring[i].y ^ ring[i].z ^ ring[i].w;
        sum[i % ROWS] += ((bits & 255) * 0.01f - 1.0f) * x[(i * THREADS + thread) % NUMBERS] * inverse;
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) sum[i] = sum_of_warp(sum[i]);
    if (lane == 0)
        for (int i = 0; i < ROWS; ++i) part[warp][i] = sum[i];
    __syncthreads();
    if (thread < ROWS) {
        float total = 0;
        for (int w = 0; w < THREADS / 32; ++w) total += part[w][thread];
        const int at = block * ROWS + thread;
        if (WAY == TAGS)
            asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(phase.tagged_y + at),
                         "r"(__float_as_uint(total)), "r"(epoch + 1)
                         : "memory");
        else
            phase.y[at] = total;
    }
    if (warp == 0) {
        __syncwarp();
        if (WAY == FLAGS && thread == 0) store_release(phase.own + block, epoch + 1);
        if (WAY == COUNTER && thread == 0) add_release(phase.own, 1);
    }
}

template <Way WAY, int LOADS>
__global__ void __launch_bounds__(THREADS) launch_kernel(Phase phase, const u32* round) {
    if (WAY != ORDINARY) {
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
        if (phase.is_first) asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    run<WAY, LOADS>(phase, round);
}

template <int LOADS>
__global__ void __launch_bounds__(THREADS)
    one_launch_kernel(const uint4* weights, float* x, u32* flags, const u32* round) {
    for (u32 i = 0; i < LAUNCHES; ++i) {
        const size_t step = size_t(BLOCKS) * LOADS * THREADS;
        const uint4* own = weights + (i * step) % (WEIGHTS - step);
        run<FLAGS, LOADS>({own, x + i % 2 * NUMBERS, x + (i + 1) % 2 * NUMBERS, flags, flags, nullptr,
                           nullptr, i, false},
                          round);
        __syncthreads();
    }
}

__global__ void add_round(u32* round, u32 by) { *round += by; }

__global__ void fill(u32* to, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
         i += size_t(gridDim.x) * blockDim.x) {
        u32 hash = u32(i) * 2654435761u;
        hash = (hash ^ hash >> 15) * 2246822519u;
        to[i] = hash ^ hash >> 13;
    }
}

uint4* weights;
float* x;
u32 *flags, *round_number;
uint2* tagged;

template <class Record>
void time(const char* name, double mb, Record record) {
    CHECK(cudaMemset(flags, 0, 4 * BLOCKS * 4));
    CHECK(cudaMemset(tagged, 0, 4 * NUMBERS * sizeof(uint2)));
    CHECK(cudaMemset(round_number, 0, 4));
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaEvent_t start, end;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    record(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 25; ++i) {
        CHECK(cudaEventRecord(start, stream));
        CHECK(cudaGraphLaunch(replay, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, start, end));
        if (i >= 5) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    std::printf("%-10s %5.2f MB of weights  %.3f us\n", name, mb,
                times[times.size() / 2] * 1000 / LAUNCHES);
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

template <Way WAY, int LOADS>
void time_launches(const char* name) {
    const size_t step = size_t(BLOCKS) * LOADS * THREADS;
    time(name, step * 16 / 1e6, [&](cudaStream_t stream) {
        for (u32 i = 0; i < LAUNCHES; ++i) {
            const int from = i % 4, to = (i + 1) % 4;
            Phase phase = {weights + (i * step) % (WEIGHTS - step), x + from * NUMBERS,
                           x + to * NUMBERS, flags + from * BLOCKS, flags + to * BLOCKS,
                           tagged + from * NUMBERS, tagged + to * NUMBERS, i, i == 0};
            if (WAY == COUNTER) phase.before = phase.own = flags;
            cudaLaunchConfig_t config = {};
            config.gridDim = BLOCKS, config.blockDim = THREADS, config.stream = stream;
            cudaLaunchAttribute early;
            early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            early.val.programmaticStreamSerializationAllowed = 1;
            config.attrs = &early, config.numAttrs = WAY != ORDINARY && i > 0;
            CHECK(cudaLaunchKernelEx(&config, launch_kernel<WAY, LOADS>, phase,
                                     (const u32*)round_number));
        }
        const bool counts = WAY == FLAGS || WAY == COUNTER || WAY == TAGS;
        add_round<<<1, 1, 0, stream>>>(round_number, counts ? LAUNCHES : 0);
    });
}

template <int LOADS>
void time_all() {
    time_launches<ORDINARY, LOADS>("ordinary");
    time_launches<WAIT, LOADS>("wait");
    time_launches<FLAGS, LOADS>("flags");
    time_launches<COUNTER, LOADS>("counter");
    time_launches<TAGS, LOADS>("tags");
    time_launches<NOTHING, LOADS>("nothing");
    time("one launch", BLOCKS * LOADS * THREADS * 16 / 1e6, [](cudaStream_t stream) {
        one_launch_kernel<LOADS><<<BLOCKS, THREADS, 0, stream>>>(weights, x, flags, round_number);
        add_round<<<1, 1, 0, stream>>>(round_number, LAUNCHES);
    });
}

int main() {
    CHECK(cudaMalloc(&weights, WEIGHTS * sizeof(uint4)));
    CHECK(cudaMalloc(&x, 4 * NUMBERS * sizeof(float)));
    CHECK(cudaMalloc(&flags, 4 * BLOCKS * 4));
    CHECK(cudaMalloc(&tagged, 4 * NUMBERS * sizeof(uint2)));
    CHECK(cudaMalloc(&round_number, 4));
    fill<<<1024, 256>>>(reinterpret_cast<u32*>(weights), WEIGHTS * 4);
    CHECK(cudaMemset(x, 0, 4 * NUMBERS * sizeof(float)));
    CHECK(cudaDeviceSynchronize());
    time_all<0>();
    time_all<4>();
    time_all<8>();
    time_all<16>();
    return 0;
}
