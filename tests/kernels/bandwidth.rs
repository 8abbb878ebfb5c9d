//! The kernels that measure memory: every word is copied, every word is read once.

use kdtree::device::Device;
use kdtree::kernels::{copy_words, read_threads, read_words};

use super::support::{Outcome, Suite, check, equal};

/// Lengths around one load a thread, and around the loads that a thread has ahead.
fn lengths(device: &Device) -> [usize; 6] {
    let all = 4 * read_threads(device);
    [0, 4, 1000, all, 4 * all, 4 * all + 20]
}

pub fn cases(suite: &mut Suite) {
    suite.both("bandwidth::copies", copies);
    suite.both("bandwidth::reads", reads);
    suite.both("bandwidth::refuses", refuses);
}

fn words(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i.wrapping_mul(0x9E37_79B9) ^ 0x55).collect()
}

fn copies(device: &Device) -> Outcome {
    for n in lengths(device) {
        let (from, to) = (device.upload(&words(n))?, device.zeros::<u32>(n)?);
        copy_words(device, from.view(), to.view_mut())?;
        equal("words", &to.read()?, &words(n))?;
    }
    Ok(())
}

fn reads(device: &Device) -> Outcome {
    let all = |words: &[u32]| words.iter().fold(0u32, |sum, &word| sum.wrapping_add(word));
    for n in lengths(device) {
        let (from, sums) = (device.upload(&words(n))?, device.alloc::<u32>(read_threads(device))?);
        read_words(device, from.view(), sums.view_mut())?;
        equal("sum", &[all(&sums.read()?)], &[all(&words(n))])?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (from, to) = (device.zeros::<u32>(6)?, device.zeros::<u32>(4)?);
    let odd = copy_words(device, from.view(), to.view_mut()).err().map(|e| e.to_string()).unwrap_or_default();
    check(odd.starts_with("copy_words: 6 words"), || format!("expected a refusal, found `{odd}`"))?;
    let few = read_words(device, to.view(), from.view_mut()).err().map(|e| e.to_string()).unwrap_or_default();
    check(few.starts_with("read_words: the sums holds 6"), || format!("expected a refusal, found `{few}`"))
}
