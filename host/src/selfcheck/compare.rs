//! What a check is given, and how what came out is compared.

use std::cell::Cell;
use std::fmt::Debug;

use cuda_std::bf16;

use crate::device::{self, Device, DeviceError};

/// The distance from the twin, or why it is too far.
pub type Found = Result<f64, Failed>;

/// A check that did not pass.
pub struct Failed {
    pub error: Option<f64>,
    pub why: String,
}

impl Failed {
    fn new(why: String) -> Self {
        Self { error: None, why }
    }
}

impl From<DeviceError> for Failed {
    fn from(error: DeviceError) -> Self {
        Self::new(error.to_string())
    }
}

/// A device and a clock.
pub struct Probe<'a> {
    pub device: &'a Device,
    us: Cell<Option<f64>>,
}

impl<'a> Probe<'a> {
    pub fn new(device: &'a Device) -> Self {
        Self { device, us: Cell::new(None) }
    }

    /// Makes the launch that the check is about, and keeps its time.
    pub fn launch<T>(&self, queue: impl FnOnce() -> device::Result<T>) -> device::Result<T> {
        self.us.set(None);
        let start = self.device.record()?;
        let value = queue()?;
        let end = self.device.record()?;
        self.us.set(Some(self.device.elapsed_us(&start, &end)?));
        Ok(value)
    }

    /// Microseconds of the last launch.
    pub fn us(&self) -> Option<f64> {
        self.us.get()
    }
}

fn same_length(what: &str, got: usize, want: usize) -> Result<(), Failed> {
    if got == want { Ok(()) } else { Err(Failed::new(format!("{what}: {got} values, expected {want}"))) }
}

/// `|got - want| / |want|` at most `limit`, every value finite.
pub fn close(what: &str, got: &[f32], want: &[f64], limit: f64) -> Found {
    same_length(what, got.len(), want.len())?;
    let (mut distance, mut norm) = (0.0, 0.0);
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        if !g.is_finite() {
            return Err(Failed::new(format!("{what}: value {i} is {g}, expected {w}")));
        }
        distance += (f64::from(g) - w).powi(2);
        norm += w * w;
    }
    let error = if norm > 0.0 { (distance / norm).sqrt() } else { distance.sqrt() };
    if error <= limit {
        return Ok(error);
    }
    Err(Failed { error: Some(error), why: format!("{what}: relative error {error:.1e}, at most {limit:.0e} expected") })
}

/// As [`close`], for values that were rounded to bf16.
pub fn close_bf16(what: &str, got: &[bf16], want: &[f64], limit: f64) -> Found {
    let got: Vec<_> = got.iter().map(|v| v.to_f32()).collect();
    close(what, &got, want, limit)
}

/// Each value at most `limit` of its `size` from what is wanted.
pub fn near(got: &[f32], want: &[f64], size: &[f64], limit: f64) -> Found {
    same_length("y", got.len(), want.len())?;
    let mut largest: f64 = 0.0;
    for (i, (&g, (&w, &size))) in got.iter().zip(want.iter().zip(size)).enumerate() {
        let off = (f64::from(g) - w).abs();
        let error = if off == 0.0 { 0.0 } else { off / size };
        if error.is_nan() || error > limit {
            let why =
                format!("value {i} is {g:e}, expected {w:e}: {error:.1e} of its terms, at most {limit:.0e} expected");
            return Err(Failed { error: error.is_finite().then_some(error), why });
        }
        largest = largest.max(error);
    }
    Ok(largest)
}

/// Equal values; the distance is then 0.
pub fn equal<T: PartialEq + Debug>(what: &str, got: &[T], want: &[T]) -> Found {
    same_length(what, got.len(), want.len())?;
    match (0..got.len()).find(|&i| got[i] != want[i]) {
        None => Ok(0.0),
        Some(i) => Err(Failed::new(format!("{what}: value {i} is {:?}, expected {:?}", got[i], want[i]))),
    }
}

/// The bf16 output of a kernel is its f32 output rounded once.
pub fn rounded(f32: &[f32], bf16: &[bf16]) -> Found {
    let want: Vec<_> = f32.iter().map(|&v| bf16::from_f32(v)).collect();
    equal("the bf16 output", bf16, &want)
}
