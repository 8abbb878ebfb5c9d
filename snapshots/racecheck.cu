// What compute-sanitizer's racecheck reports although PTX orders it; docs/hardware.md says why it matters.
//
//     nvcc -arch=sm_90a -lineinfo -o racecheck snapshots/racecheck.cu && compute-sanitizer --tool racecheck ./racecheck
#include <cstdio>
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
// PTX's producer and consumer: numbered barriers, arrive and sync.
__global__ void hand_over(int *y) {
  __shared__ int tile[32];
  int t = threadIdx.x, lane = t % 32;
  for (int round = 0; round < 4; round++) {
    if (t >= 32) {
      asm volatile("barrier.sync 1, 64;" ::: "memory");
      y[round * 32 + lane] = tile[31 - lane];
      asm volatile("barrier.arrive 2, 64;" ::: "memory");
    } else {
      if (round > 0) asm volatile("barrier.sync 2, 64;" ::: "memory");
      tile[lane] = lane * (round + 1);
      asm volatile("barrier.arrive 1, 64;" ::: "memory");
    }
  }
  if (t < 32) asm volatile("barrier.sync 2, 64;" ::: "memory");
}
// The same with sync in place of arrive.
__global__ void hand_over_sync(int *y) {
  __shared__ int tile[32];
  int t = threadIdx.x, lane = t % 32;
  for (int round = 0; round < 4; round++) {
    if (t < 32) tile[lane] = lane * (round + 1);
    asm volatile("barrier.sync 1, 64;" ::: "memory");
    if (t >= 32) y[round * 32 + lane] = tile[31 - lane];
    asm volatile("barrier.sync 2, 64;" ::: "memory");
  }
}
// A copy that nobody reads, or all do: waited for, a barrier of the block, of the cluster, then another block writes
// there.
__global__ void __cluster_dims__(2, 1, 1) unread(const int4 *x, int *y, int reads) {
  __shared__ int4 tile[64];
  auto cluster = cg::this_cluster();
  int t = threadIdx.x;
  unsigned to = (unsigned)__cvta_generic_to_shared(&tile[t]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(x + t) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  int sum = reads ? tile[63 - t].x : 0;
  cluster.sync();
  int4 *other = cluster.map_shared_rank(tile, cluster.block_rank() ^ 1);
  other[t] = make_int4(t, sum, 0, 0);
  cluster.sync();
  y[blockIdx.x * 64 + t] = tile[63 - t].x + tile[63 - t].y;
}
int main() {
  int *y; int4 *x;
  cudaMalloc(&y, 4096); cudaMalloc(&x, 4096); cudaMemset(x, 0, 4096);
  hand_over<<<1, 64>>>(y); cudaDeviceSynchronize();
  hand_over_sync<<<1, 64>>>(y); cudaDeviceSynchronize();
  unread<<<2, 64>>>(x, y, 0); cudaDeviceSynchronize();
  unread<<<2, 64>>>(x, y, 1);
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
