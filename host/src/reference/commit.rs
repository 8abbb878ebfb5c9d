//! Twin of `gpu::kernels::commit`.

use cuda_std::bf16;

/// Moves rows `committed + path[r]` of `cache [layers, slots, width]` to `committed + r`, through a copy.
pub fn commit(cache: &mut [bf16], slots: usize, width: usize, committed: usize, path: &[usize]) {
    for layer in cache.chunks_mut(slots * width) {
        let before = layer.to_vec();
        for (r, from) in path.iter().enumerate() {
            let (to, from) = ((committed + r) * width, (committed + from) * width);
            layer[to..to + width].copy_from_slice(&before[from..from + width]);
        }
    }
}
