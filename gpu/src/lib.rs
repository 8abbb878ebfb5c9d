//! The kernels: one source, compiled to PTX for GPUs and to host code for the CPU device.
//!
//! Nothing here knows a model: sizes come in as arguments. Argument structs live in [`args`] and are the same text on
//! both sides.
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

pub mod args;
pub mod kernels;
pub mod philox;

/// Shared memory that a block may take, bytes: the least of the supported GPUs (sm_120). Each kernel with dynamic
/// shared memory asserts it for its largest configuration, static arrays included.
pub const SHARED_LIMIT: u32 = 101_376;

/// The same on GPUs with the most (sm_90): for kernels whose launcher asks the device, and has a smaller one as well.
pub const SHARED_LIMIT_LARGE: u32 = 232_448;

mod unroll;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::thread::trap("panic")
}
