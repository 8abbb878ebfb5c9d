#![allow(dead_code, unused_imports, reason = "shared by the test programs; none uses all of it")]
//! Devices, inputs and comparisons for the kernel tests.

pub mod bundle;
pub mod checkpoint;

use std::process::ExitCode;
use std::sync::OnceLock;

use kdtree::device::{Device, DeviceError, Mode};
pub use kdtree::selfcheck::Random;
use libtest_mimic::{Arguments, Failed, Trial};

pub use bundle::root;

/// What a case returns: `Ok`, or text that says what differs.
pub type Outcome = Result<(), Failed>;

/// The named cases of the test program.
pub struct Suite {
    trials: Vec<Trial>,
}

impl Suite {
    pub fn new() -> Self {
        Self { trials: Vec::new() }
    }

    /// A case for both devices. Keep it small enough for the CPU: some 1e8 multiply-adds at most.
    pub fn both(&mut self, name: impl Into<String>, case: impl Fn(&Device) -> Outcome + Send + Sync + Clone + 'static) {
        let name = name.into();
        let on_cpu = case.clone();
        let cpu = move || on_cpu(&cpu(Mode::Checked { seed: 1 }));
        self.trials.push(Trial::test(format!("cpu::{name}"), cpu));
        self.cuda(name, case);
    }

    /// A case of the CPU device alone: faults, which would end a GPU's context.
    pub fn cpu(&mut self, name: impl Into<String>, case: impl Fn(&Device) -> Outcome + Send + 'static) {
        let run = move || case(&cpu(Mode::Checked { seed: 1 }));
        self.trials.push(Trial::test(format!("cpu::{}", name.into()), run));
    }

    /// A case of the whole model: the CPU device in fast mode, and a GPU.
    pub fn model(
        &mut self,
        name: impl Into<String>,
        case: impl Fn(&Device) -> Outcome + Send + Sync + Clone + 'static,
    ) {
        let name = name.into();
        let on_cpu = case.clone();
        self.trials.push(Trial::test(format!("cpu::{name}"), move || on_cpu(&cpu(Mode::Fast))));
        self.cuda(name, case);
    }

    /// A case that only a GPU runs: full sizes.
    pub fn cuda(&mut self, name: impl Into<String>, case: impl Fn(&Device) -> Outcome + Send + 'static) {
        let absent = cuda().is_err();
        let required = std::env::var_os("KDTREE_REQUIRE_GPU").is_some_and(|v| v == "1");
        let run = move || match cuda() {
            Ok(device) => case(device),
            Err(why) => Err(why.into()),
        };
        self.trials.push(Trial::test(format!("cuda::{}", name.into()), run).with_ignored_flag(absent && !required));
    }

    /// A case of the host alone, reported as ignored where it has nothing to test.
    pub fn host(&mut self, name: impl Into<String>, ignored: bool, case: impl FnOnce() -> Outcome + Send + 'static) {
        self.trials.push(Trial::test(format!("host::{}", name.into()), case).with_ignored_flag(ignored));
    }

    pub fn run(mut self) -> ExitCode {
        let mut args = Arguments::from_args();
        if let Some((part, parts)) = part() {
            let named = |trial: &Trial| args.filter.as_ref().is_none_or(|filter| trial.name().contains(filter));
            self.trials.retain(named);
            assert!(self.trials.len() >= parts, "KDTREE_PART: {parts} parts of {} cases", self.trials.len());
            let mut turns = (1..=parts).cycle();
            self.trials.retain(|_| turns.next() == Some(part));
        }
        if cuda().is_ok() && args.test_threads.is_none() {
            args.test_threads = Some(1);
        }
        libtest_mimic::run(&args, self.trials).exit_code()
    }
}

/// Which cases a process runs: with `KDTREE_PART=2/15` the second of fifteen parts of those that the filter names. One
/// GPU and many cores take that many processes at once, each with a context of its own.
fn part() -> Option<(usize, usize)> {
    let text = std::env::var_os("KDTREE_PART")?;
    let numbers = text.to_str().and_then(|text| text.split_once('/'));
    let numbers = numbers.and_then(|(part, parts)| Some((part.parse().ok()?, parts.parse().ok()?)));
    let found = numbers.filter(|(part, parts)| (1..=*parts).contains(part));
    assert!(found.is_some(), "KDTREE_PART: expected a part of so many as in 2/15, found {text:?}");
    found
}

/// Bytes of shared memory that a block may have: `KDTREE_SHARED`, to run on a large card what a small one takes.
fn shared() -> u32 {
    match std::env::var("KDTREE_SHARED") {
        Ok(bytes) => bytes.parse().expect("KDTREE_SHARED is a number of bytes"),
        Err(_) => u32::MAX,
    }
}

fn cpu(mode: Mode) -> Device {
    Device::cpu_within(mode, shared())
}

/// GPU 0 with the kernels of `KDTREE_PTX` (`sm_80`), or the best ones.
fn cuda() -> Result<&'static Device, String> {
    static DEVICE: OnceLock<Result<Device, String>> = OnceLock::new();
    let open = || {
        let ptx = std::env::var("KDTREE_PTX").ok();
        match Device::cuda_within(0, ptx.as_deref(), shared()) {
            Ok(device) => Ok(device),
            Err(DeviceError::NoDevice(why)) => Err(why),
            Err(broken) => Err(format!("the GPU is there but broken: {broken}")),
        }
    };
    DEVICE.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// `|got - want| / |want|` at most `limit`, with NaN and infinities in the same places.
pub fn close(what: &str, got: &[f32], want: &[f64], limit: f64) -> Outcome {
    if got.len() != want.len() {
        return Err(format!("{what}: {} values, expected {}", got.len(), want.len()).into());
    }
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let g = f64::from(g);
        if !w.is_finite() || !g.is_finite() {
            if g == w || (g.is_nan() && w.is_nan()) {
                continue;
            }
            return Err(format!("{what}: value {i} is {g}, expected {w}").into());
        }
        error += (g - w) * (g - w);
        norm += w * w;
    }
    let relative = if norm > 0.0 { (error / norm).sqrt() } else { error.sqrt() };
    match relative <= limit {
        true => Ok(()),
        false => {
            let worst = (0..got.len()).max_by(|&a, &b| {
                let d = |i: usize| (f64::from(got[i]) - want[i]).abs();
                d(a).total_cmp(&d(b))
            });
            let at = worst.map_or(String::new(), |i| format!("; worst at {i}: {} for {}", got[i], want[i]));
            Err(format!("{what}: relative error {relative:.2e}, at most {limit:.0e} expected{at}").into())
        }
    }
}

/// Equal values, or the first difference.
pub fn equal<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], want: &[T]) -> Outcome {
    if got.len() != want.len() {
        return Err(format!("{what}: {} values, expected {}", got.len(), want.len()).into());
    }
    match (0..got.len()).find(|&i| got[i] != want[i]) {
        None => Ok(()),
        Some(i) => Err(format!("{what}: value {i} is {:?}, expected {:?}", got[i], want[i]).into()),
    }
}

/// Fails with `what` unless `holds`.
pub fn check(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what().into()) }
}
