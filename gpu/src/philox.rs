//! Random numbers that are a function of a counter: Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3" (SC 2011), the same words on every device and in every order of use.

/// Multipliers of the two halves of a counter.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What the key grows by in each round: the golden ratio and sqrt(3) - 1.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The four words of `counter` under `key`.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k, mut l]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let (x, y) = (MULTIPLIERS[0] as u64 * a as u64, MULTIPLIERS[1] as u64 * c as u64);
        (a, c) = ((y >> u32::BITS) as u32 ^ b ^ k, (x >> u32::BITS) as u32 ^ d ^ l);
        (b, d) = (y as u32, x as u32);
        (k, l) = (k.wrapping_add(WEYL[0]), l.wrapping_add(WEYL[1]));
        round += 1;
    }
    [a, b, c, d]
}
