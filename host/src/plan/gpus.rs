//! GPUs by name, for plans without the card at hand: the memory that a driver reports and the vendor's memory rate.

use std::fmt;

/// A kind of card.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Gpu {
    pub name: &'static str,
    /// Bytes of memory.
    pub memory: u64,
    /// Nominal bytes a second.
    pub rate: f64,
}

const fn gpu(name: &'static str, mebibytes: u64, gigabytes_a_second: f64) -> Gpu {
    Gpu { name, memory: mebibytes << 20, rate: gigabytes_a_second * 1e9 }
}

pub const GPUS: [Gpu; 7] = [
    gpu("rtx-pro-6000", 97_887, 1792.0),
    gpu("rtx-5090", 32_607, 1792.0),
    gpu("rtx-4090", 24_564, 1008.0),
    gpu("a100-80gb", 81_920, 2039.0),
    gpu("h100", 81_559, 3350.0),
    gpu("h200", 143_771, 4800.0),
    gpu("b200", 183_359, 8000.0),
];

/// Most cards in a list.
const MOST: usize = 64;

/// Cards of one machine: `8xrtx-pro-6000`, or several such entries with commas.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuList(pub Vec<Gpu>);

impl std::str::FromStr for GpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Vec::new();
        for entry in text.split(',') {
            let (count, name) = match entry.split_once('x').map(|(count, name)| (count.parse(), name)) {
                Some((Ok(count), name)) => (count, name),
                _ => (1usize, entry),
            };
            let gpu = GPUS.iter().find(|gpu| gpu.name == name).ok_or_else(|| {
                let names: Vec<&str> = GPUS.iter().map(|gpu| gpu.name).collect();
                format!("expected a GPU like 8xrtx-pro-6000, of {}; found `{entry}`", names.join(", "))
            })?;
            if count == 0 || all.len() + count > MOST {
                return Err(format!("expected 1 to {MOST} GPUs, found `{text}`"));
            }
            all.resize(all.len() + count, *gpu);
        }
        Ok(Self(all))
    }
}

impl fmt::Display for GpuList {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let groups: Vec<String> =
            self.0.chunk_by(|a, b| a.name == b.name).map(|g| format!("{}x{}", g.len(), g[0].name)).collect();
        f.write_str(&groups.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_gpus() {
        let parsed = |text: &str| text.parse::<GpuList>();
        assert_eq!(parsed("8xrtx-pro-6000").unwrap().0.len(), 8);
        assert_eq!(parsed("rtx-5090,2xh200").unwrap().to_string(), "1xrtx-5090,2xh200");
        for bad in ["", "8x", "0xh100", "65xh100", "gtx-1080", "-1xh100", "h100,"] {
            assert!(parsed(bad).unwrap_err().starts_with("expected "), "{bad}");
        }
    }
}
