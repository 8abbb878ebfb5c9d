//! Every operation of `cuda_std` on both devices, against values worked out here (arithmetic: `selftest_math.rs`).

use cuda_std::{Element, bf16};
use gpu::args::selftest::SelftestElementsArgs;
use gpu::kernels::selftest::{self as kernel, ATOMIC_BLOCKS, ELEMENTS, THREADS, WORDS};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::{WordsTest, selftest_elements, selftest_words};

use super::support::{Outcome, Random, Suite, check, equal};

const BLOCK: usize = THREADS as usize;

pub fn cases(suite: &mut Suite) {
    suite.both("selftest::warp", warp);
    suite.both("selftest::indices", indices);
    suite.both("selftest::elements", elements);
    suite.both("selftest::wide", wide);
    suite.both("selftest::async_copies", async_copies);
    suite.both("selftest::atomics", atomics);
    suite.both("selftest::barriers", barriers);
    suite.both("selftest::launchers_refuse_short_buffers", refuses);
}

/// The output of a selftest of words, and its rows.
fn words(device: &Device, test: WordsTest, x: &[u32], start: &[u32]) -> Result<Vec<u32>, libtest_mimic::Failed> {
    let (_, written) = test.words();
    let (dx, y) = (device.upload(x)?, device.alloc(written)?);
    match start.is_empty() {
        true => y.fill(0xEE)?,
        false => y.write(0, start)?,
    }
    selftest_words(device, test, dx.view(), y.view_mut())?;
    Ok(y.read()?)
}

const UNTOUCHED: u32 = 0xEEEE_EEEE;

fn warp(device: &Device) -> Outcome {
    let mut random = Random::new(11);
    let x: Vec<u32> = (0..BLOCK).map(|_| random.next() as u32).collect();
    let y = words(device, WordsTest::Warp, &x, &[])?;
    let at = |t: usize, lane: usize| x[t / 32 * 32 + lane];
    let whole = |t: usize| &x[t / 32 * 32..t / 32 * 32 + 32];
    let bits = |t: usize, p: fn(u32) -> bool| whole(t).iter().rev().fold(0, |b, &v| b << 1 | u32::from(p(v)));
    // A butterfly over 16, 8, 4, 2, 1, in f32.
    let sum = |t: usize| {
        let mut v: Vec<f32> = whole(t).iter().map(|&v| (v & 0xFF) as f32).collect();
        for step in [16, 8, 4, 2, 1] {
            v = (0..32).map(|l| v[l] + v[l ^ step]).collect();
        }
        v[0]
    };
    let most = |t: usize| {
        let kept = (0..32).filter(|l| l % 4 != 0).map(|l| -((at(t, l) & 0xFF) as f32));
        kept.fold(f32::NEG_INFINITY, f32::max)
    };
    type Want<'a> = Box<dyn Fn(usize, usize) -> u32 + 'a>;
    let rows: [(&str, Want); kernel::WARP_ROWS] = [
        ("lane_id", Box::new(|_, l| l as u32)),
        ("warp_id", Box::new(|t, _| t as u32 / 32)),
        ("shfl", Box::new(|t, _| at(t, (t * 3 + 70) % 32))),
        ("shfl_xor", Box::new(|t, l| at(t, l ^ 21))),
        ("shfl_down", Box::new(|t, l| at(t, if l + 5 < 32 { l + 5 } else { l }))),
        ("shfl_up", Box::new(|t, l| at(t, if l >= 5 { l - 5 } else { l }))),
        ("shfl_down by 33", Box::new(|t, l| at(t, if l + 1 < 32 { l + 1 } else { l }))),
        ("shfl_up by 33", Box::new(|t, l| at(t, l.saturating_sub(1)))),
        ("ballot", Box::new(|t, _| bits(t, |v| v & 1 == 1))),
        ("any", Box::new(|t, _| u32::from(t >= 32))),
        ("all", Box::new(|t, _| u32::from(t < 32))),
        ("reduce", Box::new(|t, _| whole(t).iter().fold(0, |p, q| p ^ q))),
        ("reduce_sum", Box::new(|t, _| sum(t).to_bits())),
        ("reduce_max", Box::new(|t, _| most(t).to_bits())),
        ("inclusive_sum", Box::new(|t, l| whole(t)[..=l].iter().fold(0, |p, &q| p.wrapping_add(q)))),
        ("shfl_xor of i32", Box::new(|t, l| at(t, l ^ 1))),
        ("shfl_xor of f32", Box::new(|t, l| (at(t, l ^ 1) as f32).to_bits())),
        ("sync_warp", Box::new(|t, l| at(t, (l + 1) % 32))),
        ("shfl_xor in a branch", Box::new(|t, l| if l < 7 { at(t, l ^ 3) } else { UNTOUCHED })),
        ("ballot in a branch", Box::new(|t, l| if l < 7 { bits(t, |v| v & 2 == 2) } else { UNTOUCHED })),
        ("max", Box::new(|t, _| whole(t).iter().fold(0, |p, &q| p.max(q)))),
        ("sum", Box::new(|t, _| whole(t).iter().fold(0, |p, &q| p.wrapping_add(q)))),
        ("min", Box::new(|t, _| whole(t).iter().fold(u32::MAX, |p, &q| p.min(q)))),
    ];
    for ((name, want), got) in rows.iter().zip(y.chunks(BLOCK)) {
        let want: Vec<u32> = (0..BLOCK).map(|t| want(t, t % 32)).collect();
        equal(name, got, &want)?;
    }
    Ok(())
}

fn indices(device: &Device) -> Outcome {
    let y = words(device, WordsTest::Indices, &[], &[])?;
    let ([gx, gy, gz], [dx, dy, dz]) = (kernel::INDICES_GRID, kernel::INDICES_BLOCK);
    for (i, got) in y.chunks(kernel::INDICES_WORDS).enumerate() {
        let (block, t) = ((i / BLOCK) as u32, (i % BLOCK) as u32);
        let (bx, by, bz) = (block % gx, block / gx % gy, block / (gx * gy));
        let (tx, ty, tz) = (t % dx, t / dx % dy, t / (dx * dy));
        let m = THREADS - 1 - t;
        let left = m + 1000 + (m + block) * 10_000 + 2 * 10_000_000;
        let want = [tx, ty, tz, bx, by, bz, dx, dy, dz, gx, gy, gz, t % 32, t / 32, left];
        equal(&format!("thread {t} of block {block}"), got, &want)?;
    }
    Ok(())
}

fn elements(device: &Device) -> Outcome {
    let mut random = Random::new(12);
    let bytes: Vec<u8> = (0..ELEMENTS * 8).map(|_| random.next() as u8).collect();
    fn buffers<T: Element + bytemuck::Pod>(
        device: &Device,
        bytes: &[u8],
    ) -> Result<[Buffer<T>; 2], libtest_mimic::Failed> {
        let x: Vec<T> = bytes.chunks(size_of::<T>()).take(ELEMENTS).map(bytemuck::pod_read_unaligned).collect();
        let y = device.alloc(ELEMENTS)?;
        y.fill(0xEE)?;
        Ok([device.upload(&x)?, y])
    }
    fn reversed<T: Element + bytemuck::Pod>(name: &str, [x, y]: &[Buffer<T>; 2]) -> Outcome {
        let mut x = x.read()?;
        x.reverse();
        let bits = |v: &[T]| bytemuck::cast_slice::<T, u8>(v).to_vec();
        equal(name, &bits(&y.read()?), &bits(&x))
    }
    let (a, b, c) = (buffers::<u8>(device, &bytes)?, buffers::<u16>(device, &bytes)?, buffers::<u32>(device, &bytes)?);
    let (d, e, f) = (buffers::<i32>(device, &bytes)?, buffers::<u64>(device, &bytes)?, buffers::<f32>(device, &bytes)?);
    let g = buffers::<bf16>(device, &bytes)?;
    let p = SelftestElementsArgs {
        x_u8: a[0].view(),
        x_u16: b[0].view(),
        x_u32: c[0].view(),
        x_i32: d[0].view(),
        x_u64: e[0].view(),
        x_f32: f[0].view(),
        x_bf16: g[0].view(),
        y_u8: a[1].view_mut(),
        y_u16: b[1].view_mut(),
        y_u32: c[1].view_mut(),
        y_i32: d[1].view_mut(),
        y_u64: e[1].view_mut(),
        y_f32: f[1].view_mut(),
        y_bf16: g[1].view_mut(),
    };
    selftest_elements(device, p)?;
    reversed("u8", &a)?;
    reversed("u16", &b)?;
    reversed("u32", &c)?;
    reversed("i32", &d)?;
    reversed("u64", &e)?;
    reversed("f32", &f)?;
    reversed("bf16", &g)
}

fn wide(device: &Device) -> Outcome {
    let mut random = Random::new(13);
    let x: Vec<u32> = (0..WORDS).map(|_| random.next() as u32).collect();
    let y = words(device, WordsTest::Wide, &x, &[])?;
    let four = |t: usize| [x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3]];
    type Want<'a> = &'a dyn Fn(usize) -> [u32; 4];
    let groups: [(&str, Want); 6] = [
        ("ld16", &four),
        ("ld16_stream", &four),
        ("ld8", &|t| [four(t)[2], four(t)[3], four(t)[0], four(t)[1]]),
        ("ld4 and slices", &|t| [four(t)[3], four(t)[0], four(t)[0], four(t)[1]]),
        ("shared ld16", &|t| four(BLOCK - 1 - t)),
        ("shared ld8, ld4", &|t| {
            let m = BLOCK - 1 - t;
            let [p, q, r, s] = four(m);
            [p, q, r, (0x1234_0000 | m as u32).wrapping_add(r).wrapping_add(s)]
        }),
    ];
    for ((name, want), got) in groups.iter().zip(y.chunks(4 * BLOCK)) {
        equal(name, got, &(0..BLOCK).flat_map(want).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn async_copies(device: &Device) -> Outcome {
    let mut random = Random::new(14);
    let x: Vec<u32> = (0..WORDS).map(|_| random.next() as u32).collect();
    let y = words(device, WordsTest::Async, &x, &[])?;
    let want = |i: usize| {
        let (row, t) = (i / BLOCK, i % BLOCK);
        let m = BLOCK - 1 - t;
        match row {
            0..3 => x[((t + BLOCK) % WORDS + 4 * row) % WORDS],
            _ => {
                if m.is_multiple_of(3) {
                    0
                } else {
                    x[4 * m + 3]
                }
            }
        }
    };
    equal("copies", &y, &(0..y.len()).map(want).collect::<Vec<_>>())
}

fn atomics(device: &Device) -> Outcome {
    let mut start = vec![0; kernel::ATOMIC_WORDS];
    start[2] = u32::MAX;
    let y = words(device, WordsTest::Atomics, &[], &start)?;
    let threads = ATOMIC_BLOCKS as usize * BLOCK;
    let n = threads as u32;
    equal("add, max, min, or", &y[..4], &[n, n - 1, 5, u32::MAX])?;
    // What was exchanged in came out again, but for the last.
    check(y[4] + y[5] == n * (n + 1) / 2, || format!("exch: {} left, {} came out", y[4], y[5]))?;
    check((1..=n).contains(&y[6]) && y[7] == 1, || format!("cas: {} stored, {} winners", y[6], y[7]))?;
    check(y[8] == ATOMIC_BLOCKS, || format!("{} blocks counted", y[8]))?;
    let (seen, rest) = y[16..].split_at(threads);
    equal("numbers that add gave", seen, &vec![1; threads])?;
    let (left, sums) = rest.split_at(threads);
    let one = THREADS + 1000 * 3 * (THREADS - 1) + 0xFFF;
    equal("shared atomics", left, &vec![one; threads])?;
    equal("what the last block saw", sums, &[one * THREADS; ATOMIC_BLOCKS as usize])
}

fn barriers(device: &Device) -> Outcome {
    let mut random = Random::new(15);
    let x: Vec<u32> = (0..BLOCK).map(|_| random.next() as u32).collect();
    // What is seen too early is another round's word.
    for _ in 0..if device.is_cuda() { 200 } else { 3 } {
        let y = words(device, WordsTest::Barriers, &x, &[])?;
        let (own, all) = (kernel::BARRIER_ROWS - 2, kernel::BARRIER_ROWS - 1);
        let want = |i: usize| match (i / BLOCK, i % BLOCK) {
            (row, t) if row == own => x[t ^ 1],
            (row, t) if row == all => x[BLOCK - 1 - t],
            (_, 0..32) => UNTOUCHED,
            (round, t) => x[BLOCK - 1 - t].wrapping_mul(round as u32 + 1),
        };
        equal("words", &y, &(0..y.len()).map(want).collect::<Vec<_>>())?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    use WordsTest::{Async, Atomics, Barriers, Indices, Warp, Wide};
    for test in [Warp, Indices, Wide, Async, Atomics, Barriers] {
        let (read, written) = test.words();
        let (x, y): (Buffer<u32>, Buffer<u32>) = (device.zeros(read)?, device.zeros(written)?);
        let short = y.view_mut().part(0, written - 1);
        let text = selftest_words(device, test, x.view(), short).err().map(|e| e.to_string()).unwrap_or_default();
        check(text.contains("y holds"), || format!("{test:?}: expected a refusal, found `{text}`"))?;
    }
    Ok(())
}
