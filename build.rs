//! Compiles the kernels in `gpu/` to PTX for every architecture and leaves `ptx.rs` for the host to include.

use cuda_builder::Arch;

fn main() {
    if let Err(error) = cuda_builder::embed("gpu", &Arch::ALL) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
