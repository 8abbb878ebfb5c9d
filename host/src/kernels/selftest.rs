//! Launchers of [`gpu::kernels::selftest`].

use cuda_std::{Element, Global, GlobalMut, Kernel, bf16};
use gpu::args::selftest::{SelftestElementsArgs, SelftestMathArgs, SelftestMatrixArgs, SelftestWordsArgs};
use gpu::kernels::selftest as kernel;

use super::holds;
use crate::device::{Device, Dims, Result};

/// A selftest of words in and words out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordsTest {
    Warp,
    Indices,
    Wide,
    Async,
    Atomics,
    Barriers,
}

impl WordsTest {
    /// Words read and words written.
    pub fn words(self) -> (usize, usize) {
        let block = kernel::THREADS as usize;
        let blocks = kernel::INDICES_GRID.iter().product::<u32>() as usize;
        match self {
            Self::Warp => (block, kernel::WARP_ROWS * block),
            Self::Indices => (0, blocks * block * kernel::INDICES_WORDS),
            Self::Wide => (kernel::WORDS, kernel::WIDE_ROWS * block),
            Self::Async => (kernel::WORDS, kernel::ASYNC_ROWS * block),
            Self::Atomics => (0, kernel::ATOMIC_WORDS),
            Self::Barriers => (block, kernel::BARRIER_ROWS * block),
        }
    }

    fn kernel(self) -> (&'static Kernel<SelftestWordsArgs>, Dims) {
        const WORD: u32 = 4;
        let line = |blocks: u32, shared: u32| Dims { grid: [blocks, 1, 1], block: [kernel::THREADS, 1, 1], shared };
        match self {
            Self::Warp => (&kernel::SELFTEST_WARP, line(1, kernel::THREADS * WORD)),
            Self::Indices => {
                let (grid, block) = (kernel::INDICES_GRID, kernel::INDICES_BLOCK);
                (&kernel::SELFTEST_INDICES, Dims { grid, block, shared: kernel::THREADS * WORD })
            }
            Self::Wide => (&kernel::SELFTEST_WIDE, line(1, 2 * kernel::WORDS as u32 * WORD)),
            Self::Async => (&kernel::SELFTEST_ASYNC, line(1, 3 * kernel::WORDS as u32 * WORD)),
            Self::Barriers => (&kernel::SELFTEST_BARRIERS, line(1, kernel::THREADS * WORD)),
            Self::Atomics => (
                &kernel::SELFTEST_ATOMICS,
                line(kernel::ATOMIC_BLOCKS, (kernel::THREADS + kernel::ATOMIC_EXTRA) * WORD),
            ),
        }
    }
}

/// Queues one of the selftests of words.
pub fn selftest_words(device: &Device, test: WordsTest, x: Global<u32>, y: GlobalMut<u32>) -> Result<()> {
    let (kernel, dims) = test.kernel();
    let (read, written) = test.words();
    holds(kernel.name(), "x", x.len(), read)?;
    holds(kernel.name(), "y", y.len(), written)?;
    device.launch(kernel, dims, SelftestWordsArgs { x, y })
}

/// Queues the selftest of elements.
pub fn selftest_elements(device: &Device, p: SelftestElementsArgs) -> Result<()> {
    fn check<T: Element>(x: Global<T>, y: GlobalMut<T>) -> Result<()> {
        let name = kernel::SELFTEST_ELEMENTS.name();
        holds(name, "an input", x.len(), kernel::ELEMENTS)?;
        holds(name, "an output", y.len(), kernel::ELEMENTS)
    }
    check(p.x_u8, p.y_u8)?;
    check(p.x_u16, p.y_u16)?;
    check(p.x_u32, p.y_u32)?;
    check(p.x_i32, p.y_i32)?;
    check(p.x_u64, p.y_u64)?;
    check(p.x_f32, p.y_f32)?;
    check(p.x_bf16, p.y_bf16)?;
    let shared = (kernel::ELEMENTS * size_of::<u64>()) as u32;
    let dims = Dims { grid: [1, 1, 1], block: [kernel::THREADS, 1, 1], shared };
    device.launch(&kernel::SELFTEST_ELEMENTS, dims, p)
}

/// Queues the selftest of tiles.
pub fn selftest_matrix(device: &Device, p: SelftestMatrixArgs) -> Result<()> {
    let name = kernel::SELFTEST_MATRIX.name();
    for (what, len, need) in [
        ("a", p.a.len(), 16 * 16),
        ("b", p.b.len(), 8 * 16),
        ("c", p.c.len(), 16 * 8),
        ("fragments", p.fragments.len(), 12 * 32),
        ("d", p.d.len(), 3 * 16 * 8),
    ] {
        holds(name, what, len, need)?;
    }
    let shared = (2 * (16 * 16 + 8 * 16) * size_of::<bf16>()) as u32;
    let dims = Dims { grid: [1, 1, 1], block: [kernel::LANES, 1, 1], shared };
    device.launch(&kernel::SELFTEST_MATRIX, dims, p)
}

/// Queues the selftest of scalar arithmetic.
pub fn selftest_math(device: &Device, p: SelftestMathArgs) -> Result<()> {
    let (name, n) = (kernel::SELFTEST_MATH.name(), p.n as usize);
    for (what, len, need) in [
        ("x", p.x.len(), n),
        ("y", p.y.len(), n),
        ("words", p.words.len(), n),
        ("out", p.out.len(), kernel::MATH_ROWS * n),
    ] {
        holds(name, what, len, need)?;
    }
    let dims = Dims { grid: [p.n.div_ceil(kernel::THREADS), 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    device.launch(&kernel::SELFTEST_MATH, dims, p)
}
