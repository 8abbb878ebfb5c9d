//! What follows an accepted path, and the plain row copies.

use cuda_std::bf16;
use gpu::args::attention::F8_ROW;
use gpu::args::state;
use kdtree::device::Device;
use kdtree::kernels::{Commit, GatherRows, RoundBf16, Tap, advance, commit, gather_rows, round_bf16, tap};
use kdtree::reference;

use super::support::{Outcome, Random, Suite, check, equal};
use super::tree::state_words;

pub fn cases(suite: &mut Suite) {
    suite.both("commit::every_subset_of_6_nodes", every_subset);
    suite.both("commit::path_0_2_3", |d| commits(d, 576, 10, &[0, 2, 3]));
    suite.both("commit::wide_rows", |d| commits(d, 4096, 3, &[0, 1, 3, 4]));
    suite.both("commit::longest_path", |d| {
        let path: Vec<usize> = (0..state::MAX_PATH).map(|i| 2 * i).collect();
        commits(d, 64, 7, &path)
    });
    suite.cuda("commit::past_2_to_32_bytes", far);
    suite.both("commit::nothing_after_an_error", |d| commits(d, 16, 5, &[]));
    suite.both("commit::bytes", |d| bytes(d, 576));
    suite.both("commit::f8_rows", |d| bytes(d, F8_ROW));
    suite.both("gather_rows::accepted_path", gathers);
    suite.both("advance::grows_by_the_path", advances);
    suite.both("tap::columns_of_a_row", taps);
    for n in [0, 1, 255, 256, 257, 5000] {
        suite.both(format!("round_bf16::{n}"), move |d| rounds(d, n));
    }
    suite.both("commit::refuses", refuses);
}

const LAYERS: usize = 3;

/// Rows that the path does not name are poisoned before; after the move nothing of them is left in the path's slots.
fn commits(device: &Device, width: usize, committed: usize, path: &[usize]) -> Outcome {
    let rows = path.last().map_or(4, |last| last + 2);
    let slots = committed + rows + 1;
    let mut cache = Random::new(31).bf16s(LAYERS * slots * width);
    for (i, row) in cache.chunks_mut(width).enumerate() {
        let slot = i % slots;
        if slot >= committed && !path.contains(&(slot - committed)) {
            row.fill(bf16::NAN);
        }
    }
    let (dc, state) = (device.upload(&cache)?, device.upload(&state_words(committed, path))?);
    let p = Commit { cache: dc.view_mut(), state: state.view(), layers: LAYERS, slots, width };
    commit(device, p)?;
    reference::commit(&mut cache, slots, width, committed, path);
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let got = dc.read()?;
    equal(&format!("cache after {path:?}"), &bits(&got), &bits(&cache))?;
    for layer in got.chunks(slots * width) {
        let kept = &layer[..(committed + path.len()) * width];
        check(kept.iter().all(|v| !v.is_nan()), || format!("a rejected row is left after {path:?}"))?;
    }
    equal("state", &state.read()?, &state_words(committed, path))
}

fn every_subset(device: &Device) -> Outcome {
    for subset in 0..64u32 {
        let path: Vec<usize> = std::iter::once(0).chain((1..=6).filter(|i| subset >> (i - 1) & 1 != 0)).collect();
        commits(device, 16, 5, &path)?;
    }
    Ok(())
}

/// A cache of one byte a value moves like any other.
fn bytes(device: &Device, width: usize) -> Outcome {
    let (slots, path) = (30, [0usize, 1, 5, 6, 9, 12, 13, 14, 15, 20]);
    let cache: Vec<u8> = (0..LAYERS * slots * width).map(|i| (i / width * 7 + i % width) as u8).collect();
    let (dc, state) = (device.upload(&cache)?, device.upload(&state_words(4, &path))?);
    commit(device, Commit { cache: dc.view_mut(), state: state.view(), layers: LAYERS, slots, width })?;
    let got = dc.read()?;
    for (row, values) in got.chunks(width).enumerate() {
        let (layer, slot) = (row / slots, row % slots);
        let from = slot.checked_sub(4).and_then(|r| path.get(r)).map_or(slot, |&row| 4 + row);
        equal(&format!("layer {layer}, slot {slot}"), values, &cache[(layer * slots + from) * width..][..width])?;
    }
    Ok(())
}

fn gathers(device: &Device) -> Outcome {
    let width = 1028;
    let src = Random::new(32).floats(7 * width);
    let ds = device.upload(&src)?;
    for (path, want) in [(vec![0, 2, 3, 6], [0, 2, 3, 6, 0]), (vec![0], [0; 5]), (vec![], [0; 5])] {
        let (dst, state) = (device.alloc(5 * width)?, device.upload(&state_words(9, &path))?);
        let p = GatherRows { src: ds.view(), dst: dst.view_mut(), state: state.view(), count: 5, width };
        gather_rows(device, p)?;
        let want: Vec<f32> = want.iter().flat_map(|&r| src[r * width..(r + 1) * width].to_vec()).collect();
        equal(&format!("path {path:?}"), &dst.read()?, &want)?;
    }
    Ok(())
}

fn advances(device: &Device) -> Outcome {
    for (path, committed, bonus) in [(vec![0, 2, 3], 13, 22), (vec![0], 11, 22), (vec![], 10, 11)] {
        let state = device.upload(&state_words(10, &path))?;
        advance(device, state.view_mut())?;
        let mut want = state_words(10, &path);
        (want[state::COMMITTED], want[state::BONUS]) = (committed, bonus);
        equal(&format!("path {path:?}"), &state.read()?, &want)?;
    }
    Ok(())
}

fn taps(device: &Device) -> Outcome {
    for (rows, width, stride, offset) in [(3, 5, 12, 4), (1, 300, 300, 0), (2, 257, 600, 343)] {
        let src = Random::new(33).floats(rows * width);
        let (ds, dst) = (device.upload(&src)?, device.upload(&vec![7.0; rows * stride])?);
        tap(device, Tap { src: ds.view(), dst: dst.view_mut(), rows, width, stride, offset })?;
        let mut want = vec![7.0; rows * stride];
        for row in 0..rows {
            let at = row * stride + offset;
            want[at..at + width].copy_from_slice(&src[row * width..(row + 1) * width]);
        }
        equal("rows", &dst.read()?, &want)?;
    }
    Ok(())
}

/// Halfway cases go to the even neighbour; NaN stays NaN.
fn rounds(device: &Device, n: usize) -> Outcome {
    let mut x = Random::new(34).floats(n);
    let edges = [0x3F80_8000u32, 0x3F81_8000, 0x3F80_8001, 0x7F7F_FFFF, 0xFF80_0000, 0x8000_0000, 0x7F80_0001, 1];
    for (x, bits) in x.iter_mut().zip(edges) {
        *x = f32::from_bits(bits);
    }
    let (dx, out) = (device.upload(&x)?, device.alloc::<bf16>(n + 1)?);
    out.fill(0x3F)?;
    round_bf16(device, RoundBf16 { x: dx.view(), out: out.view_mut(), n })?;
    let got = out.read()?;
    for (i, (got, &x)) in got.iter().zip(&x).enumerate() {
        let same = *got == bf16::from_f32(x) && got.is_sign_negative() == x.is_sign_negative();
        check(same || (got.is_nan() && x.is_nan()), || format!("value {i} is {got}, expected {x} rounded"))?;
    }
    equal("behind", &[got[n].to_bits()], &[0x3F3F])
}

fn refuses(device: &Device) -> Outcome {
    let (cache, state) = (device.zeros::<bf16>(2 * 4 * 16)?, device.upload(&state_words(0, &[0]))?);
    let p = |slots, width| Commit { cache: cache.view_mut(), state: state.view(), layers: 2, slots, width };
    commit(device, p(4, 16))?;
    for (p, why) in [(p(5, 16), "expected [2, 5, 16]"), (p(16, 4), "multiple of 16")] {
        let error = commit(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("commit: ") && error.contains(why), || format!("expected `{why}`, found `{error}`"))?;
    }
    Ok(())
}

/// The last of 61 layers of 64k slots: its rows lie behind 2^32 bytes.
fn far(device: &Device) -> Outcome {
    let (layers, slots, width, path) = (61, 65_536, 576, [0usize, 2, 3]);
    let cache = device.alloc::<bf16>(layers * slots * width)?;
    let last = ((layers - 1) * slots + 65_000) * width;
    let rows = Random::new(35).bf16s(4 * width);
    cache.write(last, &rows)?;
    let state = device.upload(&state_words(65_000, &path))?;
    commit(device, Commit { cache: cache.view_mut(), state: state.view(), layers, slots, width })?;
    let mut got = vec![bf16::ZERO; 4 * width];
    cache.read_into(last, &mut got)?;
    for (r, &from) in path.iter().enumerate() {
        equal(&format!("row {r}"), &got[r * width..][..width], &rows[from * width..][..width])?;
    }
    Ok(())
}
