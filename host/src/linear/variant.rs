//! The dense kernels of a format: their names for an experiment, which of them a product takes, and how each divides
//! its work.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use cuda_std::Kernel;
use gpu::args::linear::StreamArgs;
use gpu::kernels::gemm_bf16 as bf16;
use gpu::kernels::gemm_w4a16 as w4;
use gpu::kernels::stream::{self, MAX_SPLIT, TILE_M, TILE_N};
use gpu::kernels::wide::Wide;

use super::pool::Kind;
use super::tiled::{self, Tiles};
use super::{HostWeight, ScaleType};
use crate::device::Device;

/// Which of a format's dense kernels. All of them multiply any number of rows, each in blocks of its own size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// Up to 8 rows a block, several tiles of weights a team of warps; `Few`: one.
    M8,
    M8Few,
    M16,
    M16Few,
    M32,
    M32Few,
    M64,
    M64Few,
    /// Blocks share rows of x, and have all of k: tall matrices; `Many`: more tiles of weights a block.
    Wide8,
    Wide16,
    Wide16Many,
    Wide32,
    Wide64,
    /// The same, a slice of k each of a cluster of blocks; `Few`: fewer tiles of weights a block, `Many`: more.
    Split8,
    Split16,
    Split32,
    Split32Few,
    Split32Many,
    Split64,
    Split64Few,
    /// More rows than are streamed.
    Tiled(Tiles),
}

/// How a block of a dense kernel divides its work.
pub(super) enum Tiling {
    Stream(stream::Variant),
    Wide(Wide),
    Split(Wide),
    Tiled(Tiles),
}

/// Tiles of weights from which blocks have enough of them to take all of k.
const TALL_TILES: usize = 768;

/// Tiles of weights from which, with 9 to 16 rows, blocks are many enough with 16 tiles each.
const VERY_TALL_TILES: usize = 4096;

/// Tiles of weights up to which each goes to a warp team of its own: with more a team, many of a large GPU's
/// multiprocessors would have none. With many rows a team costs a pass over x, and fewer of them are better.
const FEW_TILES: usize = 264;
const FEW_TILES_MANY_ROWS: usize = 132;

/// Tiles of weights up to which clusters are faster with 2 to 16 rows (bf16; W4A16 with 9 to 16), and k from which they
/// are (slower with 2,048, faster with 7,168): without them a tile is one block's.
const FEW_TILES_FEW_ROWS: usize = 96;
const LONG_K: usize = 4096;
/// Tiles of weights up to which they are with one row too, and with more than 16 rows clusters have few each, so that
/// there are more; and from which, with up to 32 rows, they have many, so that x is read less often.
const FEW_TILES_SPLIT: usize = 48;
const MANY_TILES_SPLIT: usize = 360;
/// Tiles of weights that clusters take in a round and a little more.
const UNEVEN_TILES: RangeInclusive<usize> = 241..=MANY_TILES_SPLIT;

/// Rows up to which weights are streamed, 64 rows at a time. With few tiles a block's share of a tiled product is long,
/// and most multiprocessors have none.
const STREAMED_ROWS: usize = 96;
const STREAMED_ROWS_FEW_TILES: usize = 256;

/// What the loaded kernels can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernels {
    Plain,
    /// They know clusters of blocks.
    Clusters,
    /// The same, and sums of 64 rows and of all of k fit registers.
    Sm90,
}

impl Kernels {
    pub fn of(device: &Device) -> Self {
        match device.info().ptx.as_deref() {
            _ if !device.has_clusters() => Self::Plain,
            Some("sm_90") => Self::Sm90,
            _ => Self::Clusters,
        }
    }
}

impl Variant {
    pub const ALL: [Self; 22] = [
        Self::M8,
        Self::M8Few,
        Self::M16,
        Self::M16Few,
        Self::M32,
        Self::M32Few,
        Self::M64,
        Self::M64Few,
        Self::Wide8,
        Self::Wide16,
        Self::Wide16Many,
        Self::Wide32,
        Self::Wide64,
        Self::Split8,
        Self::Split16,
        Self::Split32,
        Self::Split32Few,
        Self::Split32Many,
        Self::Split64,
        Self::Split64Few,
        Self::Tiled(Tiles::Warps),
        Self::Tiled(Tiles::Warpgroups),
    ];

    /// The one that a product of `rows` rows with a matrix `[n, k]` takes; f32 has one kernel alone.
    pub(super) fn of(kind: Kind, [n, k]: [usize; 2], rows: usize, kernels: Kernels) -> Option<Self> {
        let tiles = n.div_ceil(TILE_N);
        let few = tiles <= FEW_TILES;
        // Beside weights of 16 bits, up to 16 rows of x weigh little. f32 scales have no such kernels.
        let wide = match kind {
            Kind::F32 => return None,
            Kind::W4a16(ScaleType::Bf16) => tiles >= TALL_TILES && rows > 1,
            Kind::Bf16 => tiles >= TALL_TILES && rows > 2 * TILE_M,
            Kind::W4a16(ScaleType::F32) => false,
        };
        let split = kernels != Kernels::Plain && kind != Kind::W4a16(ScaleType::F32) && stream::k_split(k) == MAX_SPLIT;
        let split_few_rows =
            split && k >= LONG_K && tiles <= if rows > 1 { FEW_TILES_FEW_ROWS } else { FEW_TILES_SPLIT };
        if rows > if few { STREAMED_ROWS_FEW_TILES } else { STREAMED_ROWS } {
            return Some(Self::Tiled(Tiles::Warps));
        }
        Some(match rows.div_ceil(TILE_M) {
            0 | 1 if wide => Self::Wide8,
            2 if wide && tiles >= VERY_TALL_TILES => Self::Wide16Many,
            2 if wide => Self::Wide16,
            3 | 4 if wide => Self::Wide32,
            _ if wide && kernels == Kernels::Sm90 => Self::Wide64,
            _ if wide && split => Self::Split64,
            // 32 rows twice.
            _ if wide => Self::Wide32,
            0 | 1 if split_few_rows && kind == Kind::Bf16 => Self::Split8,
            0 | 1 if few => Self::M8Few,
            0 | 1 => Self::M8,
            2 if split_few_rows => Self::Split16,
            2 if few => Self::M16Few,
            2 => Self::M16,
            3 | 4 if split && tiles <= FEW_TILES_SPLIT => Self::Split32Few,
            3 | 4 if split && tiles > MANY_TILES_SPLIT => Self::Split32Many,
            3 | 4 if split => Self::Split32,
            _ if split && tiles <= FEW_TILES_SPLIT => Self::Split64Few,
            _ if split && !(kind == Kind::W4a16(ScaleType::Bf16) && UNEVEN_TILES.contains(&tiles)) => Self::Split64,
            3 | 4 if few && kind == Kind::W4a16(ScaleType::Bf16) => Self::M32Few,
            _ if tiles <= FEW_TILES_MANY_ROWS && kind == Kind::W4a16(ScaleType::Bf16) => Self::M32Few,
            _ if tiles <= FEW_TILES_MANY_ROWS => Self::M64Few,
            3 | 4 => Self::M32,
            // Sums of 64 rows and two tiles are more than registers hold beside codes: 32 rows twice.
            _ if kind == Kind::W4a16(ScaleType::Bf16) => Self::M32,
            _ => Self::M64,
        })
    }

    /// The kernel of a format that reads rows of x as they lie; none where it has no such one.
    pub(super) fn kernel_of(self, kind: Kind) -> Option<&'static Kernel<StreamArgs>> {
        let [of_bf16, of_w4, of_w4_s32] = match self {
            Self::Tiled(Tiles::Warps) => return tiled::warps_entry(kind),
            Self::Tiled(Tiles::Warpgroups) => return None,
            Self::M8 => [Some(&bf16::GEMM_BF16_M8), Some(&w4::GEMM_W4A16_M8), Some(&w4::GEMM_W4A16_S32_M8)],
            Self::M8Few => {
                [Some(&bf16::GEMM_BF16_M8_FEW), Some(&w4::GEMM_W4A16_M8_FEW), Some(&w4::GEMM_W4A16_S32_M8_FEW)]
            }
            Self::M16 => [Some(&bf16::GEMM_BF16_M16), Some(&w4::GEMM_W4A16_M16), Some(&w4::GEMM_W4A16_S32_M16)],
            Self::M16Few => {
                [Some(&bf16::GEMM_BF16_M16_FEW), Some(&w4::GEMM_W4A16_M16_FEW), Some(&w4::GEMM_W4A16_S32_M16_FEW)]
            }
            Self::M32 => [Some(&bf16::GEMM_BF16_M32), Some(&w4::GEMM_W4A16_M32), Some(&w4::GEMM_W4A16_S32_M32)],
            Self::M32Few => [None, Some(&w4::GEMM_W4A16_M32_FEW), None],
            Self::M64 => [Some(&bf16::GEMM_BF16_M64), None, Some(&w4::GEMM_W4A16_S32_M64)],
            Self::M64Few => {
                [Some(&bf16::GEMM_BF16_M64_FEW), Some(&w4::GEMM_W4A16_M64_FEW), Some(&w4::GEMM_W4A16_S32_M64_FEW)]
            }
            Self::Wide8 => [None, Some(&w4::GEMM_W4A16_WIDE8), None],
            Self::Wide16 => [None, Some(&w4::GEMM_W4A16_WIDE16), None],
            Self::Wide16Many => [None, Some(&w4::GEMM_W4A16_WIDE16_MANY), None],
            Self::Wide32 => [Some(&bf16::GEMM_BF16_WIDE32), Some(&w4::GEMM_W4A16_WIDE32), None],
            Self::Wide64 => [Some(&bf16::GEMM_BF16_WIDE64), Some(&w4::GEMM_W4A16_WIDE64), None],
            Self::Split8 => [Some(&bf16::GEMM_BF16_SPLIT8), None, None],
            Self::Split16 => [Some(&bf16::GEMM_BF16_SPLIT16), Some(&w4::GEMM_W4A16_SPLIT16), None],
            Self::Split32 => [Some(&bf16::GEMM_BF16_SPLIT32), Some(&w4::GEMM_W4A16_SPLIT32), None],
            Self::Split32Few => [Some(&bf16::GEMM_BF16_SPLIT32_FEW), Some(&w4::GEMM_W4A16_SPLIT32_FEW), None],
            Self::Split32Many => [Some(&bf16::GEMM_BF16_SPLIT32_MANY), Some(&w4::GEMM_W4A16_SPLIT32_MANY), None],
            Self::Split64 => [Some(&bf16::GEMM_BF16_SPLIT64), Some(&w4::GEMM_W4A16_SPLIT64), None],
            Self::Split64Few => [Some(&bf16::GEMM_BF16_SPLIT64_FEW), Some(&w4::GEMM_W4A16_SPLIT64_FEW), None],
        };
        match kind {
            Kind::F32 => None,
            Kind::Bf16 => of_bf16,
            Kind::W4a16(ScaleType::Bf16) => of_w4,
            Kind::W4a16(ScaleType::F32) => of_w4_s32,
        }
    }

    /// The name of the kernel of a format.
    pub(super) fn name_of(self, kind: Kind) -> Option<&'static str> {
        match self {
            Self::Tiled(tiles) => tiles.name(kind),
            _ => self.kernel_of(kind).map(Kernel::name),
        }
    }

    /// The name of the kernel for such a weight.
    pub fn kernel(self, weight: &HostWeight) -> Option<&'static str> {
        self.name_of(Kind::of(&weight.data))
    }

    /// How the kernel divides its work.
    pub(super) fn tiling(self, kind: Kind) -> Option<Tiling> {
        let [of_bf16, of_w4] = match self {
            Self::Tiled(tiles) => return Some(Tiling::Tiled(tiles)),
            Self::Wide8 => return Some(Tiling::Wide(w4::WIDE8)),
            Self::Wide16 => return Some(Tiling::Wide(w4::WIDE16)),
            Self::Wide16Many => return Some(Tiling::Wide(w4::WIDE16_MANY)),
            Self::Wide32 if kind == Kind::Bf16 => return Some(Tiling::Wide(bf16::WIDE32)),
            Self::Wide32 => return Some(Tiling::Wide(w4::WIDE32)),
            Self::Wide64 if kind == Kind::Bf16 => return Some(Tiling::Wide(bf16::WIDE64)),
            Self::Wide64 => return Some(Tiling::Wide(w4::WIDE64)),
            Self::Split8 => return Some(Tiling::Split(bf16::SPLIT8)),
            Self::Split16 if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT16)),
            Self::Split16 => return Some(Tiling::Split(w4::SPLIT16)),
            Self::Split32 if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT32)),
            Self::Split32 => return Some(Tiling::Split(w4::SPLIT32)),
            Self::Split32Few if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT32_FEW)),
            Self::Split32Few => return Some(Tiling::Split(w4::SPLIT32_FEW)),
            Self::Split32Many if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT32_MANY)),
            Self::Split32Many => return Some(Tiling::Split(w4::SPLIT32_MANY)),
            Self::Split64 if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT64)),
            Self::Split64 => return Some(Tiling::Split(w4::SPLIT64)),
            Self::Split64Few if kind == Kind::Bf16 => return Some(Tiling::Split(bf16::SPLIT64_FEW)),
            Self::Split64Few => return Some(Tiling::Split(w4::SPLIT64_FEW)),
            Self::M8 if kind == Kind::W4a16(ScaleType::F32) => [bf16::M8, w4::M8_S32],
            Self::M8 => [bf16::M8, w4::M8],
            Self::M8Few => [bf16::M8_FEW, w4::M8_FEW],
            Self::M16 if kind == Kind::W4a16(ScaleType::F32) => [bf16::M16, w4::M16_S32],
            Self::M16 => [bf16::M16, w4::M16],
            Self::M16Few => [bf16::M16_FEW, w4::M16_FEW],
            Self::M32 => [bf16::M32, w4::M32],
            Self::M32Few if kind == Kind::W4a16(ScaleType::Bf16) => return Some(Tiling::Stream(w4::M32_FEW)),
            Self::M32Few => return None,
            // W4A16 has it with f32 scales alone: one tile a team.
            Self::M64 => [bf16::M64, w4::M64_FEW],
            Self::M64Few => [bf16::M64_FEW, w4::M64_FEW],
        };
        match kind {
            Kind::F32 => None,
            Kind::Bf16 => Some(Tiling::Stream(of_bf16)),
            Kind::W4a16(_) => Some(Tiling::Stream(of_w4)),
        }
    }

    /// Whether a device can; the CPU device can all.
    pub fn runs_on(self, device: &Device) -> bool {
        match self {
            Self::Tiled(tiles) => tiles.runs_on(device),
            Self::Wide64 => !device.is_cuda() || Kernels::of(device) == Kernels::Sm90,
            _ if self.splits() => !device.is_cuda() || device.has_clusters(),
            _ => true,
        }
    }

    /// Whether each warp takes all slices of k in turn; else they go to different warps, or blocks.
    pub(super) fn in_turn(self) -> bool {
        matches!(self, Self::Tiled(_) | Self::Wide8 | Self::Wide16 | Self::Wide16Many | Self::Wide32 | Self::Wide64)
    }

    /// Whether slices of k go to different blocks of a cluster, where there are clusters.
    pub(super) fn splits(self) -> bool {
        matches!(
            self,
            Self::Split8
                | Self::Split16
                | Self::Split32
                | Self::Split32Few
                | Self::Split32Many
                | Self::Split64
                | Self::Split64Few
        )
    }
}

/// As the kernel's name ends.
impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::M8 => "m8",
            Self::M8Few => "m8_few",
            Self::M16 => "m16",
            Self::M16Few => "m16_few",
            Self::M32 => "m32",
            Self::M32Few => "m32_few",
            Self::M64 => "m64",
            Self::M64Few => "m64_few",
            Self::Wide8 => "wide8",
            Self::Wide16 => "wide16",
            Self::Wide16Many => "wide16_many",
            Self::Wide32 => "wide32",
            Self::Wide64 => "wide64",
            Self::Split8 => "split8",
            Self::Split16 => "split16",
            Self::Split32 => "split32",
            Self::Split32Few => "split32_few",
            Self::Split32Many => "split32_many",
            Self::Split64 => "split64",
            Self::Split64Few => "split64_few",
            Self::Tiled(Tiles::Warps) => "tiled",
            Self::Tiled(Tiles::Warpgroups) => "wgmma",
        })
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(|variant| variant.to_string()).join(", ");
        let found = Self::ALL.into_iter().find(|variant| variant.to_string() == text);
        found.ok_or_else(|| format!("variant `{text}`: expected one of {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen exists: only f32 is without a choice.
    #[test]
    fn chosen_variants_exist() {
        let tiles = [
            1,
            FEW_TILES_SPLIT,
            FEW_TILES_FEW_ROWS,
            FEW_TILES_MANY_ROWS,
            FEW_TILES_MANY_ROWS + 1,
            FEW_TILES,
            FEW_TILES + 1,
            400,
            TALL_TILES,
            VERY_TALL_TILES,
        ];
        for kind in Kind::ALL {
            let clusters = [Kernels::Clusters, Kernels::Sm90];
            let cases = [(512, Kernels::Plain), (512, Kernels::Sm90)]
                .into_iter()
                .chain([1024, LONG_K].into_iter().flat_map(|k| clusters.map(|kernels| (k, kernels))));
            for ((k, kernels), tiles) in cases.flat_map(|case| tiles.map(|tiles| (case, tiles))) {
                for rows in 0..=STREAMED_ROWS_FEW_TILES + 1 {
                    let chosen = Variant::of(kind, [tiles * TILE_N, k], rows, kernels);
                    let exists = chosen.is_some_and(|v| v.kernel_of(kind).is_some() && v.tiling(kind).is_some());
                    assert_eq!(exists, kind != Kind::F32, "{kind:?}, {tiles} tiles, {rows} rows: {chosen:?}");
                    let split = chosen.is_some_and(Variant::splits);
                    assert!(
                        !split || kernels != Kernels::Plain && k >= 1024,
                        "{kind:?}, {tiles} tiles, k {k}: {chosen:?}"
                    );
                }
            }
        }
    }

    /// `m32`, `wide64`, `split64_few`: a block has as many rows of x as the name says.
    #[test]
    fn names_say_rows() {
        for (kind, variant) in Kind::ALL.into_iter().flat_map(|kind| Variant::ALL.map(|variant| (kind, variant))) {
            let tiles = match variant.tiling(kind) {
                Some(Tiling::Stream(stream)) => stream.mt,
                Some(Tiling::Wide(wide) | Tiling::Split(wide)) => wide.row_tiles(),
                Some(Tiling::Tiled(_)) | None => continue,
            };
            let name = variant.to_string();
            let digits: String = name.chars().filter(char::is_ascii_digit).collect();
            assert_eq!(digits.parse(), Ok(tiles * TILE_M), "{kind:?}, {name}");
        }
    }

    #[test]
    fn names_are_kernels_ends() {
        for (kind, variant) in Kind::ALL.into_iter().flat_map(|kind| Variant::ALL.map(|variant| (kind, variant))) {
            if let Some(name) = variant.name_of(kind) {
                assert!(name.ends_with(&format!("_{variant}")), "{name} of {variant}");
            }
            assert_eq!(variant.to_string().parse(), Ok(variant));
        }
    }
}
