//! Products gathered by expert: every way tokens can fall on experts, formats mixed by expert.

use cuda_std::{Global, GlobalMut};
use kdtree::device::{Buffer, Device};
use kdtree::kernels::Acts;
use kdtree::linear::{ExpertWeights, Grouped, Product, Sorting, Upload, Weight};
use kdtree::linear::{explain_grouped, grouped_linear, linear};
use kdtree::reference::linear as twin;

use super::linear::{Kind, Stored, Want, X, near, part};
use super::support::{Outcome, Random, Suite, check, equal};

/// Pairs of a tile.
pub const TILE: usize = 8;
pub const EIGHT: Sorting = Sorting::Before(TILE);

pub fn cases(suite: &mut Suite) {
    for kind in Kind::ALL {
        let name = kind.name();
        suite.both(format!("grouped::{name}::gate"), move |d| random_tokens(d, &[kind; 6], 33, 128, 3, true));
        suite.both(format!("grouped::{name}::down"), move |d| random_tokens(d, &[kind; 6], 16, 640, 2, false));
        suite.both(format!("grouped::{name}::as_dense"), move |d| same_bits_as_dense(d, kind));
    }
    // A k of four chunks in one piece: full, with half a chunk of nothing at its end, and weight rows that fill no
    // tile.
    for kind in [Kind::W4, Kind::W4Wide] {
        for (n, k) in [(160, 256), (33, 224)] {
            let case = move |d: &Device| random_tokens(d, &[kind; 6], n, k, 2, false);
            suite.both(format!("grouped::{}::short::{n}x{k}", kind.name()), case);
        }
        suite.both(format!("grouped::{}::short::alone", kind.name()), move |d| alone(d, kind));
        let case = move |d: &Device| random_tokens(d, &[kind; 8], 7168, 256, 8, false);
        suite.cuda(format!("grouped::{}::7168x256", kind.name()), case);
    }
    // 16 pairs a tile: the bits of 8.
    for (n, k) in [(1, 128), (300, 32), (33, 640), (72, 256)] {
        suite.both(format!("grouped::w4a16::sixteen::{n}x{k}"), move |d| sixteen(d, [n, k], 3));
    }
    // Few pairs, which blocks sort: the bits of those sorted before.
    for (n, k) in [(1, 128), (33, 640), (72, 256)] {
        suite.both(format!("grouped::w4a16::within::{n}x{k}"), move |d| within(d, [n, k]));
    }
    suite.both("grouped::w4a16::within::refuses", within_refuses);
    for (n, k) in [(2048, 7168), (7168, 2048), (256, 7168), (7168, 256)] {
        suite.cuda(format!("grouped::w4a16::within::{n}x{k}"), move |d| within(d, [n, k]));
    }
    for (n, k) in [(2048, 7168), (7168, 2048), (1040, 2112)] {
        suite.cuda(format!("grouped::w4a16::sixteen::{n}x{k}"), move |d| sixteen(d, [n, k], 9));
    }
    // The shape of an expert's gate projection in Kimi K2.6.
    for kind in Kind::MAIN {
        let case = move |d: &Device| random_tokens(d, &[kind; 8], 2048, 7168, 2, true);
        suite.cuda(format!("grouped::{}::2048x7168", kind.name()), case);
    }
    let mixed: Vec<_> = (0..10).map(|e| Kind::ALL[e % Kind::ALL.len()]).collect();
    for (n, k) in [(1, 128), (40, 1152), (40, 256)] {
        let kinds = mixed.clone();
        suite.both(format!("grouped::mixed::{n}x{k}"), move |d| random_tokens(d, &kinds, n, k, 4, true));
    }
    suite.both("grouped::every_count", every_count);
    let mixed = [Kind::W4, Kind::Bf16, Kind::W4, Kind::F32];
    suite.both("grouped::rows_0_to_128", move |d| every_row_count(d, &mixed, EIGHT));
    let sixteen = Sorting::Before(2 * TILE);
    suite.cuda("grouped::w4a16::sixteen::rows_0_to_128", move |d| every_row_count(d, &[Kind::W4; 4], sixteen));
    // Groups of 64 are repacked otherwise, and no more.
    suite.both("grouped::w4a16_g64::33x128", |d| random_tokens(d, &[Kind::W4Middle; 3], 33, 128, 2, true));
    suite.both("grouped::shares", shares);
    for kind in [Kind::Bf16, Kind::W4, Kind::W4Wide] {
        // More weight rows than make units few: k in longer slices.
        let case = move |d: &Device| random_tokens(d, &[kind; 3], 1040, 2112, 2, true);
        suite.cuda(format!("grouped::{}::1040x2112", kind.name()), case);
        match kind {
            Kind::W4 => suite.both("grouped::w4a16::skews", move |d| skews(d, kind, 320, EIGHT)),
            _ => suite.cuda(format!("grouped::{}::skews", kind.name()), move |d| skews(d, kind, 320, EIGHT)),
        }
        suite.cuda(format!("grouped::{}::repeats", kind.name()), move |d| repeats(d, kind, 1152, 16, EIGHT));
    }
    // Every other kernel of gathered rows: a short k, 16 pairs a tile, few pairs that blocks sort.
    for kind in [Kind::W4, Kind::W4Wide] {
        suite.cuda(format!("grouped::{}::short::skews", kind.name()), move |d| skews(d, kind, 256, EIGHT));
        suite.cuda(format!("grouped::{}::short::repeats", kind.name()), move |d| repeats(d, kind, 256, 16, EIGHT));
    }
    suite.cuda("grouped::w4a16::sixteen::skews", |d| skews(d, Kind::W4, 320, Sorting::Before(2 * TILE)));
    suite.cuda("grouped::w4a16::sixteen::repeats", |d| repeats(d, Kind::W4, 1152, 16, Sorting::Before(2 * TILE)));
    for k in [256, 1152] {
        suite.cuda(format!("grouped::w4a16::within::{k}::repeats"), move |d| {
            repeats(d, Kind::W4, k, 8, Sorting::Within)
        });
    }
    suite.both("grouped::last_expert", last_expert);
    suite.both("grouped::refuses", refuses);
}

/// Pairs sorted by expert (stable), and the tiles: what `expert_sort` makes.
fn sorted(experts: &[usize], count: usize, tile: usize) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..experts.len() as u32).collect();
    order.sort_by_key(|&pair| experts[pair as usize]);
    let mut tiles = vec![0];
    let mut first = 0;
    for expert in 0..count {
        let mut left = experts.iter().filter(|&&e| e == expert).count();
        while left > 0 {
            let here = left.min(tile);
            tiles.extend([expert as u32, first as u32, here as u32]);
            (first, left, tiles[0]) = (first + here, left - here, tiles[0] + 1);
        }
    }
    // What lies behind the last tile must not be read.
    tiles.resize(1 + 3 * experts.len(), u32::MAX);
    (order, tiles)
}

/// What products find their pairs by, on the device.
pub struct Lists {
    pub ids: Buffer<u32>,
    pub order: Buffer<u32>,
    pub tiles: Buffer<u32>,
}

impl Lists {
    /// Those that `sorting` does not read are poisoned.
    pub fn new(device: &Device, experts: &[usize], count: usize, sorting: Sorting) -> kdtree::device::Result<Self> {
        let (mut ids, mut order, mut tiles) = (vec![u32::MAX; experts.len()], Vec::new(), Vec::new());
        match sorting {
            Sorting::Before(tile) => (order, tiles) = sorted(experts, count, tile),
            Sorting::Within => ids = experts.iter().map(|&expert| expert as u32).collect(),
        }
        Ok(Self { ids: device.upload(&ids)?, order: device.upload(&order)?, tiles: device.upload(&tiles)? })
    }
}

/// A layer's experts of one matrix, on the host and on the device.
pub struct Experts {
    pub stored: Vec<Stored>,
    pub weights: ExpertWeights,
    pub sorting: Sorting,
}

impl Experts {
    pub fn random(
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
        Ok(Self { stored, weights, sorting: Sorting::Before(TILE) })
    }

    /// The product of `experts` (one a pair).
    pub fn multiply(
        &self,
        device: &Device,
        x: &X,
        share: usize,
        experts: &[usize],
    ) -> Result<Vec<f32>, libtest_mimic::Failed> {
        let lists = Lists::new(device, experts, self.stored.len(), self.sorting)?;
        let y = device.alloc(experts.len() * self.weights.n())?;
        y.fill(0xFF)?;
        let p = Grouped {
            weights: &self.weights,
            x: x.acts(),
            x_rows_per_token: share,
            sorting: self.sorting,
            ids: lists.ids.view(),
            order: lists.order.view(),
            tiles: lists.tiles.view(),
            pairs: experts.len(),
            settled: false,
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

/// Pairs gathered by expert have the bits of the dense product of that expert alone, for k that both divide alike.
fn same_bits_as_dense(device: &Device, kind: Kind) -> Outcome {
    let (n, k, pairs) = (20, 8192, 5);
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

/// Pairs have the same bits in tiles of 16 and of 8, whichever experts they take; and those are near the twin's.
fn sixteen(device: &Device, [n, k]: [usize; 2], tokens: usize) -> Outcome {
    let (count, top_k) = (6, 8);
    let mut random = Random::new((n + 3 * k) as u64);
    let mut all = Experts::random(device, &vec![Kind::W4; count], n, k, &mut random)?;
    let pairs = tokens * top_k;
    let x = X::random(device, tokens * k, &mut random)?;
    let drawn: Vec<_> = (0..pairs).map(|_| random.below(count)).collect();
    for experts in [drawn.clone(), vec![count - 1; pairs], (0..pairs).map(|pair| pair / 17 % count).collect()] {
        all.sorting = Sorting::Before(TILE);
        let eight = all.multiply(device, &x, top_k, &experts)?;
        all.sorting = Sorting::Before(2 * TILE);
        equal("products", &all.multiply(device, &x, top_k, &experts)?, &eight)?;
    }
    all.case(device, top_k, &drawn, &mut random)
}

/// Every number of pairs that blocks sort for themselves, however they fall on experts.
fn within(device: &Device, [n, k]: [usize; 2]) -> Outcome {
    const MOST: usize = 32;
    let count = 6;
    let mut random = Random::new((5 * n + k) as u64);
    let mut all = Experts::random(device, &vec![Kind::W4; count], n, k, &mut random)?;
    let x = X::random(device, MOST * k, &mut random)?;
    let falls: [&dyn Fn(usize) -> usize; 4] =
        [&|_| count - 1, &|pair| pair % count, &|pair| pair / 9, &|pair| 5 - pair / 6];
    for (pairs, fall) in (0..=MOST).zip(falls.into_iter().cycle()) {
        let experts: Vec<_> = (0..pairs).map(fall).collect();
        let row = X::upload(device, x.seen_by(Kind::F32)[..pairs * k].to_vec())?;
        all.sorting = Sorting::Before(TILE);
        let before = all.multiply(device, &row, 1, &experts)?;
        all.sorting = Sorting::Within;
        equal(&format!("{pairs} pairs"), &all.multiply(device, &row, 1, &experts)?, &before)?;
    }
    let drawn: Vec<_> = (0..MOST).map(|_| random.below(count)).collect();
    all.case(device, 4, &drawn, &mut random)
}

fn within_refuses(device: &Device) -> Outcome {
    let mut random = Random::new(30);
    let refused = |all: &Experts, pairs: usize, expert: usize, what: &str| {
        let x = X::random(device, pairs * 32, &mut Random::new(31))?;
        let error = match all.multiply(device, &x, 1, &vec![expert; pairs]) {
            Ok(_) => String::new(),
            Err(error) => error.message().unwrap_or_default().to_string(),
        };
        check(error.contains(what), || format!("expected a refusal with `{what}`, found `{error}`"))
    };
    for kind in [Kind::F32, Kind::Bf16, Kind::W4Wide] {
        let all = Experts { sorting: Sorting::Within, ..Experts::random(device, &[kind; 2], 16, 32, &mut random)? };
        refused(&all, 2, 0, "weights want sorted pairs")?;
    }
    let all = Experts { sorting: Sorting::Within, ..Experts::random(device, &[Kind::W4; 2], 16, 32, &mut random)? };
    refused(&all, 33, 0, "more than 32 want to be sorted")?;
    if !device.is_cuda() {
        refused(&all, 2, 2, "outside the experts")?;
    }
    Ok(())
}

/// A pair of a short k has the bits that it has alone, whichever pairs and experts go with it.
fn alone(device: &Device, kind: Kind) -> Outcome {
    let (n, k, pairs, count) = (72, 256, 21, 4);
    let mut random = Random::new(29);
    let all = Experts::random(device, &vec![kind; count], n, k, &mut random)?;
    let x = X::random(device, pairs * k, &mut random)?;
    // Ten pairs on one expert, so two tiles of them; none on the last expert but one.
    let experts: Vec<_> = (0..pairs).map(|pair| [1, 0, 1, 3][pair % 4]).collect();
    let together = all.multiply(device, &x, 1, &experts)?;
    for (pair, &expert) in experts.iter().enumerate() {
        let row = X::upload(device, x.seen_by(Kind::F32)[pair * k..][..k].to_vec())?;
        let y = all.multiply(device, &row, 1, &[expert])?;
        equal(&format!("pair {pair}"), &y, &together[pair * n..][..n])?;
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

/// 0 to 128 tokens of 2 experts each, one of which nobody chooses.
fn every_row_count(device: &Device, kinds: &[Kind; 4], sorting: Sorting) -> Outcome {
    let mut random = Random::new(25);
    let all = Experts { sorting, ..Experts::random(device, kinds, 17, 64, &mut random)? };
    (0..=128).try_for_each(|tokens| {
        let experts: Vec<_> = (0..2 * tokens).map(|_| [0, 1, 3][random.below(3)]).collect();
        all.case(device, 2, &experts, &mut random).map_err(|e| format!("{tokens} tokens: {e:?}").into())
    })
}

/// 64 tokens of 8 experts: all on one expert, all on the same eight, each expert but one, one expert eight times in a
/// token, one token apart from the rest.
fn skews(device: &Device, kind: Kind, k: usize, sorting: Sorting) -> Outcome {
    let (tokens, top_k, count) = (64, 8, 48);
    let mut random = Random::new(27);
    let all = Experts { sorting, ..Experts::random(device, &vec![kind; count], 65, k, &mut random)? };
    let skew = |expert: &dyn Fn(usize) -> usize| -> Vec<usize> { (0..tokens * top_k).map(expert).collect() };
    for experts in [
        skew(&|_| 7),
        skew(&|pair| pair % top_k),
        skew(&|pair| pair % (count - 1)),
        skew(&|pair| pair / top_k % count),
        skew(&|pair| if pair < top_k { pair } else { count - 1 }),
    ] {
        all.case(device, top_k, &experts, &mut random)?;
    }
    Ok(())
}

/// 200 launches on a GPU give the same bits, and a pair has the bits that it has alone.
fn repeats(device: &Device, kind: Kind, k: usize, tokens: usize, sorting: Sorting) -> Outcome {
    let top_k = 4;
    let mut random = Random::new(28);
    let all = Experts { sorting, ..Experts::random(device, &[kind; 9], 65, k, &mut random)? };
    let experts: Vec<_> = (0..tokens * top_k).map(|_| random.below(9)).collect();
    let x = X::random(device, tokens * k, &mut random)?;
    let bits = |values: Vec<f32>| -> Vec<u32> { values.into_iter().map(f32::to_bits).collect() };
    let first = bits(all.multiply(device, &x, top_k, &experts)?);
    for _ in 0..200 {
        equal("repeat", &bits(all.multiply(device, &x, top_k, &experts)?), &first)?;
    }
    for token in 0..tokens {
        let row = X::upload(device, x.seen_by(Kind::F32)[token * k..][..k].to_vec())?;
        let alone = bits(all.multiply(device, &row, top_k, &experts[token * top_k..][..top_k])?);
        equal(&format!("token {token}"), &alone, &first[token * top_k * 65..][..top_k * 65])?;
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
    let room = ExpertWeights::alloc(device, "experts", &[a.host("a")])?;
    let upload = Upload::new(device)?;
    let other = Stored::random(Kind::F32, [1, 16, 32], &mut random);
    for (e, host, name) in [(0, b.host("b"), "b"), (0, other.host("f"), "f"), (1, a.host("a"), "a")] {
        says(room.put(&upload, e, &host), &format!("experts: `{name}`: expert {e} is not what there is room for"))?;
    }

    let all = Experts::new(device, vec![a])?;
    let explained = |weights: &ExpertWeights, sorting: Sorting, want: &str| {
        let plans = explain_grouped(weights, 4, sorting);
        let text = plans.iter().map(|plan| plan.to_string()).collect::<Vec<_>>().join("; ");
        check(text == want, || format!("expected `{want}`, found `{text}`"))
    };
    let stream = "w4a16 1 x [16, 32] x 4 rows: grouped_gemm_w4a16, 256 x 8 a block, k in 64s over 1 warps, \
                  4 units, blocks of 256, 90240 shared, 576 weight bytes";
    explained(&all.weights, Sorting::Before(TILE), stream)?;
    let within = stream.replace("w4a16,", "w4a16_within,");
    explained(&all.weights, Sorting::Within, &within)?;
    let short = "w4a16 1 x [144, 256] x 4 rows: grouped_gemm_w4a16_short, 128 x 8 a block, k in 64s over 1 warps, \
                 8 units, blocks of 256, 73984 shared, 20736 weight bytes";
    let of_short = Experts::new(device, vec![make([1, 144, 256], &mut random)])?;
    explained(&of_short.weights, Sorting::Before(TILE), short)?;
    explained(&of_short.weights, Sorting::Within, &short.replace("w4a16_short,", "w4a16_within_short,"))?;
    let many = "w4a16 1 x [16, 32] x 4 rows: grouped_gemm_w4a16_m16, 256 x 16 a block, k in 64s in 1 slices, \
                4 units, blocks of 256, 90240 shared, 576 weight bytes";
    explained(&all.weights, Sorting::Before(2 * TILE), many)?;
    let mixed = Experts::random(device, &[Kind::W4, Kind::Bf16], 16, 32, &mut random)?;
    let four = Experts::random(device, &[Kind::W4; 64], 16, 32, &mut random)?;
    let of = |weights: &[&ExpertWeights]| [4, 32, 33, 64 * 6].map(|pairs| Sorting::of(weights, pairs));
    let [eight, sixteen] = [TILE, 2 * TILE].map(Sorting::Before);
    equal("sorting", &of(&[&four.weights]), &[Sorting::Within, Sorting::Within, eight, sixteen])?;
    equal("sorting", &of(&[&four.weights, &mixed.weights]), &[eight; 4])?;
    let x = X::random(device, 4 * 32, &mut random)?;
    let (y, order, tiles) = (device.zeros(4 * 16)?, device.zeros(4)?, device.zeros(13)?);
    let p = |x_rows_per_token, pairs| Grouped {
        weights: &all.weights,
        x: x.acts(),
        x_rows_per_token,
        sorting: Sorting::Before(TILE),
        ids: Global::EMPTY,
        order: order.view(),
        tiles: tiles.view(),
        pairs,
        settled: false,
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
    refused(Grouped { y: GlobalMut::from_raw(y.view().addr(), 63), ..p(2, 4) }, "y holds 63, expected 64")?;
    refused(Grouped { order: part(order.view(), 0, 3), ..p(2, 4) }, "order holds 3, expected 4")?;
    refused(Grouped { tiles: part(tiles.view(), 0, 9), ..p(2, 4) }, "tiles holds 9, expected 13")
}
