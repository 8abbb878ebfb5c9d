//! A GPU with its context, kernels and streams, and the words for its errors.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::mem::ManuallyDrop;
use std::sync::{Mutex, OnceLock};

use cust::CudaFlags;
use cust::context::{Context, CurrentContext};
use cust::error::CudaResult;
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use cust::sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute};

use super::lock;
use crate::device::libcuda::{self, Absent};
use crate::device::{DeviceError, Dims, Result, ptx};

/// The oldest CUDA version whose driver has all that is called here (graphs with flags, PTX 7.4).
const MIN_DRIVER: (i32, i32) = (11, 4);

/// The oldest CUDA version whose driver records overlapping launches in a graph.
const MIN_OVERLAP: (i32, i32) = (12, 4);

/// Dynamic and static shared memory that a function may use without asking.
const DEFAULT_SHARED: u32 = 48 * 1024;

/// Bytes for the messages of the driver's PTX compiler.
const LOG: usize = 16 * 1024;

/// A driver call's failure, with the code as the driver gave it.
fn failure(call: &'static str, code: i32) -> DeviceError {
    let code = if code == libcuda::UNKNOWN { libcuda::last_code() } else { code };
    DeviceError::Driver { call, code, text: libcuda::error_text(code) }
}

/// The result of a call through cust.
pub(super) fn cust_call<T>(call: &'static str, result: CudaResult<T>) -> Result<T> {
    result.map_err(|error| failure(call, error as i32))
}

/// The result of a bare call.
pub(super) fn sys_call(call: &'static str, code: sys::CUresult) -> Result<()> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(failure(call, error as i32)),
    }
}

/// Errors that a kernel's fault leaves behind: the context answers nothing else from then on.
fn is_fault(code: i32) -> bool {
    const ECC: i32 = 214;
    const NVLINK: i32 = 220;
    const ILLEGAL_ADDRESS: i32 = 700;
    const LAUNCH_TIMEOUT: i32 = 702;
    const ASSERT: i32 = 710;
    const HARDWARE_STACK: i32 = 714;
    const LAUNCH_FAILED: i32 = 719;
    matches!(code, ECC | NVLINK | ILLEGAL_ADDRESS | LAUNCH_TIMEOUT | ASSERT | HARDWARE_STACK..=LAUNCH_FAILED)
}

/// A failed `cuLaunchKernel`, named by its kernel.
pub(super) fn of_launch(error: DeviceError, kernel: &'static str, dims: Dims) -> DeviceError {
    match error {
        DeviceError::Driver { code, text, .. } => DeviceError::Launch { kernel, dims, code, text },
        other => other,
    }
}

/// A fault shows at some later call; the first one says so.
fn explain(error: DeviceError) -> DeviceError {
    const TELL: &str = "CUDA_LAUNCH_BLOCKING=1 tells which";
    match error {
        DeviceError::Driver { call, code, text } => {
            DeviceError::Driver { call, code, text: format!("{text}, in a kernel queued before ({TELL})") }
        }
        DeviceError::Launch { kernel, dims, code, text } => {
            let text = format!("{text}, in this kernel or one queued before ({TELL})");
            DeviceError::Launch { kernel, dims, code, text }
        }
        other => other,
    }
}

/// The CUDA version of the driver, initialised; or why there is none.
pub(super) fn driver() -> Result<(i32, i32)> {
    const STUB_LIBRARY: i32 = 34;
    const NO_DEVICE: i32 = 100;
    libcuda::load().map_err(|absent| match absent {
        Absent::Missing(why) => DeviceError::NoDevice(format!("no NVIDIA driver here ({why})")),
        Absent::Broken(text) => DeviceError::Driver { call: "loading libcuda.so.1", code: libcuda::UNKNOWN, text },
        Absent::TooOld(why) => DeviceError::NoDevice(too_old(&why)),
    })?;
    let mut version = 0;
    // SAFETY: `version` holds one number.
    sys_call("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) })?;
    let version = (version / 1000, version % 1000 / 10);
    if version < MIN_DRIVER {
        return Err(DeviceError::NoDevice(too_old(&format!("it is of CUDA {}.{}", version.0, version.1))));
    }
    match cust_call("cuInit", cust::init(CudaFlags::empty())) {
        Ok(()) => Ok(version),
        Err(DeviceError::Driver { code: STUB_LIBRARY | NO_DEVICE, text, .. }) => {
            Err(DeviceError::NoDevice(format!("the driver finds no GPU ({text})")))
        }
        Err(error) => Err(error),
    }
}

fn too_old(why: &str) -> String {
    let (major, minor) = MIN_DRIVER;
    format!("the NVIDIA driver is too old: {why}; CUDA {major}.{minor} or later is needed")
}

/// Number of GPUs that the driver shows.
pub(super) fn count() -> Result<u32> {
    cust_call("cuDeviceGetCount", cust::device::Device::num_devices())
}

/// What a GPU is.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub ordinal: u32,
    pub name: String,
    pub capability: (u32, u32),
    pub memory: u64,
    pub multiprocessors: u32,
    /// Bytes of the L2 cache.
    pub l2: u32,
    pub max_shared: u32,
    device: cust::device::Device,
}

impl Facts {
    pub fn of(ordinal: u32) -> Result<Self> {
        let count = count()?;
        if ordinal >= count {
            let has = match count {
                0 => "no GPU".into(),
                1 => "cuda:0 alone".into(),
                n => format!("cuda:0 to cuda:{}", n - 1),
            };
            return Err(DeviceError::NoDevice(format!("no cuda:{ordinal}: the driver shows {has}")));
        }
        let device = cust_call("cuDeviceGet", cust::device::Device::get_device(ordinal))?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: `value` holds one number; the device is one that the driver gave.
            sys_call("cuDeviceGetAttribute", unsafe {
                sys::cuDeviceGetAttribute(&mut value, attribute, device.as_raw())
            })?;
            Ok::<_, DeviceError>(value as u32)
        };
        Ok(Self {
            ordinal,
            name: cust_call("cuDeviceGetName", device.name())?,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            memory: cust_call("cuDeviceTotalMem", device.total_memory())? as u64,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            l2: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            max_shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            device,
        })
    }
}

struct Function {
    raw: sys::CUfunction,
    /// Static shared memory, bytes.
    fixed: u32,
    /// Dynamic shared memory that a launch may ask for now.
    granted: u32,
}

// SAFETY: a handle that the driver takes from any thread; it lives as long as the module.
unsafe impl Send for Function {}

/// A GPU's context with all that lives in it.
pub(super) struct Card {
    pub facts: Facts,
    /// The target of the loaded PTX.
    pub target: &'static str,
    /// Whether a launch can start before the one before it has ended: its kernels and the driver must have that.
    pub overlaps: bool,
    /// Every launch, copy and fill, in order.
    pub stream: ManuallyDrop<Stream>,
    /// Where graphs are recorded; nothing runs on it.
    recorder: ManuallyDrop<Stream>,
    /// What goes beside the launches of each of them.
    beside: ManuallyDrop<Stream>,
    recorder_beside: ManuallyDrop<Stream>,
    functions: Mutex<HashMap<&'static str, Function>>,
    module: ManuallyDrop<Module>,
    fault: OnceLock<DeviceError>,
    /// Last: what goes before needs it.
    context: Context,
}

impl Card {
    /// `shared`: no block gets more bytes of shared memory.
    pub fn open(ordinal: u32, forced: Option<&str>, shared: u32) -> Result<Self> {
        let version = driver()?;
        let mut facts = Facts::of(ordinal)?;
        facts.max_shared = facts.max_shared.min(shared);
        let candidates = ptx::candidates(ptx::PTX, &facts.name, facts.capability, forced)?;
        let context = cust_call("cuDevicePrimaryCtxRetain", Context::new(facts.device))?;
        cust_call("cuCtxSetCurrent", CurrentContext::set_current(&context))?;
        let (target, module) = load_best(&candidates, version)?;
        let stream = || cust_call("cuStreamCreate", Stream::new(StreamFlags::DEFAULT, None));
        Ok(Self {
            facts,
            target,
            overlaps: target != "sm_80" && version >= MIN_OVERLAP && libcuda::has_launch_ex(),
            stream: ManuallyDrop::new(stream()?),
            recorder: ManuallyDrop::new(stream()?),
            beside: ManuallyDrop::new(stream()?),
            recorder_beside: ManuallyDrop::new(stream()?),
            functions: Mutex::default(),
            module: ManuallyDrop::new(module),
            fault: OnceLock::new(),
            context,
        })
    }

    /// Makes the context current on this thread and calls the driver, unless a kernel has faulted.
    pub fn call<T>(&self, call: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        if let Some(fault) = self.fault.get() {
            return Err(fault.clone());
        }
        let result = cust_call("cuCtxSetCurrent", CurrentContext::set_current(&self.context)).and_then(|()| call(self));
        match result {
            Err(error @ (DeviceError::Driver { code, .. } | DeviceError::Launch { code, .. })) if is_fault(code) => {
                Err(self.fault.get_or_init(|| explain(error)).clone())
            }
            other => other,
        }
    }

    pub fn stream(&self) -> sys::CUstream {
        self.stream.as_inner()
    }

    pub fn recorder(&self) -> sys::CUstream {
        self.recorder.as_inner()
    }

    /// The ordinary stream, and what goes beside it.
    pub fn streams(&self) -> [&Stream; 2] {
        [&self.stream, &self.beside]
    }

    /// The same of recordings.
    pub fn recorders(&self) -> [&Stream; 2] {
        [&self.recorder, &self.recorder_beside]
    }

    pub fn synchronize(&self) -> Result<()> {
        cust_call("cuStreamSynchronize", self.stream.synchronize())
    }

    /// The kernel's handle, allowed to use `shared` bytes of dynamic shared memory.
    pub fn function(&self, kernel: &'static str, shared: u32) -> Result<sys::CUfunction> {
        let mut functions = lock(&self.functions);
        let function = match functions.get_mut(kernel) {
            Some(function) => function,
            None => functions.entry(kernel).or_insert(self.look_up(kernel)?),
        };
        if shared > function.granted {
            let most = self.facts.max_shared.saturating_sub(function.fixed);
            if shared > most {
                let what = format!(
                    "{shared} bytes of dynamic shared memory; at most {most} are possible on {}",
                    self.facts.name
                );
                return Err(DeviceError::Contract { kernel, what });
            }
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of the loaded module.
            sys_call("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function.raw, attribute, most as i32) })?;
            function.granted = most;
        }
        Ok(function.raw)
    }

    fn look_up(&self, kernel: &'static str) -> Result<Function> {
        const NOT_FOUND: i32 = 500;
        let raw = match cust_call("cuModuleGetFunction", self.module.get_function(kernel)) {
            Ok(function) => function.to_raw(),
            Err(DeviceError::Driver { code: NOT_FOUND, .. }) => {
                let text = format!("there is no `{kernel}` among them");
                return Err(DeviceError::Ptx { target: self.target.into(), text });
            }
            Err(error) => return Err(error),
        };
        let mut fixed = 0;
        let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: `fixed` holds one number; the function was just found.
        sys_call("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut fixed, attribute, raw) })?;
        let fixed = fixed as u32;
        Ok(Function { raw, fixed, granted: DEFAULT_SHARED.saturating_sub(fixed) })
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let _ = self.call(Self::synchronize);
        // SAFETY: each is dropped once, here, while the context is current and alive.
        unsafe {
            ManuallyDrop::drop(&mut self.module);
            ManuallyDrop::drop(&mut self.stream);
            ManuallyDrop::drop(&mut self.recorder);
            ManuallyDrop::drop(&mut self.beside);
            ManuallyDrop::drop(&mut self.recorder_beside);
        }
    }
}

/// Loads the first target that the driver does not call too new for itself.
fn load_best(candidates: &[(&'static str, &'static [u8])], version: (i32, i32)) -> Result<(&'static str, Module)> {
    let mut refused = Vec::new();
    for &(target, packed) in candidates {
        match load(target, &ptx::unpack(target, packed)?)? {
            Ok(module) => return Ok((target, module)),
            Err(why) => refused.push(format!("{target}: {why}")),
        }
    }
    let (major, minor) = version;
    let why = format!("the NVIDIA driver (CUDA {major}.{minor}) is too old for the kernels: {}", refused.join("; "));
    Err(DeviceError::NoDevice(why))
}

/// Compiles and loads PTX. The inner error says why the driver is too old for it.
fn load(target: &str, text: &CStr) -> Result<std::result::Result<Module, String>> {
    const OUT_OF_MEMORY: i32 = 2;
    let broken = |text| DeviceError::Ptx { target: target.into(), text };
    let (code, words) = match cust_call("cuModuleLoadDataEx", Module::from_ptx_cstr(text, &[])) {
        Ok(module) => return Ok(Ok(module)),
        Err(error @ DeviceError::Driver { code: OUT_OF_MEMORY, .. }) => return Err(error),
        Err(DeviceError::Driver { code, text, .. }) if is_fault(code) => return Err(failure_of(code, text)),
        Err(DeviceError::Driver { code, text, .. }) => (code, text),
        Err(other) => return Err(other),
    };
    let log = log_of_load(text);
    let all = if log.is_empty() { words } else { format!("{words}\n{log}") };
    match ptx::driver_too_old(code, &log) {
        true => Ok(Err(all.replace('\n', ": "))),
        false => Err(broken(format!("{all} (CUDA error {code})"))),
    }
}

fn failure_of(code: i32, text: String) -> DeviceError {
    DeviceError::Driver { call: "cuModuleLoadDataEx", code, text }
}

/// Loads once more for the compiler's messages alone: cust has no place for them.
fn log_of_load(text: &CStr) -> String {
    use sys::CUjit_option as Option;
    let mut log = vec![0u8; LOG];
    let mut module = std::ptr::null_mut();
    let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG as *mut c_void];
    let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: two options with their values; the buffer has the size named.
    let code = unsafe { sys::cuModuleLoadDataEx(&mut module, text.as_ptr().cast(), 2, options, values) };
    if code == sys::CUresult::CUDA_SUCCESS {
        // SAFETY: just loaded; nothing uses it.
        unsafe { sys::cuModuleUnload(module) };
    }
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(LOG);
    String::from_utf8_lossy(&log[..end]).trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_call_says_which_and_why() {
        let error = sys_call("cuMemFree", sys::CUresult::CUDA_ERROR_NOT_INITIALIZED).unwrap_err().to_string();
        assert!(error.starts_with("cuMemFree failed: ") && error.ends_with(" (CUDA error 3)"), "{error}");
        assert!(sys_call("cuMemFree", sys::CUresult::CUDA_SUCCESS).is_ok());
    }

    #[test]
    fn a_fault_says_that_an_earlier_kernel_may_be_meant() {
        let driver = || DeviceError::Driver { call: "cuStreamSynchronize", code: 700, text: "illegal access".into() };
        let text = explain(driver()).to_string();
        assert!(text.contains("illegal access, in a kernel queued before (CUDA_LAUNCH_BLOCKING"), "{text}");
        let dims = Dims { grid: [3, 1, 1], block: [256, 1, 1], shared: 64 };
        let launch = explain(of_launch(driver(), "argmax", dims)).to_string();
        let start = "launch of `argmax` (grid 3x1x1, block 256x1x1, 64 bytes of shared memory) failed: illegal access";
        assert!(launch.starts_with(start) && launch.ends_with("(CUDA error 700)"), "{launch}");
    }

    #[test]
    fn faults_are_told_from_refusals() {
        assert!([700, 715, 716, 719].into_iter().all(is_fault));
        assert!(![1, 2, 400, 500, 701, 720, 900, 999].into_iter().any(is_fault));
    }

    #[test]
    fn an_old_driver_is_named_with_what_is_needed() {
        let text = too_old("it is of CUDA 10.2");
        assert_eq!(text, "the NVIDIA driver is too old: it is of CUDA 10.2; CUDA 11.4 or later is needed");
    }
}
