//! 4-bit weights: the layout, every code, scales at the edges of their type, and addresses at full size.

use std::borrow::Cow;

use cuda_std::bf16;
use gpu::kernels::gemm_w4a16::Scale;
use gpu::kernels::repack_w4a16::fragment_words;
use gpu::kernels::stream::chunk_index;
use kdtree::device::Device;
use kdtree::linear::{HostData, HostWeight, Product, ScaleType, Weight, linear};
use kdtree::reference::linear as twin;
use libtest_mimic::Failed;
use safetensors::{Dtype, SafeTensors};

use super::linear::{Kind, Stored, Want, X, near};
use super::support::{Outcome, Random, Suite, check, equal, root};

/// Codes of a group.
const GROUP: usize = 32;

pub fn cases(suite: &mut Suite) {
    suite.both("linear::w4a16::identity", identity);
    for kind in [Kind::W4, Kind::W4Wide, Kind::W4Middle, Kind::W4Coarse] {
        let name = kind.name();
        suite.both(format!("linear::{name}::group_borders"), move |d| group_borders(d, kind));
        // Of 64 the two halves overflow to infinities of both signs.
        if kind != Kind::W4Middle {
            suite.both(format!("linear::{name}::edge_scales"), move |d| edge_scales(d, kind));
        }
        suite.both(format!("linear::{name}::constant"), move |d| constant(d, kind));
    }
    suite.both("linear::weights_are_checked", weights_are_checked);
    suite.both("linear::w4a16::python_cases", python_cases);
    suite.host("linear::w4a16::fragment_words", false, words);
    suite.host("linear::w4a16::addresses_at_full_size", false, addresses);
}

/// Each of the 16 codes at each place of a word: unit rows of x pick single weights, which must come out exactly.
fn identity(device: &Device) -> Outcome {
    let (n, k) = (18, 96);
    let codes: Vec<u8> = (0..n * k / 2).map(|i| (i * 7 + i / 16 * 3) as u8).collect();
    let scales: Vec<f32> = (0..n * k / GROUP).map(|i| 1.0 + i as f32 / 64.0).collect();
    let stored = Stored::with_scales(Kind::W4Wide, [1, n, k], &codes, &scales);
    let weight = Weight::new(device, &stored.host("w"))?;
    let unit: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    let x = X::upload(device, unit)?;
    let y = device.alloc(k * n)?;
    linear(device, &Product::plain(&weight, x.acts(), k, y.view_mut()))?;
    let want: Vec<f32> = (0..k * n).map(|i| stored.values[i % n * k + i / n] as f32).collect();
    equal("weights", &y.read()?, &want)?;
    for code in 0..16 {
        check(
            stored.values.iter().enumerate().any(|(i, v)| (v / f64::from(scales[i / GROUP])) as i32 + 8 == code),
            || format!("code {code} does not occur"),
        )?;
    }
    Ok(())
}

/// Neighbouring groups differ by powers of two: a scale taken from the wrong group or row is off by a factor.
fn group_borders(device: &Device, kind: Kind) -> Outcome {
    let (n, k) = (35, 1280);
    let mut random = Random::new(31);
    let codes: Vec<u8> = (0..n * k / 2).map(|_| random.next() as u8).collect();
    let scales: Vec<f32> = (0..n * k / kind.group()).map(|i| 2f32.powi((i * 5 % 17) as i32 - 8)).collect();
    against_twin(device, Stored::with_scales(kind, [1, n, k], &codes, &scales), 9, &mut random)
}

/// Scales of zero, minus zero, the smallest and largest of their type, above the range of f16, infinite and NaN. A
/// scale meets the sum of its group, so an infinite one gives an infinity or NaN where the twin has NaN: no number.
fn edge_scales(device: &Device, kind: Kind) -> Outcome {
    let edges =
        [0.0, -0.0, 2f32.powi(-133), -2f32.powi(-130), f32::MIN_POSITIVE, 65504.0, 70000.0, -1e30, f32::EPSILON];
    let (n, k) = (edges.len() + 5, 256);
    let mut random = Random::new(32);
    let codes: Vec<u8> = (0..n * k / 2).map(|_| random.next() as u8).collect();
    let groups = k / kind.group();
    // Row e has edge e in every group, the last rows have one odd group among ordinary ones.
    let scale = |i: usize| match (i / groups, i % groups) {
        (row, _) if row < edges.len() => edges[row],
        (row, 1) => [f32::NAN, bf16::MAX.to_f32(), 0.0, f32::from_bits(1 << 16), f32::INFINITY][row - edges.len()],
        _ => 0.5,
    };
    let scales: Vec<f32> = (0..n * groups).map(scale).collect();
    against_twin(device, Stored::with_scales(kind, [1, n, k], &codes, &scales), 3, &mut random)
}

fn against_twin(device: &Device, stored: Stored, rows: usize, random: &mut Random) -> Outcome {
    let [_, n, k] = stored.shape;
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::random(device, rows * k, random)?;
    let y = device.alloc(rows * n)?;
    linear(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()))?;
    let mut want = Want::dense(&x.seen_by(stored.kind), [k, 0], &stored, rows);
    // Results may be subnormal, whose spacing no share of them reaches.
    want.size.iter_mut().for_each(|size| *size += f64::from(f32::MIN_POSITIVE));
    let mut got = y.read()?;
    let infinite = |i: &usize| stored.values[i % n * k..][..k].iter().any(|v| v.is_infinite());
    for i in (0..rows * n).filter(infinite) {
        check(!got[i].is_finite(), || format!("an infinite scale gave {}", got[i]))?;
        (got[i], want.y[i]) = (f32::NAN, f64::NAN);
    }
    near("with edge scales", &got, &want)
}

/// Weights of 1 over inputs of 1 give k, exactly: no term is lost or counted twice.
fn constant(device: &Device, kind: Kind) -> Outcome {
    let (n, k, rows) = (23, 1408, 12);
    let stored = Stored::with_scales(kind, [1, n, k], &vec![0x99; n * k / 2], &vec![1.0; n * k / kind.group()]);
    let weight = Weight::new(device, &stored.host("w"))?;
    let x = X::upload(device, vec![1.0; rows * k])?;
    let y = device.alloc(rows * n)?;
    linear(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()))?;
    equal("sums", &y.read()?, &vec![k as f32; rows * n])
}

fn weights_are_checked(device: &Device) -> Outcome {
    let says = |n, k, batch, data, what: &str| {
        let error = Weight::new(device, &HostWeight { name: "w", n, k, batch, data }).err();
        let error = error.map(|e| e.to_string()).unwrap_or_default();
        check(error == format!("weight: `w`: {what}"), || format!("expected `{what}`, found `{error}`"))
    };
    let bytes = |count: usize| Cow::Owned(vec![0u8; count]);
    let w4 = |packed, scales, group| HostData::W4a16 {
        packed: bytes(packed),
        scales: bytes(scales),
        scale_type: ScaleType::Bf16,
        group,
    };
    says(0, 8, 1, HostData::F32(bytes(0)), "1 matrices of 0 x 8")?;
    says(2, 8, 3, HostData::F32(bytes(191)), "values of 3 x 2 x 8 in f32: expected 192 bytes, found 191")?;
    says(2, 24, 1, HostData::Bf16(bytes(96)), "k = 24: the bf16 kernels want a multiple of 16")?;
    says(2, 32, 1, HostData::Bf16(bytes(64)), "values of 1 x 2 x 32 in bf16: expected 128 bytes, found 64")?;
    says(2, 64, 1, w4(64, 16, 16), "groups of 16: the w4a16 kernels have groups of [32, 64, 128]")?;
    says(2, 96, 1, w4(96, 8, 64), "k = 96 is not a multiple of its group, 64")?;
    says(2, 96, 1, w4(95, 12, 32), "codes of 1 x 2 x 96 in w4a16: expected 96 bytes, found 95")?;
    says(2, 96, 1, w4(96, 6, 32), "scales of 1 x 2 x 96 in w4a16: expected 12 bytes, found 6")?;
    Weight::new(device, &HostWeight { name: "w", n: 2, k: 96, batch: 1, data: w4(96, 12, 32) })?;
    Ok(())
}

/// A word's nibble i is the low half of operand register a_i, nibble i + 4 the high half.
fn words() -> Outcome {
    let mut random = Random::new(33);
    for _ in 0..1000 {
        let (low, high) = (random.next() as u32, random.next() as u32);
        let code = |row: u32, i: usize| row >> (4 * i) & 15;
        for (step, word) in fragment_words(low, high).into_iter().enumerate() {
            let pairs = cuda_std::math::dequant_pairs(word);
            for (register, pair) in pairs.into_iter().enumerate() {
                let (row, first) = (if register % 2 == 0 { low } else { high }, step * 4 + register / 2 * 2);
                for half in 0..2 {
                    let got = bf16::from_bits((pair >> (16 * half)) as u16).to_f32();
                    let want = code(row, first + half) as f32 - 8.0;
                    check(got == want, || {
                        format!("{low:x} {high:x}: register {register}, half {half}: {got}, {want}")
                    })?;
                }
            }
        }
    }
    // -8..-1 in ascending k.
    equal("word", &fragment_words(0x7654_3210, 0x8888_8888), &[0x8381_8280, 0x8785_8684])
}

/// The last word of the last of 384 experts of Kimi K2.6's gate and up together, and of a matrix beyond 2^32 bytes.
fn addresses() -> Outcome {
    let (n, k, experts) = (2 * 2048, 7168, 384);
    let last = chunk_index(experts as u32 - 1, n as u32, k as u32, n as u32 / 16 - 1, k as u32 / 64 - 1) as usize;
    let words = bf16::TILE_WORDS;
    equal("bytes", &[(last + 1) * words * 4], &[experts * (n * k / 2 + n * k / GROUP * 2)])?;
    check(last * words * 4 > 1 << 32, || "the case is too small".into())?;
    equal("the last scale", &[bf16::scale_word(7) + 2, f32::scale_word(7) + 4], &[words, f32::TILE_WORDS])?;
    // Odd groups and ragged rows are padded to whole tiles.
    equal("padded", &[chunk_index(1, 17, 96, 0, 0), chunk_index(1, 17, 96, 1, 1)], &[4, 7])
}

/// Products that the Python reference made, codes and scales as a checkpoint holds them.
fn python_cases(device: &Device) -> Outcome {
    let path = root().join("bundles/kernel-cases.safetensors");
    let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let file = SafeTensors::deserialize(&bytes)?;
    let floats = |name: &str| -> Result<Vec<f32>, Failed> {
        let values = twin::f32_values(file.tensor(name)?.data());
        Ok(values.into_iter().map(|v| v as f32).collect())
    };
    let mut cases = 0;
    while let Ok(codes) = file.tensor(&format!("w4a16.{cases}.qw")) {
        let scales = file.tensor(&format!("w4a16.{cases}.sc"))?;
        let kind = if scales.dtype() == Dtype::F32 { Kind::W4Wide } else { Kind::W4 };
        let (n, k) = (codes.shape()[0], codes.shape()[1] * 2);
        let stored = Stored::new(kind, [1, n, k], codes.data(), scales.data());
        let weight = Weight::new(device, &stored.host("w"))?;
        let floats_x = floats(&format!("w4a16.{cases}.x"))?;
        let rows = floats_x.len() / k;
        let x = X::upload(device, floats_x)?;
        let y = device.alloc(rows * n)?;
        linear(device, &Product::plain(&weight, x.acts(), rows, y.view_mut()))?;
        let want = Want::dense(&x.seen_by(kind), [k, 0], &stored, rows);
        let y = y.read()?;
        near(&format!("case {cases}"), &y, &want)?;
        let python = floats(&format!("w4a16.{cases}.y"))?;
        near(&format!("case {cases} in Python"), &python, &want)?;
        cases += 1;
    }
    check(cases > 0, || format!("{} has no case w4a16.0", path.display()))
}
