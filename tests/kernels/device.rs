//! The device room itself: buffers, launches, graphs, events and errors, the same on both devices.

use std::fmt::Debug;
use std::process::Command;

use bytemuck::Pod;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::args::RmsNormArgs;
use gpu::kernels::rms_norm as kernel;
use kdtree::device::{Buffer, Device, DeviceError, Dims, Mode, cuda_report};
use kdtree::kernels::{RmsNorm, rms_norm};

use super::support::{Outcome, Random, Suite, check, equal};

/// Set in the process that plants a fault: a fault ends a process's use of its GPU.
const PLANT: &str = "KDTREE_PLANT_FAULT";
const FAULT: &str = "device::a_fault_answers_every_later_call";

pub fn cases(suite: &mut Suite) {
    suite.both("device::round_trip_u8", |d| round_trip::<u8>(d, |n| n as u8));
    suite.both("device::round_trip_u16", |d| round_trip::<u16>(d, |n| n as u16));
    suite.both("device::round_trip_u32", |d| round_trip::<u32>(d, |n| n as u32));
    suite.both("device::round_trip_u64", |d| round_trip::<u64>(d, |n| n));
    suite.both("device::round_trip_f32", |d| round_trip::<f32>(d, |n| n as u32 as f32));
    suite.both("device::round_trip_bf16", |d| round_trip::<bf16>(d, |n| bf16::from_bits(n as u16 & 0x3FFF)));
    suite.cuda("device::large_writes_go_through_stages", large_writes);
    suite.both("device::free_memory_shrinks", free_memory);
    suite.both("device::nothing_is_a_buffer_too", nothing);
    suite.both("device::fill_sets_every_byte", fill);
    suite.both("device::out_of_range_is_refused", out_of_range);
    suite.both("device::out_of_memory_is_told", out_of_memory);
    suite.both("device::grid_of_zero_runs_nothing", grid_of_zero);
    suite.both("device::impossible_launches_are_refused", impossible_launches);
    suite.both("device::dynamic_shared_memory_up_to_the_limit", much_shared);
    suite.both("device::graph_equals_eager", graph_equals_eager);
    suite.both("device::capture_refuses_what_it_cannot_record", capture_refuses);
    suite.both("device::capture_ends_when_its_queue_fails", capture_fails);
    suite.both("device::events_are_in_order", events);
    suite.both("device::several_threads", several_threads);
    suite.both("device::info", info);
    suite.cuda("device::graphs_and_events_of_another_device", other_device);
    suite.cuda("device::a_missing_kernel_is_named", missing_kernel);
    suite.cuda(FAULT, fault);
    let driver = cuda_report().library.is_some();
    suite.host("device::no_driver_is_no_device", driver, no_driver);
}

/// Sizes around one piece of pinned memory, around all of them, and one write over another that is still on its way.
fn large_writes(device: &Device) -> Outcome {
    const MIB: usize = 1 << 20;
    let mut random = Random::new(4);
    let source: Vec<u64> = (0..18 * MIB).map(|_| random.next()).collect();
    let source: &[u8] = bytemuck::cast_slice(&source);
    for len in [2 * MIB - 1, 2 * MIB, 16 * MIB, 16 * MIB + 1, 64 * MIB, 130 * MIB + 3] {
        let buffer = device.alloc::<u8>(len)?;
        buffer.write(0, &source[7..7 + len])?;
        check(buffer.read()? == source[7..7 + len], || format!("{len} bytes differ"))?;
        buffer.write(0, &source[9..9 + len])?;
        let part = len / 3;
        buffer.write(part, &source[1..1 + part])?;
        let mut want = source[9..9 + len].to_vec();
        want[part..2 * part].copy_from_slice(&source[1..1 + part]);
        check(buffer.read()? == want, || format!("{len} bytes differ after a second write"))?;
        device.loaded();
    }
    Ok(())
}

fn free_memory(device: &Device) -> Outcome {
    let Some(before) = device.free_memory() else { return Ok(()) };
    check(before > 0, || "nothing is free".to_string())?;
    if device.is_cuda() {
        let _held = device.alloc::<u8>(256 << 20)?;
        let after = device.free_memory().unwrap_or(0);
        check(after < before, || format!("{after} free with a buffer, {before} without"))?;
    }
    Ok(())
}

fn round_trip<T: Element + Pod + PartialEq + Debug>(device: &Device, make: fn(u64) -> T) -> Outcome {
    let mut random = Random::new(3);
    for len in [1, 2, 3, 255, 4099, 70_001] {
        let mut values: Vec<T> = (0..len).map(|_| make(random.next())).collect();
        let buffer = device.upload(&values)?;
        equal("uploaded", &buffer.read()?, &values)?;
        for (start, count) in [(0, 1), (len / 2, len - len / 2), (len - 1, 1), (len / 3, len / 5)] {
            let part: Vec<T> = (0..count).map(|_| make(random.next())).collect();
            buffer.write(start, &part)?;
            values[start..start + count].copy_from_slice(&part);
            let mut back = vec![make(0); count];
            buffer.read_into(start, &mut back)?;
            equal("a part", &back, &part)?;
        }
        equal("after writes of parts", &buffer.read()?, &values)?;
    }
    Ok(())
}

fn nothing(device: &Device) -> Outcome {
    let none: Buffer<f32> = device.upload(&[])?;
    check(none.is_empty() && none.bytes() == 0 && none.view().is_empty(), || "a buffer of nothing is empty".into())?;
    none.fill(1)?;
    none.write(0, &[])?;
    equal("nothing", &none.read()?, &[])?;
    let some = device.upload(&[1u32, 2])?;
    some.write(2, &[])?;
    some.read_into(2, &mut [])?;
    equal("beside nothing", &some.read()?, &[1, 2])
}

fn fill(device: &Device) -> Outcome {
    for len in [1usize, 7, 1000] {
        let buffer: Buffer<u16> = device.zeros(len)?;
        equal("zeros", &buffer.read()?, &vec![0; len])?;
        buffer.fill(0xA5)?;
        equal("filled", &buffer.read()?, &vec![0xA5A5; len])?;
        buffer.write(0, &[7])?;
        check(buffer.read()?[0] == 7, || "a write after a fill is lost".into())?;
    }
    Ok(())
}

fn out_of_range(device: &Device) -> Outcome {
    let buffer = device.upload(&[1f32, 2.0, 3.0])?;
    let refused = |what: &str, result: Result<(), DeviceError>| {
        let text = result.err().map(|e| e.to_string()).unwrap_or_default();
        check(text == what, || format!("expected `{what}`, found `{text}`"))
    };
    refused("write of elements 2..4 of a buffer of 3", buffer.write(2, &[0.0; 2]))?;
    refused("write of elements 4..4 of a buffer of 3", buffer.write(4, &[]))?;
    refused("read of elements 0..4 of a buffer of 3", buffer.read_into(0, &mut [0.0; 4]))?;
    let far = buffer.read_into(usize::MAX, &mut [0.0; 2]);
    check(matches!(far, Err(DeviceError::Range { .. })), || "a range that overflows is accepted".into())?;
    equal("untouched", &buffer.read()?, &[1.0, 2.0, 3.0])
}

fn out_of_memory(device: &Device) -> Outcome {
    for result in [device.alloc::<u8>(1 << 50).map(drop), device.alloc::<u64>(usize::MAX / 4).map(drop)] {
        let told = matches!(result, Err(DeviceError::OutOfMemory { .. }));
        check(told, || format!("expected out of memory, found {result:?}"))?;
    }
    equal("afterwards", &device.upload(&[5u32])?.read()?, &[5])
}

/// Some rows for the one kernel used here.
struct Rows {
    x: Buffer<f32>,
    weight: Buffer<f32>,
    y: Buffer<f32>,
}

const ROWS: usize = 3;
const WIDTH: usize = 96;

impl Rows {
    fn new(device: &Device, seed: u64) -> Result<Self, DeviceError> {
        let mut random = Random::new(seed);
        let y = device.alloc(ROWS * WIDTH)?;
        y.fill(0xFF)?;
        Ok(Self { x: device.upload(&random.floats(ROWS * WIDTH))?, weight: device.upload(&random.floats(WIDTH))?, y })
    }

    fn norm(&self, device: &Device) -> Result<(), DeviceError> {
        self.norm_of(device, &self.x, &self.y)
    }

    fn norm_of(&self, device: &Device, x: &Buffer<f32>, y: &Buffer<f32>) -> Result<(), DeviceError> {
        let p = RmsNorm {
            x: x.view(),
            weight: self.weight.view(),
            out_f32: y.view_mut(),
            out_bf16: GlobalMut::EMPTY,
            rows: ROWS,
            width: WIDTH,
            stride: WIDTH,
            eps: 1e-5,
        };
        rms_norm(device, p)
    }

    fn args(&self) -> RmsNormArgs {
        RmsNormArgs {
            x: self.x.view(),
            weight: self.weight.view(),
            out_f32: self.y.view_mut(),
            out_bf16: GlobalMut::EMPTY,
            width: WIDTH as u32,
            stride: WIDTH as u32,
            eps: 1e-5,
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn grid_of_zero(device: &Device) -> Outcome {
    let rows = Rows::new(device, 1)?;
    for axis in 0..3 {
        let mut grid = [2, 2, 2];
        grid[axis] = 0;
        // A block that no device takes: nothing may look at it.
        device.launch(&kernel::RMS_NORM, Dims { grid, block: [0, 1, 1], shared: u32::MAX }, rows.args())?;
    }
    device.synchronize()?;
    check(rows.y.read()?.iter().all(|v| v.is_nan()), || "a launch with an empty grid wrote".into())
}

fn impossible_launches(device: &Device) -> Outcome {
    let rows = Rows::new(device, 2)?;
    let most = device.info().max_shared;
    for (block, shared, word) in [
        ([kernel::THREADS, 1, 1], most + 16, "shared memory"),
        ([kernel::THREADS, 1, 1], u32::MAX, "shared memory"),
        ([33, 1, 1], 0, "33 threads a block"),
        ([0, 1, 1], 0, "0 threads a block"),
        ([1024, 2, 1], 0, "2048 threads a block"),
        ([1 << 16, 1 << 16, 32], 0, "threads a block"),
    ] {
        let result = device.launch(&kernel::RMS_NORM, Dims { grid: [1, 1, 1], block, shared }, rows.args());
        let text = result.err().map(|e| e.to_string()).unwrap_or_default();
        check(text.contains("rms_norm") && text.contains(word), || {
            format!("block {block:?}, {shared} bytes: expected a refusal with `{word}`, found `{text}`")
        })?;
    }
    check(rows.y.read()?.iter().all(|v| v.is_nan()), || "a refused launch wrote".into())
}

fn much_shared(device: &Device) -> Outcome {
    let rows = Rows::new(device, 3)?;
    rows.norm(device)?;
    let want = bits(&rows.y.read()?);
    // The kernel's static array; dynamic shared memory begins behind it at a multiple of 1,024 bytes.
    let fixed = (kernel::THREADS / 32 * 4).next_multiple_of(1024);
    for shared in [48 * 1024 - fixed, 48 * 1024 + 16, device.info().max_shared - fixed, 16] {
        rows.y.fill(0xFF)?;
        let dims = Dims { grid: [ROWS as u32, 1, 1], block: [kernel::THREADS, 1, 1], shared };
        device.launch(&kernel::RMS_NORM, dims, rows.args())?;
        equal(&format!("{shared} bytes"), &bits(&rows.y.read()?), &want)?;
    }
    Ok(())
}

fn graph_equals_eager(device: &Device) -> Outcome {
    let rows = Rows::new(device, 4)?;
    let (mid, out) = (device.alloc::<f32>(ROWS * WIDTH)?, device.alloc::<f32>(ROWS * WIDTH)?);
    let chain = || {
        rows.norm_of(device, &rows.x, &mid)?;
        rows.norm_of(device, &mid, &out)
    };
    out.fill(0xFF)?;
    let graph = device.capture(chain)?;
    check(out.read()?.iter().all(|v| v.is_nan()), || "capturing ran the launches".into())?;
    let mut random = Random::new(5);
    for round in 0..4 {
        if round > 0 {
            rows.x.write(0, &random.floats(ROWS * WIDTH))?;
        }
        out.fill(0xFF)?;
        mid.fill(0xFF)?;
        device.replay(&graph)?;
        let replayed = bits(&out.read()?);
        out.fill(0xFF)?;
        chain()?;
        equal(&format!("round {round}"), &replayed, &bits(&out.read()?))?;
    }
    let empty = device.capture(|| Ok(()))?;
    device.replay(&empty)?;
    Ok(device.synchronize()?)
}

fn capture_refuses(device: &Device) -> Outcome {
    let rows = Rows::new(device, 6)?;
    let extra: Buffer<u32> = device.zeros(4)?;
    let graph = device.capture(|| {
        rows.norm(device)?;
        for (what, result) in [
            ("alloc", device.alloc::<f32>(4).map(drop)),
            ("fill", rows.y.fill(0)),
            ("write", rows.y.write(0, &[0.0])),
            ("read", rows.y.read().map(drop)),
            ("synchronize", device.synchronize()),
            ("capture", device.capture(|| Ok(())).map(drop)),
        ] {
            let text = result.err().map(|e| e.to_string()).unwrap_or_default();
            if !text.ends_with("while a graph is captured") {
                return Err(DeviceError::Unsupported(format!("{what} in a capture: found `{text}`")));
            }
        }
        // A buffer that goes away during a capture does not spoil it.
        drop(extra);
        rows.norm(device)
    })?;
    device.replay(&graph)?;
    let replayed = bits(&rows.y.read()?);
    rows.norm(device)?;
    equal("replayed", &replayed, &bits(&rows.y.read()?))
}

fn capture_fails(device: &Device) -> Outcome {
    let rows = Rows::new(device, 7)?;
    let result = device.capture(|| {
        rows.norm(device)?;
        Err(DeviceError::Unsupported("no more".into()))
    });
    let text = result.err().map(|e| e.to_string()).unwrap_or_default();
    check(text == "no more", || format!("expected the queue's error, found `{text}`"))?;
    check(rows.y.read()?.iter().all(|v| v.is_nan()), || "a failed capture ran".into())?;
    rows.norm(device)?;
    check(rows.y.read()?.iter().all(|v| v.is_finite()), || "the device does not launch after a failed capture".into())
}

fn events(device: &Device) -> Outcome {
    let rows = Rows::new(device, 8)?;
    let first = device.record()?;
    rows.norm(device)?;
    let second = device.record()?;
    (0..4).try_for_each(|_| rows.norm(device))?;
    let third = device.record()?;
    let near = device.elapsed_us(&first, &second)?;
    let far = device.elapsed_us(&first, &third)?;
    let rest = device.elapsed_us(&second, &third)?;
    check(near >= 0.0 && rest >= 0.0 && far >= near, || format!("{near} and {rest} within {far} microseconds"))?;
    // The clock's steps are half a microsecond.
    check((near + rest - far).abs() <= 2.0, || format!("{near} + {rest} is not {far} microseconds"))
}

fn several_threads(device: &Device) -> Outcome {
    let want: Vec<_> = (0..4)
        .map(|seed| {
            let rows = Rows::new(device, seed)?;
            rows.norm(device)?;
            rows.y.read()
        })
        .collect::<Result<_, _>>()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|seed| {
                scope.spawn(move || {
                    let rows = Rows::new(device, seed)?;
                    // Two of them capture, all at once: a capture takes its own thread's launches and no others.
                    match seed % 2 {
                        0 => rows.norm(device)?,
                        _ => device.replay(&device.capture(|| rows.norm(device))?)?,
                    }
                    rows.y.read()
                })
            })
            .collect();
        for (thread, want) in threads.into_iter().zip(&want) {
            let got = thread.join().map_err(|_| "a thread panicked")??;
            equal("a thread's rows", &bits(&got), &bits(want))?;
        }
        Ok(())
    })
}

fn info(device: &Device) -> Outcome {
    let info = device.info();
    let fine = info.multiprocessors > 0 && info.max_shared >= 48 * 1024 && !info.name.is_empty();
    check(fine, || format!("{info:?}"))?;
    let gpu = info.device.starts_with("cuda:") && info.ptx.is_some() && info.memory.is_some_and(|m| m > 1 << 30);
    check(if device.is_cuda() { gpu } else { info.device == "cpu" && info.ptx.is_none() }, || format!("{info:?}"))
}

fn other_device(device: &Device) -> Outcome {
    let cpu = Device::cpu(Mode::Fast);
    let (theirs, ours) = (cpu.capture(|| Ok(()))?, device.capture(|| Ok(()))?);
    for result in [device.replay(&theirs), cpu.replay(&ours)] {
        check(matches!(result, Err(DeviceError::Unsupported(_))), || format!("another device's graph: {result:?}"))?;
    }
    let result = device.elapsed_us(&device.record()?, &cpu.record()?);
    check(matches!(result, Err(DeviceError::Unsupported(_))), || format!("another device's event: {result:?}"))
}

fn missing_kernel(device: &Device) -> Outcome {
    let rows = Rows::new(device, 9)?;
    let ghost = cuda_std::Kernel::<RmsNormArgs>::new("not_a_kernel", |_| ());
    let result = device.launch(&ghost, Dims { grid: [1, 1, 1], block: [32, 1, 1], shared: 0 }, rows.args());
    let text = result.err().map(|e| e.to_string()).unwrap_or_default();
    let target = device.info().ptx.unwrap_or_default();
    check(text.contains("`not_a_kernel`") && text.contains(&target), || format!("found `{text}`"))
}

/// In a process of its own: reads an address that is nobody's, and looks at what every later call says.
fn fault(device: &Device) -> Outcome {
    if std::env::var_os(PLANT).is_none() {
        let mut command = Command::new(std::env::current_exe()?);
        // All of the cases there, of which it is one.
        let output =
            command.args(["--exact", &format!("cuda::{FAULT}")]).env(PLANT, "1").env_remove("KDTREE_PART").output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        return check(output.status.success() && text.contains("1 passed"), || text);
    }
    let rows = Rows::new(device, 10)?;
    let args = RmsNormArgs { x: Global::from_raw(64, WIDTH), ..rows.args() };
    let dims = Dims { grid: [1, 1, 1], block: [kernel::THREADS, 1, 1], shared: 0 };
    let launched = device.launch(&kernel::RMS_NORM, dims, args);
    let first = launched.and_then(|()| device.synchronize()).err().map(|e| e.to_string()).unwrap_or_default();
    check(first.contains("illegal") && first.contains("(CUDA error 700)"), || format!("found `{first}`"))?;
    for result in [
        device.synchronize(),
        rows.norm(device),
        rows.y.read().map(drop),
        rows.x.write(0, &[1.0]),
        device.alloc::<u8>(1).map(drop),
        device.record().map(drop),
        device.capture(|| Ok(())).map(drop),
    ] {
        let text = result.err().map(|e| e.to_string()).unwrap_or_default();
        check(text == first, || format!("expected `{first}` again, found `{text}`"))?;
    }
    Ok(())
}

fn no_driver() -> Outcome {
    let text = match Device::cuda(0, None) {
        Err(error @ DeviceError::NoDevice(_)) => error.to_string(),
        Err(error) => return Err(format!("expected no device, found `{error}`").into()),
        Ok(_) => return Err("a device without a driver".into()),
    };
    check(text.starts_with("no CUDA device: no NVIDIA driver here (libcuda.so.1"), || text.clone())?;
    let report = cuda_report();
    check(report.problem.as_ref() == Some(&text) && !report.broken, || format!("{report:?}"))
}
