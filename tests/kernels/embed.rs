//! Embedding: both table types, the bonus from the state, ids at the ends, id 0, an id outside.

use cuda_std::{Global, bf16};
use kdtree::device::Device;
use kdtree::kernels::{Embed, Table, embed, initial_state};
use kdtree::reference;

use super::support::{Outcome, Random, Suite, check, equal};

pub fn cases(suite: &mut Suite) {
    for (rows, vocab, width) in [(0, 3, 8), (1, 1, 1), (5, 7, 33), (65, 100, 256), (3, 11, 7168)] {
        suite.both(format!("embed::{rows} of {vocab}x{width}"), move |d| against_reference(d, rows, vocab, width));
    }
    suite.both("embed::bonus_of_the_state", bonus);
    // On a GPU a trap would end the context that all cases share.
    suite.cpu("embed::outside", outside);
    suite.both("embed::refuses", refuses);
}

fn against_reference(device: &Device, rows: usize, vocab: usize, width: usize) -> Outcome {
    let mut random = Random::new(3);
    let mut ids: Vec<i32> = (0..rows).map(|_| random.below(vocab) as i32).collect();
    if rows > 2 {
        (ids[0], ids[rows - 1]) = (vocab as i32 - 1, 0);
    }
    let table = random.bf16s(vocab * width);
    let wide: Vec<f32> = table.iter().map(|v| v.to_f32()).collect();
    let (d_ids, d_table, d_wide) = (device.upload(&ids)?, device.upload(&table)?, device.upload(&wide)?);
    let want = reference::embed(&ids, &wide, width);
    for table in [Table::F32(d_wide.view()), Table::Bf16(d_table.view())] {
        let x = device.alloc::<f32>(rows * width)?;
        x.fill(0xFF)?;
        let p = Embed { ids: d_ids.view(), table, state: Global::EMPTY, x: x.view_mut(), rows, vocab, width };
        embed(device, p)?;
        equal("x", &x.read()?, &want)?;
    }
    Ok(())
}

fn bonus(device: &Device) -> Outcome {
    let table = device.upload(&[0.5f32, 1.5, 2.5])?;
    let x = device.alloc::<f32>(3)?;
    let state = device.upload(&initial_state(9, 2, 0))?;
    for (ids, want) in [([0, 0, 1], [2.5, 0.5, 1.5]), ([-1, 1, 2], [2.5, 1.5, 2.5])] {
        let ids = device.upload(&ids)?;
        let table = Table::F32(table.view());
        let p = Embed { ids: ids.view(), table, state: state.view(), x: x.view_mut(), rows: 3, vocab: 3, width: 1 };
        embed(device, p)?;
        equal("x", &x.read()?, &want)?;
    }
    Ok(())
}

fn outside(device: &Device) -> Outcome {
    let (table, x) = (device.zeros::<bf16>(6)?, device.alloc(2)?);
    for id in [3, -1, i32::MIN, i32::MAX] {
        let ids = device.upload(&[id])?;
        let table = Table::Bf16(table.view());
        let p = Embed { ids: ids.view(), table, state: Global::EMPTY, x: x.view_mut(), rows: 1, vocab: 3, width: 2 };
        let error = embed(device, p).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.contains("outside the vocabulary"), || format!("id {id}: expected a trap, found `{error}`"))?;
    }
    Ok(())
}

fn refuses(device: &Device) -> Outcome {
    let (table, ids, x, short) =
        (device.zeros::<f32>(12)?, device.zeros(2)?, device.zeros(8)?, device.zeros::<u32>(3)?);
    let p = |rows, vocab, width, state| Embed {
        ids: ids.view(),
        table: Table::F32(table.view()),
        state,
        x: x.view_mut(),
        rows,
        vocab,
        width,
    };
    embed(device, p(2, 3, 4, Global::EMPTY))?;
    for bad in
        [p(3, 3, 4, Global::EMPTY), p(2, 4, 4, Global::EMPTY), p(2, 2, 6, Global::EMPTY), p(1, 3, 4, short.view())]
    {
        let error = embed(device, bad).err().map(|e| e.to_string()).unwrap_or_default();
        check(error.starts_with("embed: "), || format!("expected a refusal, found `{error}`"))?;
    }
    Ok(())
}
