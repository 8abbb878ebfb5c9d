//! How far a kernel may be from its twin, and why. Tests and `doctor` share these; what is not here must be equal.

/// Relative error of a result that is rounded to f32 and sums a row in a fixed tree: some 2^-24, signs mixed.
pub const F32: f64 = 1e-6;

/// Relative error of one rounding to bf16: at most 2^-9 = 2e-3 of a value, as much again for the kernel's own f32.
pub const ROUNDED: f64 = 4e-3;

/// Relative error of values kept in e4m3 under a scale for each group: at most 2^-4 of a value, evenly spread; for
/// random values 0.027.
pub const F8: f64 = 0.04;

/// Relative error of attention over a launch of at least [`ATTENTION_QUERIES`] queries: its largest is the rounding of
/// the softmax weights to bf16, up to 2^-8 of each. As they are divided by the sum of the rounded ones it moves weight
/// between keys, and costs nothing where one key counts alone, keys are equal, or values are.
pub const ATTENTION: f64 = 2.2e-3;
pub const ATTENTION_QUERIES: usize = 8;

/// The same of one query, where the roundings of a few large weights decide.
pub const ATTENTION_QUERY: f64 = 1.0 / 256.0;

/// Relative error of attention against a twin with the same rounded weights: f32 sums, and now and then a weight of a
/// score so near the middle of two bf16 values that the kernel's own f32 takes the other one.
pub const ATTENTION_ROUNDED: f64 = 3e-4;

/// Largest error of a product's value, as a share of the sum of its terms' magnitudes. A lane adds at most 350 rounded
/// terms before the fixed tree of sums (each rounding 2^-24 of the running sum, signs mixed); tensor cores may truncate
/// where the CPU rounds, but sum 32 terms from zero at a time.
pub const PRODUCT: f64 = 1e-6;

/// Largest distance of a log-probability: some roundings of values up to 30.
pub const LOG_PROBABILITY: f64 = 4e-6;

/// Largest distance of a draw's largest value, noise and all: roundings of values up to 30, two approximate logarithms.
pub const NOISE: f64 = 1e-5;
