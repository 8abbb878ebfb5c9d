//! Kernels against their reference twins. Each case runs on the CPU device in checked mode and on a GPU; without one
//! the GPU cases are reported as ignored, and `KDTREE_REQUIRE_GPU=1` makes that a failure.

mod accept;
mod argmax;
mod bandwidth;
mod block_attention;
mod commit;
mod device;
mod draw;
mod embed;
mod gate_up;
mod gated;
mod linear;
mod linear_counts;
mod linear_dense;
mod linear_edges;
mod linear_grouped;
mod linear_tiled;
mod mla_attention;
mod mla_f8;
mod mla_trees;
mod moe;
mod query;
mod recorded;
mod rms_norm;
mod route;
mod selfcheck;
mod selftest;
mod selftest_math;
#[path = "../support/mod.rs"]
mod support;
mod top_k;
mod tree;
mod tree_build;
mod tree_shapes;
mod widen;

fn main() -> std::process::ExitCode {
    let mut suite = support::Suite::new();
    device::cases(&mut suite);
    linear_dense::cases(&mut suite);
    linear_counts::cases(&mut suite);
    linear_edges::cases(&mut suite);
    gate_up::cases(&mut suite);
    gated::cases(&mut suite);
    linear_grouped::cases(&mut suite);
    linear_tiled::cases(&mut suite);
    block_attention::cases(&mut suite);
    commit::cases(&mut suite);
    query::cases(&mut suite);
    mla_attention::cases(&mut suite);
    mla_f8::cases(&mut suite);
    mla_trees::cases(&mut suite);
    rms_norm::cases(&mut suite);
    embed::cases(&mut suite);
    route::cases(&mut suite);
    selfcheck::cases(&mut suite);
    selftest::cases(&mut suite);
    selftest_math::cases(&mut suite);
    moe::cases(&mut suite);
    argmax::cases(&mut suite);
    top_k::cases(&mut suite);
    tree_build::cases(&mut suite);
    tree_shapes::cases(&mut suite);
    widen::cases(&mut suite);
    bandwidth::cases(&mut suite);
    accept::cases(&mut suite);
    draw::cases(&mut suite);
    recorded::cases(&mut suite);
    suite.run()
}
