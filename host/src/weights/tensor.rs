//! Values of stored tensors: bytes of the mapped file. Nothing is aligned.

use safetensors::tensor::Dtype;

use super::Mismatch;
use super::container::Raw;
use super::error::rule;

/// The values of little-endian f32 bytes.
pub fn f32_values(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b))
}

/// The values of little-endian bf16 bytes.
pub fn bf16_values(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.as_chunks::<2>().0.iter().map(|&b| half::bf16::from_le_bytes(b).to_f32())
}

/// The values of little-endian i32 bytes.
pub(super) fn i32_values(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect()
}

/// The values of a tensor of i32 or i64.
pub(super) fn integers(raw: Raw) -> Vec<i64> {
    match raw.dtype {
        Dtype::I64 => raw.bytes.as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b)).collect(),
        _ => i32_values(raw.bytes).into_iter().map(i64::from).collect(),
    }
}

/// Every value of `raw`, a tensor of f32 or bf16, is finite.
pub(super) fn finite(name: &str, raw: Raw) -> Result<(), Mismatch> {
    let bad = match raw.dtype {
        Dtype::F32 => f32_values(raw.bytes).position(|v| !v.is_finite()),
        Dtype::BF16 => bf16_values(raw.bytes).position(|v| !v.is_finite()),
        _ => None,
    };
    bad.map_or(Ok(()), |at| {
        let width = raw.shape.last().copied().unwrap_or(1).max(1);
        Err(Mismatch::tensor(
            name,
            "finite values",
            format_args!("a non-finite one in row {}, column {}", at / width, at % width),
        ))
    })
}

/// `raw` has one of the `types` and the shape.
pub(super) fn typed(name: &str, raw: Raw, types: &[Dtype], shape: &[usize]) -> Result<(), Mismatch> {
    rule(types.contains(&raw.dtype) && raw.shape == shape, || {
        let types: Vec<String> = types.iter().map(|t| format!("{t:?}")).collect();
        let expected = format!("{} {shape:?}", types.join(" or "));
        Mismatch::tensor(name, expected, format_args!("{:?} {:?}", raw.dtype, raw.shape))
    })
}
