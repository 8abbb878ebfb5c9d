//! The plain loop for each kernel, in f64, row by row: slow, obvious, trusted. Tests and `doctor` compare with it.

mod attention;
pub mod bounds;
mod commit;
mod experts;
mod f8;
pub mod linear;
mod norm;
mod picks;
mod tree;

pub use attention::{Weights, block_attention, head_norm_rope, kv_append, mla_attention, mla_attention_with};
pub use attention::{query, visible_slots};
pub use commit::commit;
pub use experts::{combine, expert_sort, route, swiglu};
pub use f8::{e4m3, f8_rows, f8_values};
pub use norm::rms_norm;
pub use picks::{Pick, argmax, draw, embed, gumbel, probabilities, sample_kept, sample_share, sample_weight, top_k};
pub use tree::{Draft, Tree, accept, all_prefixes, tree_build, tree_build_by_definition};
