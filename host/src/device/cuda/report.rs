//! What `doctor` says about the driver and its GPUs.

use super::CudaDevice;
use super::card::{Facts, count, driver};
use crate::device::{DeviceError, Result, libcuda, ptx};

/// The driver, and each GPU that it shows.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CudaReport {
    /// File of the driver's library; none if there is no driver.
    pub library: Option<String>,
    /// CUDA version of the driver, `13.0`.
    pub driver: Option<String>,
    /// Why no GPU can be used at all.
    pub problem: Option<String>,
    /// Whether `problem` is a driver that is there but broken.
    pub broken: bool,
    /// Targets of the PTX in this build.
    pub kernels: Vec<&'static str>,
    pub cards: Vec<CudaCard>,
}

/// One GPU.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CudaCard {
    /// `cuda:N`.
    pub device: String,
    pub name: String,
    /// Compute capability, `9.0`.
    pub capability: String,
    /// Bytes of device memory.
    pub memory: u64,
    pub multiprocessors: u32,
    /// Largest shared memory of a block, bytes.
    pub max_shared: u32,
    /// The target that was loaded on it.
    pub ptx: Option<&'static str>,
    /// Why none was.
    pub problem: Option<String>,
}

/// Looks at the driver and loads the kernels on each GPU.
pub fn cuda_report() -> CudaReport {
    let mut report = CudaReport {
        library: None,
        driver: None,
        problem: None,
        broken: false,
        kernels: ptx::PTX.iter().map(|p| p.0).collect(),
        cards: Vec::new(),
    };
    if let Err(error) = look(&mut report) {
        report.broken = !matches!(error, DeviceError::NoDevice(_));
        report.problem = Some(error.to_string());
    }
    report
}

fn look(report: &mut CudaReport) -> Result<()> {
    let driver = driver();
    report.library = libcuda::path();
    let (major, minor) = driver?;
    report.driver = Some(format!("{major}.{minor}"));
    for ordinal in 0..count()? {
        report.cards.push(card(Facts::of(ordinal)?));
    }
    Ok(())
}

fn card(facts: Facts) -> CudaCard {
    let opened = CudaDevice::open(facts.ordinal, None, u32::MAX);
    let (ptx, problem) = match opened {
        Ok(device) => (Some(device.card.target), None),
        Err(error) => (None, Some(error.to_string())),
    };
    CudaCard {
        device: format!("cuda:{}", facts.ordinal),
        name: facts.name,
        capability: format!("{}.{}", facts.capability.0, facts.capability.1),
        memory: facts.memory,
        multiprocessors: facts.multiprocessors,
        max_shared: facts.max_shared,
        ptx,
        problem,
    }
}
