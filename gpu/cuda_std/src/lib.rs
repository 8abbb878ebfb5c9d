//! CUDA's programming model for kernels in Rust, on two devices.
//!
//! The names follow the published `cuda_std` (`#[kernel]`, `thread::thread_idx_x()`, `thread::sync_threads()`,
//! `warp::...`). On `nvptx64` every function is one instruction or a short sequence of PTX (`ptx.rs`, the only room
//! with inline assembly). On any other target the same functions run on the CPU (`cpu/`): a block's threads are
//! coroutines, memory is checked, and faults name kernel, block and thread.
//!
//! Kernels never dereference: global memory is reached through [`Global`] and [`GlobalMut`], shared memory through
//! [`Shared`]. Each access is one load or store on the GPU and a checked access on the CPU.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch, stdarch_nvptx))]
#![cfg_attr(target_arch = "nvptx64", feature(link_llvm_intrinsics, abi_unadjusted), allow(internal_features))]

pub mod async_copy;
#[cfg(any(not(target_arch = "nvptx64"), target_feature = "ptx80"))]
pub mod bulk;
pub mod cluster;
pub mod math;
pub mod mma;
pub mod thread;
pub mod warp;
pub mod wgmma;

/// Whether tile products are computed one by one on a CPU, where leaving out those without effect is worth a look.
pub const EMULATED: bool = cfg!(not(target_arch = "nvptx64"));

mod element;
mod global;
mod shared;

#[cfg(not(target_arch = "nvptx64"))]
pub mod cpu;
#[cfg(not(target_arch = "nvptx64"))]
mod kernel;
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub mod ptx;
#[cfg(target_arch = "nvptx64")]
mod ptx_barriers;
#[cfg(all(target_arch = "nvptx64", target_feature = "ptx80"))]
mod ptx_bulk;
#[cfg(target_arch = "nvptx64")]
mod ptx_cluster;
#[cfg(target_arch = "nvptx64")]
mod ptx_half;
#[cfg(target_arch = "nvptx64")]
mod ptx_wgmma;

#[cfg(not(target_arch = "nvptx64"))]
use cpu::ops as arch;
#[cfg(target_arch = "nvptx64")]
use ptx as arch;

pub use cuda_std_macros::kernel;
pub use element::Element;
pub use global::{Global, GlobalMut};
pub use half::bf16;
#[cfg(not(target_arch = "nvptx64"))]
pub use kernel::Kernel;
#[doc(hidden)]
pub use shared::static_shared_view;
pub use shared::{Shared, dynamic_shared};
