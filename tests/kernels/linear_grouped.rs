//! Products gathered by expert: every way tokens can fall on experts, formats mixed by expert.

use kdtree::device::Device;
use kdtree::kernels::Acts;
use kdtree::linear::{ExpertWeights, Grouped, Product, Weight, explain_grouped, grouped_linear, linear};
use kdtree::reference::linear as twin;

use super::linear::{Kind, Stored, Want, X, near, part};
use super::support::{Outcome, Random, Suite, check, equal};

/// Pairs of a tile.
const TILE: usize = 8;

pub fn cases(suite: &mut Suite) {
    for kind in Kind::ALL {
        let name = kind.name();
        suite.both(format!("grouped::{name}::gate"), move |d| random_tokens(d, &[kind; 6], 33, 128, 3, true));
        suite.both(format!("grouped::{name}::down"), move |d| random_tokens(d, &[kind; 6], 16, 640, 2, false));
        suite.both(format!("grouped::{name}::as_dense"), move |d| same_bits_as_dense(d, kind));
    }
    // The shape of an expert's gate projection in Kimi K2.6.
    for kind in Kind::MAIN {
        let case = move |d: &Device| random_tokens(d, &[kind; 8], 2048, 7168, 2, true);
        suite.cuda(format!("grouped::{}::2048x7168", kind.name()), case);
    }
    let mixed: Vec<_> = (0..10).map(|e| Kind::ALL[e % Kind::ALL.len()]).collect();
    for (n, k) in [(1, 128), (40, 1152)] {
        let kinds = mixed.clone();
        suite.both(format!("grouped::mixed::{n}x{k}"), move |d| random_tokens(d, &kinds, n, k, 4, true));
    }
    suite.both("grouped::every_count", every_count);
    suite.both("grouped::shares", shares);
    suite.both("grouped::last_expert", last_expert);
    suite.both("grouped::refuses", refuses);
}

/// Pairs sorted by expert (stable), and the tiles: what `expert_sort` makes.
fn sorted(experts: &[usize], count: usize) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..experts.len() as u32).collect();
    order.sort_by_key(|&pair| experts[pair as usize]);
    let mut tiles = vec![0];
    let mut first = 0;
    for expert in 0..count {
        let mut left = experts.iter().filter(|&&e| e == expert).count();
        while left > 0 {
            let here = left.min(TILE);
            tiles.extend([expert as u32, first as u32, here as u32]);
            (first, left, tiles[0]) = (first + here, left - here, tiles[0] + 1);
        }
    }
    // What lies behind the last tile must not be read.
    tiles.resize(1 + 3 * experts.len(), u32::MAX);
    (order, tiles)
}

/// A layer's experts of one matrix, on the host and on the device.
struct Experts {
    stored: Vec<Stored>,
    weights: ExpertWeights,
}

impl Experts {
    fn random(
        device: &Device,
        kinds: &[Kind],
        n: usize,
        k: usize,
        random: &mut Random,
    ) -> kdtree::device::Result<Self> {
        let stored: Vec<_> = kinds.iter().map(|&kind| Stored::random(kind, [1, n, k], random)).collect();
        Self::new(device, stored)
    }

    fn new(device: &Device, stored: Vec<Stored>) -> kdtree::device::Result<Self> {
        let hosts: Vec<_> = stored.iter().map(|s| s.host("expert")).collect();
        let weights = ExpertWeights::new(device, "experts", &hosts)?;
        Ok(Self { stored, weights })
    }

    /// The product of `experts` (one a pair).
    fn multiply(
        &self,
        device: &Device,
        x: &X,
        share: usize,
        experts: &[usize],
    ) -> Result<Vec<f32>, libtest_mimic::Failed> {
        let (order, tiles) = sorted(experts, self.stored.len());
        let (order, tiles) = (device.upload(&order)?, device.upload(&tiles)?);
        let y = device.alloc(experts.len() * self.weights.n())?;
        y.fill(0xFF)?;
        let p = Grouped {
            weights: &self.weights,
            x: x.acts(),
            x_rows_per_token: share,
            order: order.view(),
            tiles: tiles.view(),
            pairs: experts.len(),
            y: y.view_mut(),
        };
        grouped_linear(device, &p)?;
        Ok(y.read()?)
    }

    /// Random rows through `experts`, against the twin.
    fn case(&self, device: &Device, share: usize, experts: &[usize], random: &mut Random) -> Outcome {
        let k = self.weights.k();
        let x = X::random(device, experts.len() / share * k, random)?;
        let got = self.multiply(device, &x, share, experts)?;
        let n = self.weights.n();
        for kind in Kind::ALL {
            // The twin sees what this kind of weights reads; pairs of other kinds are compared in their own turn.
            let values: Vec<_> = self.stored.iter().map(|s| s.values.clone()).collect();
            let of_kind: Vec<_> = (0..experts.len()).filter(|&p| self.stored[experts[p]].kind == kind).collect();
            if of_kind.is_empty() {
                continue;
            }
            let want = Want::of(&x.seen_by(kind), &values, |x, w| {
                let y = twin::grouped(x, share, experts, w, k);
                of_kind.iter().flat_map(|&p| y[p * n..][..n].to_vec()).collect()
            });
            let got: Vec<_> = of_kind.iter().flat_map(|&p| got[p * n..][..n].to_vec()).collect();
            near(&format!("{} pairs of {}", of_kind.len(), kind.name()), &got, &want)?;
        }
        Ok(())
    }
}

fn random_tokens(device: &Device, kinds: &[Kind], n: usize, k: usize, top_k: usize, shared_rows: bool) -> Outcome {
    let mut random = Random::new((n + k + kinds.len()) as u64);
    let all = Experts::random(device, kinds, n, k, &mut random)?;
    check(all.weights.len() == kinds.len() && !all.weights.is_empty(), || "expert count".into())?;
    for (expert, kind) in all.weights.formats().iter().zip(kinds) {
        check(*expert == kind.format(), || format!("an expert is {expert}, expected {}", kind.format()))?;
    }
    for tokens in [1, 3, 40] {
        let experts: Vec<_> = (0..tokens * top_k).map(|_| random.below(kinds.len())).collect();
        all.case(device, if shared_rows { top_k } else { 1 }, &experts, &mut random)?;
    }
    Ok(())
}

/// Pairs gathered by expert have the bits of the dense product of that expert alone.
fn same_bits_as_dense(device: &Device, kind: Kind) -> Outcome {
    let (n, k, pairs) = (20, 1152, 21);
    let mut random = Random::new(21);
    let all = Experts::random(device, &[kind; 3], n, k, &mut random)?;
    let x = X::random(device, pairs * k, &mut random)?;
    let experts: Vec<_> = (0..pairs).map(|_| random.below(3)).collect();
    let got = all.multiply(device, &x, 1, &experts)?;
    for (pair, &expert) in experts.iter().enumerate() {
        let weight = Weight::new(device, &all.stored[expert].host("one"))?;
        let y = device.zeros(n)?;
        let row = Acts { f32: part(x.acts().f32, pair * k, k), bf16: part(x.acts().bf16, pair * k, k) };
        linear(device, &Product::plain(&weight, row, 1, y.view_mut()))?;
        equal(&format!("pair {pair}"), &got[pair * n..][..n], &y.read()?)?;
    }
    Ok(())
}

/// All tokens on one expert, 1 to 17 of them; none at all on the others.
fn every_count(device: &Device) -> Outcome {
    let mut random = Random::new(22);
    let all = Experts::random(device, &[Kind::W4, Kind::Bf16, Kind::F32], 17, 64, &mut random)?;
    for expert in 0..3 {
        for pairs in 0..=17 {
            all.case(device, 1, &vec![expert; pairs], &mut random)?;
        }
    }
    Ok(())
}

/// Duplicate experts in one token, equal tokens, every share of a row.
fn shares(device: &Device) -> Outcome {
    let mut random = Random::new(23);
    let all = Experts::random(device, &[Kind::W4; 5], 16, 32, &mut random)?;
    let experts = [4, 4, 4, 0, 0, 0, 4, 4, 1, 3, 3, 1];
    for share in [1, 2, 3, 4, 6, 12] {
        all.case(device, share, &experts, &mut random)?;
    }
    let row = random.floats(32);
    let x = X::upload(device, row.repeat(3))?;
    let y = all.multiply(device, &x, 2, &[4, 1, 4, 1, 4, 1])?;
    equal("equal tokens", &y[..32], &y[32..64])?;
    equal("equal tokens", &y[..32], &y[64..])
}

/// Expert 383 of 384 has the weights of expert 0: the same bits.
fn last_expert(device: &Device) -> Outcome {
    let mut random = Random::new(24);
    for kind in Kind::MAIN {
        let mut stored: Vec<_> = (0..383).map(|_| Stored::random(kind, [1, 16, 32], &mut random)).collect();
        stored.push(Stored::random(kind, [1, 16, 32], &mut Random::new(24)));
        stored[0] = Stored::random(kind, [1, 16, 32], &mut Random::new(24));
        let all = Experts::new(device, stored)?;
        let x = X::random(device, 32, &mut random)?;
        let y = all.multiply(device, &x, 2, &[383, 0])?;
        equal(kind.name(), &y[..16], &y[16..])?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let mut random = Random::new(25);
    let make = |shape, random: &mut Random| Stored::random(Kind::W4, shape, random);
    let (a, b) = (make([1, 16, 32], &mut random), make([1, 16, 64], &mut random));
    let says = |result: kdtree::device::Result<()>, what: &str| {
        let error = result.err().map(|e| e.to_string()).unwrap_or_default();
        check(error == what, || format!("expected `{what}`, found `{error}`"))
    };
    let new = |hosts: &[_]| ExpertWeights::new(device, "experts", hosts).map(|_| ());
    says(new(&[]), "experts: `experts`: no experts")?;
    let unequal = "experts: `experts`: expected [1, 16, 32] as the first, found [1, 16, 64] in `b`";
    says(new(&[a.host("a"), b.host("b")]), unequal)?;

    let all = Experts::new(device, vec![a])?;
    let plans = explain_grouped(&all.weights, 4);
    let text = plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; ");
    let want = "w4a16 1 x [16, 32] x 4 rows: grouped_gemm_w4a16, 16 x 8 a block, k in 64s over 1 warps, \
                grid 4 x 1 x 1 of 32, 0 shared, 576 weight bytes";
    check(text == want, || format!("expected `{want}`, found `{text}`"))?;
    let x = X::random(device, 4 * 32, &mut random)?;
    let (y, order, tiles) = (device.zeros(4 * 16)?, device.zeros(4)?, device.zeros(13)?);
    let p = |x_rows_per_token, pairs| Grouped {
        weights: &all.weights,
        x: x.acts(),
        x_rows_per_token,
        order: order.view(),
        tiles: tiles.view(),
        pairs,
        y: y.view_mut(),
    };
    let refused = |p: Grouped, what: &str| {
        let error = grouped_linear(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("grouped_gemm_w4a16: `experts` [1, 16, 32]") && error.contains(what), || {
            format!("expected a refusal with `{what}`, found `{error}`")
        })
    };
    grouped_linear(device, &p(1, 4))?;
    grouped_linear(device, &p(1, 0))?;
    refused(p(3, 4), "3 pairs a row of x, which does not divide them")?;
    refused(p(2, 10), "x holds 128, expected 160")?;
    refused(p(2, 8), "y holds 64, expected 128")?;
    refused(Grouped { order: part(order.view(), 0, 3), ..p(2, 4) }, "order holds 3, expected 4")?;
    refused(Grouped { tiles: part(tiles.view(), 0, 9), ..p(2, 4) }, "tiles holds 9, expected 13")
}
