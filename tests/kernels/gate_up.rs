//! Gate and up of rows gathered by expert: one kernel for both, with the bits of two products and a SwiGLU.

use cuda_std::{Global, GlobalMut};
use kdtree::device::Device;
use kdtree::kernels::{Swiglu, swiglu};
use kdtree::linear::{GateUp, Sorting, explain_gate_up, explain_grouped, gate_up};

use super::linear::{Kind, X};
use super::linear_grouped::{EIGHT, Experts, Lists, TILE};
use super::support::{Outcome, Random, Suite, check, equal};

pub fn cases(suite: &mut Suite) {
    // 16 pairs a tile, and few pairs that blocks sort: the bits of 8 sorted before.
    let all = [Kind::W4; 6];
    for (name, sorting) in [("sixteen", Sorting::Before(2 * TILE)), ("within", Sorting::Within)] {
        for (n, k) in [(1, 128), (300, 32), (33, 640), (72, 256)] {
            let case = move |d: &Device| by(d, all, all, [n, k], sorting);
            suite.both(format!("gate_up::w4a16::{name}::{n}x{k}"), case);
        }
        for (n, k) in [(2048, 7168), (256, 7168), (1040, 2112)] {
            let case = move |d: &Device| by(d, all, all, [n, k], sorting);
            suite.cuda(format!("gate_up::w4a16::{name}::{n}x{k}"), case);
        }
    }
    suite.both("gate_up::rows_0_to_128", row_counts);
    suite.both("gate_up::skews", |d| skews(d, EIGHT));
    suite.cuda("gate_up::skews::sixteen", |d| skews(d, Sorting::Before(2 * TILE)));
    for (n, k) in [(1, 128), (33, 640), (300, 32)] {
        for kind in Kind::ALL.into_iter().filter(|kind| kind.takes(k)) {
            let case = move |d: &Device| by(d, [kind; 6], [kind; 6], [n, k], EIGHT);
            suite.both(format!("gate_up::{}::{n}x{k}", kind.name()), case);
        }
    }
    let mixed: [Kind; 6] = std::array::from_fn(|e| Kind::ALL[1 + e % 4]);
    suite.both("gate_up::mixed::40x192", move |d| by(d, mixed, mixed, [40, 128], EIGHT));
    let other: [Kind; 6] = std::array::from_fn(|e| Kind::ALL[e % 5]);
    suite.both("gate_up::unequal::40x192", move |d| by(d, mixed, other, [40, 128], EIGHT));
    suite.cuda("gate_up::w4a16::2048x7168", move |d| by(d, all, all, [2048, 7168], EIGHT));
    // More weight rows than make units few: k in longer slices.
    for kind in [Kind::Bf16, Kind::W4, Kind::W4Wide] {
        let case = move |d: &Device| by(d, [kind; 6], [kind; 6], [1040, 2112], EIGHT);
        suite.cuda(format!("gate_up::{}::1040x2112", kind.name()), case);
    }
    suite.both("gate_up::refuses", refuses);
}

/// As [`every_row_count`] for both products in one kernel.
fn row_counts(device: &Device) -> Outcome {
    let mut random = Random::new(26);
    let kinds = [Kind::W4, Kind::Bf16, Kind::W4, Kind::W4Wide];
    let gate = Experts::random(device, &kinds, 17, 64, &mut random)?;
    let up = Experts::random(device, &kinds, 17, 64, &mut random)?;
    (0..=128).try_for_each(|tokens| {
        let experts: Vec<_> = (0..2 * tokens).map(|_| [0, 1, 3][random.below(3)]).collect();
        as_apart(device, &gate, &up, 2, &experts, &mut random).map_err(|e| format!("{tokens} tokens: {e:?}").into())
    })
}

/// All tokens on one expert, on the same ones, one expert several times in a token.
fn skews(device: &Device, sorting: Sorting) -> Outcome {
    let (tokens, top_k, count) = (24, 4, 7);
    let mut random = Random::new(29);
    let gate = Experts { sorting, ..Experts::random(device, &vec![Kind::W4; count], 33, 128, &mut random)? };
    let up = Experts::random(device, &vec![Kind::W4; count], 33, 128, &mut random)?;
    let skews: [fn(usize) -> usize; 4] = [|_| 6, |pair| pair % 4, |pair| pair / 4 % 7, |pair| pair % 4 / 3 * 5];
    skews.into_iter().try_for_each(|expert| {
        let experts: Vec<_> = (0..tokens * top_k).map(expert).collect();
        as_apart(device, &gate, &up, top_k, &experts, &mut random)
    })
}

/// One kernel for both products gives the bits of two products and a SwiGLU; the unequal never take it.
fn by(device: &Device, gate: [Kind; 6], up: [Kind; 6], [n, k]: [usize; 2], sorting: Sorting) -> Outcome {
    let (share, mut random) = (2, Random::new((n * 7 + k) as u64));
    let mut g = Experts::random(device, &gate, n, k, &mut random)?;
    let u = Experts::random(device, &up, n, k, &mut random)?;
    g.sorting = sorting;
    let experts: Vec<usize> = (0..11 * share).map(|pair| [pair % 5, 5, pair / 7][pair % 3]).collect();
    as_apart(device, &g, &u, share, &experts, &mut random)
}

fn as_apart(
    device: &Device,
    g: &Experts,
    u: &Experts,
    share: usize,
    experts: &[usize],
    random: &mut Random,
) -> Outcome {
    let (pairs, n, k) = (experts.len(), g.weights.n(), g.weights.k());
    let x = X::random(device, pairs / share * k, random)?;
    let lists = Lists::new(device, experts, g.stored.len(), g.sorting)?;
    let (f32, bf16) = (device.alloc::<f32>(pairs * n)?, device.alloc::<cuda_std::bf16>(pairs * n)?);
    let apart = [device.alloc::<f32>(pairs * n)?, device.alloc::<f32>(pairs * n)?];
    f32.fill(0xFF)?;
    let p = GateUp {
        gate: &g.weights,
        up: &u.weights,
        x: x.acts(),
        x_rows_per_token: share,
        sorting: g.sorting,
        ids: lists.ids.view(),
        order: lists.order.view(),
        tiles: lists.tiles.view(),
        pairs,
        out_f32: f32.view_mut(),
        out_bf16: bf16.view_mut(),
        apart: [apart[0].view_mut(), apart[1].view_mut()],
    };
    gate_up(device, &p)?;
    let want = device.alloc::<f32>(pairs * n)?;
    let products = [g.multiply(device, &x, share, experts)?, u.multiply(device, &x, share, experts)?];
    let (gate, up) = (device.upload(&products[0])?, device.upload(&products[1])?);
    let (rows, width, stride) = (pairs, n, n);
    let out_bf16 = GlobalMut::EMPTY;
    swiglu(
        device,
        Swiglu { gate: gate.view(), up: up.view(), out_f32: want.view_mut(), out_bf16, rows, width, stride },
    )?;
    let bits = |values: Vec<f32>| -> Vec<u32> { values.into_iter().map(f32::to_bits).collect() };
    let want = want.read()?;
    let rounded: Vec<_> = want.iter().map(|&v| cuda_std::bf16::from_f32(v)).collect();
    check(bf16.read()? == rounded, || "the bf16 output is not the f32 one rounded".into())?;
    equal("values", &bits(f32.read()?), &bits(want))
}

fn refuses(device: &Device) -> Outcome {
    let mut random = Random::new(26);
    let make = |n, random: &mut Random| Experts::random(device, &[Kind::W4; 2], n, 64, random);
    let (a, b) = (make(16, &mut random)?, make(32, &mut random)?);
    let x = X::random(device, 2 * 64, &mut random)?;
    let (out, order, tiles) = (device.zeros::<f32>(2 * 16)?, device.zeros(2)?, device.zeros(7)?);
    let p = |gate, up, pairs| GateUp {
        gate,
        up,
        x: x.acts(),
        x_rows_per_token: 1,
        sorting: Sorting::Before(TILE),
        ids: Global::EMPTY,
        order: order.view(),
        tiles: tiles.view(),
        pairs,
        out_f32: out.view_mut(),
        out_bf16: GlobalMut::EMPTY,
        apart: [GlobalMut::EMPTY; 2],
    };
    let refused = |p: GateUp, what: &str| {
        let error = gate_up(device, &p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains(what), || format!("expected a refusal with `{what}`, found `{error}`"))
    };
    refused(p(&a.weights, &b.weights, 2), "`experts` [2, 16, 64] and `experts` [2, 32, 64]")?;
    refused(p(&a.weights, &a.weights, 3), "x holds 128, expected 192")?;
    let out_f32 = GlobalMut::from_raw(out.view().addr(), 31);
    refused(GateUp { out_f32, ..p(&a.weights, &a.weights, 2) }, "the f32 output holds 31, expected 32")?;
    let plans =
        explain_gate_up(&a.weights, &a.weights, 6, Sorting::Before(TILE)).ok_or("one kernel multiplies both")?;
    equal(
        "operations",
        &[plans[0].flops(), explain_grouped(&a.weights, 6, Sorting::Within)[0].flops()],
        &[4 * 6 * 16 * 64, 2 * 6 * 16 * 64],
    )?;
    gate_up(device, &p(&a.weights, &a.weights, 0))?;
    Ok(())
}
