//! The driver, found at run time.
//!
//! cust declares the driver's functions as symbols to link against. The link line gets an empty `libcuda.so`
//! (`host/link`), and this room defines the symbols: each forwards to its twin in `libcuda.so.1`. So the program builds
//! without CUDA and starts without a driver. Only the functions that this program reaches are here; the linker names
//! any other.
//!
//! cust's result type is a Rust enum of CUDA 11.4. A newer driver's code that it does not know would be undefined
//! behaviour: it is clamped to 999 on the way, and [`last_code`] keeps the true number.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use cust::sys::*;

const LIBRARY: &str = "libcuda.so.1";

/// Code of a call that did not reach a driver (`CUDA_ERROR_NOT_INITIALIZED`).
const NOT_INITIALIZED: i32 = 3;

/// `CUDA_ERROR_UNKNOWN`, what a code becomes that cust does not know.
pub(super) const UNKNOWN: i32 = 999;

/// The codes that cust's enum has, ascending.
const KNOWN: [i32; 87] = [
    0, 1, 2, 3, 4, 5, 6, 7, 8, 34, 100, 101, 102, 200, 201, 202, 205, 206, 207, 208, 209, 210, 211, 212, 213, 214, 215,
    216, 217, 218, 219, 220, 221, 222, 223, 224, 300, 301, 302, 303, 304, 400, 401, 500, 600, 700, 701, 702, 703, 704,
    705, 708, 709, 710, 711, 712, 713, 714, 715, 716, 717, 718, 719, 720, 800, 801, 802, 803, 804, 805, 806, 807, 808,
    809, 900, 901, 902, 903, 904, 905, 906, 907, 908, 909, 910, 911, 999,
];

thread_local! {
    static LAST: Cell<i32> = const { Cell::new(0) };
}

/// Keeps the true code and gives one that cust's enum has.
fn clamp(code: i32) -> i32 {
    LAST.set(code);
    if KNOWN.binary_search(&code).is_ok() { code } else { UNKNOWN }
}

/// The code that this thread's latest driver call gave, as the driver gave it.
pub(super) fn last_code() -> i32 {
    LAST.get()
}

/// Why there is no driver to call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Absent {
    /// No such library.
    Missing(String),
    /// The library is there and does not load.
    Broken(String),
    /// It loads, but lacks functions.
    TooOld(String),
}

macro_rules! driver {
    ($( fn $name:ident($($arg:ident: $type:ty),*); )*) => {
        /// Addresses in the driver's library; null until it is loaded.
        #[allow(non_upper_case_globals)]
        mod slots {
            use super::*;
            $( pub static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut()); )*
        }

        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
                let at = slots::$name.load(Ordering::Acquire);
                if at.is_null() {
                    return clamp(NOT_INITIALIZED);
                }
                // SAFETY: the driver's function of this name, with the arguments that CUDA's header gives it.
                let call = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> i32>(at) };
                // SAFETY: the caller's.
                clamp(unsafe { call($($arg),*) })
            }
        )*

        /// Fills the slots; gives the names that the library lacks.
        fn fill(library: &libloading::Library) -> Vec<&'static str> {
            let mut lacking = Vec::new();
            $( fill_one(library, stringify!($name), &slots::$name, &mut lacking); )*
            lacking
        }
    };
}

driver! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    fn cuCtxSetCurrent(context: CUcontext);
    fn cuModuleLoadDataEx(
        module: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut c_int, values: *mut *mut c_void
    );
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction);
    fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int);
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    fn cuGraphExecDestroy(exec: CUgraphExec);
    fn cuGraphDestroy(graph: CUgraph);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventSynchronize(event: CUevent);
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent);
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAllocHost_v2(address: *mut *mut c_void, bytes: usize);
    fn cuMemFreeHost(address: *mut c_void);
    fn cuMemsetD8Async(address: CUdeviceptr, byte: c_uchar, count: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    fn cuLaunchKernel(
        function: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint,
        stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void
    );
}

/// The driver's `cuLaunchKernelEx`, which only newer ones have.
static LAUNCH_EX: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// `CUlaunchAttribute` with the values that are used here, up to three integers; the driver's is a union of 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct LaunchAttribute {
    id: c_uint,
    pad: [u8; 4],
    value: [c_uint; 3],
    rest: [u8; 52],
}

impl LaunchAttribute {
    fn new(id: c_uint, value: [c_uint; 3]) -> Self {
        Self { id, pad: [0; 4], value, rest: [0; 52] }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: CUstream,
    attributes: *mut LaunchAttribute,
    count: c_uint,
}

/// Whether [`launch_ex`] can be called.
pub(super) fn has_launch_ex() -> bool {
    !LAUNCH_EX.load(Ordering::Acquire).is_null()
}

/// `cuLaunchKernelEx`, of a launch in clusters of `cluster` blocks along x, which with `overlap` may start before the
/// one before it has ended.
///
/// # Safety
/// As `cuLaunchKernel`, with `params` the kernel's one argument; with `overlap` the kernel waits before it touches what
/// the launch before it writes.
pub(super) unsafe fn launch_ex(
    function: CUfunction,
    (grid, block, shared): ([c_uint; 3], [c_uint; 3], c_uint),
    (overlap, cluster): (bool, c_uint),
    stream: CUstream,
    params: *mut *mut c_void,
) -> CUresult {
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`.
    const CLUSTER: c_uint = 4;
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
    const OVERLAP: c_uint = 6;
    type Launch = unsafe extern "C" fn(*const LaunchConfig, CUfunction, *mut *mut c_void, *mut *mut c_void) -> c_int;
    let at = LAUNCH_EX.load(Ordering::Acquire);
    if at.is_null() {
        return CUresult::CUDA_ERROR_NOT_INITIALIZED;
    }
    let mut attributes =
        [LaunchAttribute::new(OVERLAP, [overlap as c_uint, 0, 0]), LaunchAttribute::new(CLUSTER, [cluster, 1, 1])];
    let count = if cluster > 1 { 2 } else { 1 };
    let config = LaunchConfig { grid, block, shared, stream, attributes: attributes.as_mut_ptr(), count };
    // SAFETY: the driver's function of this name, with the arguments that CUDA's header gives it.
    let call = unsafe { std::mem::transmute::<*mut c_void, Launch>(at) };
    // SAFETY: the caller's; the configuration outlives the call.
    let code = clamp(unsafe { call(&config, function, params, std::ptr::null_mut()) });
    // SAFETY: `clamp` gives numbers of the enum alone.
    unsafe { std::mem::transmute::<i32, CUresult>(code) }
}

/// The driver's `cuGetErrorString`, outside the table: it must not disturb [`last_code`].
static ERROR_STRING: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// What cust's `Display` calls, which takes a failure for a reason to panic: always has a text.
// SAFETY: cust's `Display` passes a place for one pointer, and declares this signature.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
unsafe extern "C" fn cuGetErrorString(error: c_int, text: *mut *const c_char) -> i32 {
    let code = if error == UNKNOWN && last_code() != 0 { last_code() } else { error };
    let known = driver_string(code);
    // SAFETY: `text` is the caller's place for one pointer.
    unsafe { *text = known.unwrap_or(c"an error without a text").as_ptr() };
    0
}

/// The driver's own words for `code`.
fn driver_string(code: i32) -> Option<&'static CStr> {
    let at = ERROR_STRING.load(Ordering::Acquire);
    if at.is_null() {
        return None;
    }
    // SAFETY: the driver's `cuGetErrorString`; it takes any number.
    let call =
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int, *mut *const c_char) -> i32>(at) };
    let mut text = std::ptr::null();
    // SAFETY: `text` holds one pointer.
    let status = unsafe { call(code, &mut text) };
    // SAFETY: a static string of the driver.
    (status == 0 && !text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}

/// A sentence for `code`: the driver's, or one of those for codes that older drivers do not know.
pub(super) fn error_text(code: i32) -> String {
    let own = match code {
        NOT_INITIALIZED => "the driver has not been initialised",
        34 => "the library is the toolkit's stub, not a driver",
        100 => "no CUDA-capable device is detected",
        222 => "the PTX is of a version that the driver does not know",
        803 => "the driver's library and its kernel module are of different versions",
        _ => "an error that the driver has no text for",
    };
    driver_string(code).map_or(own.into(), |text| text.to_string_lossy().into_owned())
}

fn fill_one(
    library: &libloading::Library,
    name: &'static str,
    slot: &AtomicPtr<c_void>,
    lacking: &mut Vec<&'static str>,
) {
    // SAFETY: only the symbol's address is taken; its type is given where it is called.
    match unsafe { library.get::<unsafe extern "C" fn()>(name) } {
        Ok(function) => slot.store(*function as *mut c_void, Ordering::Release),
        Err(_) => lacking.push(name),
    }
}

/// Loads the driver's library, once in the life of the program.
pub(super) fn load() -> Result<(), Absent> {
    static LOADED: OnceLock<Result<(), Absent>> = OnceLock::new();
    LOADED.get_or_init(|| load_from(LIBRARY)).clone()
}

fn load_from(file: &str) -> Result<(), Absent> {
    // SAFETY: loading the driver runs its initialisers, as every CUDA program does at its start.
    let library = unsafe { libloading::Library::new(file) };
    let library = library.map_err(|error| absent(file, &loader_text(&error)))?;
    let lacking = fill(&library);
    fill_one(&library, "cuGetErrorString", &ERROR_STRING, &mut Vec::new());
    fill_one(&library, "cuLaunchKernelEx", &LAUNCH_EX, &mut Vec::new());
    // The addresses are used until the program ends.
    std::mem::forget(library);
    match lacking.is_empty() {
        true => Ok(()),
        false => Err(Absent::TooOld(format!("it lacks {}", lacking.join(", ")))),
    }
}

/// The loader's own words.
fn loader_text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |source| source.to_string())
}

/// Tells a library that is not there from one that does not load, by the loader's text.
fn absent(file: &str, error: &str) -> Absent {
    let none = error.starts_with(file) && error.contains("cannot open shared object file: No such file");
    if none { Absent::Missing(error.into()) } else { Absent::Broken(error.into()) }
}

/// Where the loaded library lies.
pub(super) fn path() -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = |line: &str| Some(line.get(line.find('/')?..)?.to_string());
    maps.lines().filter(|line| line.contains("/libcuda.so")).find_map(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_cust_lacks_are_clamped_and_kept() {
        assert!(KNOWN.is_sorted());
        for (code, clamped) in [(0, 0), (2, 2), (700, 700), (999, 999), (36, 999), (721, 999), (812, 999), (-1, 999)] {
            assert_eq!((clamp(code), last_code()), (clamped, code));
        }
    }

    #[test]
    fn the_true_code_is_a_threads_own() {
        clamp(721);
        std::thread::spawn(|| assert_eq!((last_code(), clamp(919)), (0, UNKNOWN))).join().unwrap();
        assert_eq!(last_code(), 721);
    }

    #[test]
    fn every_code_has_a_text_without_a_driver() {
        for code in [-1, 0, 3, 222, 700, 4242] {
            assert!(!error_text(code).is_empty());
        }
        let mut text = std::ptr::null();
        // SAFETY: `text` holds one pointer.
        let status = unsafe { cuGetErrorString(4242, &mut text) };
        // SAFETY: a static string.
        assert!(status == 0 && !unsafe { CStr::from_ptr(text) }.is_empty());
    }

    #[test]
    fn a_library_that_is_missing_is_told_from_a_broken_one() {
        assert!(matches!(load_from("libcuda-that-is-not-here.so.1"), Err(Absent::Missing(_))));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("libcuda.so.1");
        std::fs::write(&file, "not a library").unwrap();
        let broken = load_from(file.to_str().unwrap());
        assert!(matches!(&broken, Err(Absent::Broken(why)) if why.contains("libcuda.so.1")), "{broken:?}");
        let nested = "libnvidia-x.so: cannot open shared object file: No such file or directory";
        assert!(matches!(absent(LIBRARY, nested), Absent::Broken(_)));
    }
}
