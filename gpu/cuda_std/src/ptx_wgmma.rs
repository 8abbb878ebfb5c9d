//! `wgmma`: products of four warps whose operands lie in shared memory (sm_90a). Elsewhere a call traps.
//!
//! While a product is under way its sums must not be touched. Between the block that starts it and the one that waits
//! the compiler has no reason to, and ptxas says so if it does.

#[cfg(target_feature = "sm_90a")]
use core::arch::asm;

/// `asm!` of a text whose first operands, by number, are the four registers of each of these rows. Options are the same
/// for all.
#[cfg(target_feature = "sm_90a")]
macro_rules! asm_rows {
    ($text:expr, $($dir:ident [$($row:expr),* $(,)?]),* $(; $($rest:tt)*)?) => {
        asm!(
            concat!($text),
            $($($dir(reg32) $row[0], $dir(reg32) $row[1], $dir(reg32) $row[2], $dir(reg32) $row[3],)*)*
            $($($rest)*,)?
            options(nostack, preserves_flags)
        )
    };
}

/// Names of the first 16, 64, 128 operands.
#[cfg(target_feature = "sm_90a")]
macro_rules! names {
    (16) => {
        "{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {11}, {12}, {13}, {14}, {15}"
    };
    (64) => {
        concat!(
            names!(16),
            ", {16}, {17}, {18}, {19}, {20}, {21}, {22}, {23}, {24}, {25}, {26}, {27}, {28}, {29}, {30}, {31}",
            ", {32}, {33}, {34}, {35}, {36}, {37}, {38}, {39}, {40}, {41}, {42}, {43}, {44}, {45}, {46}, {47}",
            ", {48}, {49}, {50}, {51}, {52}, {53}, {54}, {55}, {56}, {57}, {58}, {59}, {60}, {61}, {62}, {63}"
        )
    };
    (128) => {
        concat!(
            names!(64),
            ", {64}, {65}, {66}, {67}, {68}, {69}, {70}, {71}, {72}, {73}, {74}, {75}, {76}, {77}, {78}, {79}",
            ", {80}, {81}, {82}, {83}, {84}, {85}, {86}, {87}, {88}, {89}, {90}, {91}, {92}, {93}, {94}, {95}",
            ", {96}, {97}, {98}, {99}, {100}, {101}, {102}, {103}, {104}, {105}, {106}, {107}, {108}, {109}",
            ", {110}, {111}, {112}, {113}, {114}, {115}, {116}, {117}, {118}, {119}, {120}, {121}, {122}, {123}",
            ", {124}, {125}, {126}, {127}"
        )
    };
}

/// Description of an operand with 128-byte rows, permuted by the hardware's 128-byte rule: `leading` and `stride` are
/// the distances in bytes of the tables in the PTX ISA ("Strides").
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
fn descriptor(addr: u32, leading: u32, stride: u32) -> u64 {
    const SWIZZLE_128: u64 = 1 << 62;
    let field = |bytes: u32| u64::from((bytes & 0x3FFFF) >> 4);
    field(addr) | field(leading) << 16 | field(stride) << 32 | SWIZZLE_128
}

#[inline(always)]
pub fn fence_async() {
    // SAFETY: orders this thread's accesses to shared memory before those of `wgmma`.
    #[cfg(target_feature = "sm_90a")]
    unsafe {
        asm!("fence.proxy.async.shared::cta;", options(nostack, preserves_flags))
    }
}

/// Starts `d += a . b^T` over nine panels, of 64 rows of `a` and 32 of `b`.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_nt_32(d: &mut [[f32; 4]; 4], a: u32, b: u32) {
    const ROWS: u32 = 8 * 128;
    let (a, b) = (descriptor(a, 16, ROWS), descriptor(b, 16, ROWS));
    // Low words of the descriptors move: to the next 32 bytes, and to the next panels of 8192 and 4096 bytes.
    macro_rules! step {
        ($a:literal, $b:literal) => {
            concat!(
                "add.u32 x, al, ",
                $a,
                "; add.u32 y, bl, ",
                $b,
                "; mov.b64 a, {{x, ah}}; mov.b64 b, {{y, bh}}; ",
                "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {{",
                names!(16),
                "}}, a, b, p, 1, 1, 0, 0; "
            )
        };
    }
    // SAFETY: both operands lie in the shared window by the caller's contract; sums are in registers.
    unsafe {
        asm_rows!(
            concat!(
                "{{ .reg .pred p; .reg .b32 al, ah, bl, bh, x, y; .reg .b64 a, b; setp.eq.u32 p, 0, 0; ",
                "mov.b64 {{al, ah}}, {16}; mov.b64 {{bl, bh}}, {17}; wgmma.fence.sync.aligned; ",
                step!(0, 0), step!(2, 2), step!(4, 4), step!(6, 6),
                step!(512, 256), step!(514, 258), step!(516, 260), step!(518, 262),
                step!(1024, 512), step!(1026, 514), step!(1028, 516), step!(1030, 518),
                step!(1536, 768), step!(1538, 770), step!(1540, 772), step!(1542, 774),
                step!(2048, 1024), step!(2050, 1026), step!(2052, 1028), step!(2054, 1030),
                step!(2560, 1280), step!(2562, 1282), step!(2564, 1284), step!(2566, 1286),
                step!(3072, 1536), step!(3074, 1538), step!(3076, 1540), step!(3078, 1542),
                step!(3584, 1792), step!(3586, 1794), step!(3588, 1796), step!(3590, 1798),
                step!(4096, 2048), step!(4098, 2050), step!(4100, 2052), step!(4102, 2054),
                " wgmma.commit_group.sync.aligned; }}"
            ),
            inout [d[0], d[1], d[2], d[3]];
            in(reg64) a, in(reg64) b
        );
    }
}

/// Waits for all products of this warp; `d` are the sums of the last.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_wait_32(d: &mut [[f32; 4]; 4]) {
    // SAFETY: names the sums, so that nothing reads them before.
    unsafe {
        asm_rows!(
            concat!("wgmma.wait_group.sync.aligned 0; /* ", names!(16), " */"),
            inout [d[0], d[1], d[2], d[3]]
        );
    }
}

/// Starts `d += w . v` over 32 rows of `v`: four panels of 64 columns.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_nn_32(d: &mut [[[f32; 4]; 8]; 4], w: u32, v: u32) {
    const ROWS: u32 = 8 * 128;
    let (w, v) = (descriptor(w, 16, ROWS), descriptor(v, 32 * 128, ROWS));
    macro_rules! step {
        () => {
            concat!(
                "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{",
                names!(128),
                "}}, a, b, p, 1, 1, 0, 1; "
            )
        };
    }
    // 16 columns of the weights are 32 bytes, 16 rows of the values 2048.
    macro_rules! next {
        () => {
            concat!("add.s64 a, a, 2; add.s64 b, b, 128; ", step!())
        };
    }
    macro_rules! product {
        ($text:expr) => {
            asm_rows!(
                concat!(
                    "{{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 0, 0; ",
                    "mov.b64 a, {128}; mov.b64 b, {129}; wgmma.fence.sync.aligned; ", $text,
                    " wgmma.commit_group.sync.aligned; }}"
                ),
                inout [
                    d[0][0], d[0][1], d[0][2], d[0][3], d[0][4], d[0][5], d[0][6], d[0][7],
                    d[1][0], d[1][1], d[1][2], d[1][3], d[1][4], d[1][5], d[1][6], d[1][7],
                    d[2][0], d[2][1], d[2][2], d[2][3], d[2][4], d[2][5], d[2][6], d[2][7],
                    d[3][0], d[3][1], d[3][2], d[3][3], d[3][4], d[3][5], d[3][6], d[3][7],
                ];
                in(reg64) w, in(reg64) v
            )
        };
    }
    // SAFETY: both operands lie in the shared window by the caller's contract; sums are in registers.
    unsafe {
        product!(concat!(step!(), next!()));
    }
}

/// As [`wgmma_nn_32`], two panels of `v`.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_nn_32_half(d: [&mut [[f32; 4]; 8]; 2], w: u32, v: u32) {
    const ROWS: u32 = 8 * 128;
    let (w, v) = (descriptor(w, 16, ROWS), descriptor(v, 32 * 128, ROWS));
    let [dx, dy] = d;
    macro_rules! step {
        () => {
            concat!("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{", names!(64), "}}, a, b, p, 1, 1, 0, 1; ")
        };
    }
    // SAFETY: both operands lie in the shared window by the caller's contract; sums are in registers.
    unsafe {
        asm_rows!(
            concat!(
                "{{ .reg .pred p; .reg .b64 a, b; setp.eq.u32 p, 0, 0; mov.b64 a, {64}; mov.b64 b, {65}; ",
                "wgmma.fence.sync.aligned; ", step!(), "add.s64 a, a, 2; add.s64 b, b, 128; ", step!(),
                "wgmma.commit_group.sync.aligned; }}"
            ),
            inout [
                dx[0], dx[1], dx[2], dx[3], dx[4], dx[5], dx[6], dx[7],
                dy[0], dy[1], dy[2], dy[3], dy[4], dy[5], dy[6], dy[7],
            ];
            in(reg64) w, in(reg64) v
        );
    }
}

/// Waits for all products of this warp; `d` are the sums of [`wgmma_nn_32`].
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_wait_nn_32(d: &mut [[[f32; 4]; 8]; 4]) {
    // SAFETY: names the sums, so that nothing reads them before.
    unsafe {
        asm_rows!(
            concat!("wgmma.wait_group.sync.aligned 0; /* ", names!(128), " */"),
            inout [
                d[0][0], d[0][1], d[0][2], d[0][3], d[0][4], d[0][5], d[0][6], d[0][7],
                d[1][0], d[1][1], d[1][2], d[1][3], d[1][4], d[1][5], d[1][6], d[1][7],
                d[2][0], d[2][1], d[2][2], d[2][3], d[2][4], d[2][5], d[2][6], d[2][7],
                d[3][0], d[3][1], d[3][2], d[3][3], d[3][4], d[3][5], d[3][6], d[3][7],
            ]
        );
    }
}

/// As [`wgmma_wait_nn_32`], for [`wgmma_nn_32_half`].
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_wait_nn_32_half(d: [&mut [[f32; 4]; 8]; 2]) {
    let [dx, dy] = d;
    // SAFETY: as above.
    unsafe {
        asm_rows!(
            concat!("wgmma.wait_group.sync.aligned 0; /* ", names!(64), " */"),
            inout [
                dx[0], dx[1], dx[2], dx[3], dx[4], dx[5], dx[6], dx[7],
                dy[0], dy[1], dy[2], dy[3], dy[4], dy[5], dy[6], dy[7],
            ]
        );
    }
}

/// `a . b^T`, or `d += a . b^T`, over all 64 columns of 128 rows of each of `b`, started.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
fn registers_pair<const HALF: bool, const ADD: bool>(d: &mut [[f32; 4]; 16], a: &[[[[u32; 4]; 2]; 2]; 2], b: [u32; 2]) {
    let [b, c] = b.map(|b| descriptor(b, 16, 8 * 128));
    macro_rules! step {
        ($type:literal, $a:literal, $b:literal, $add:literal) => {
            concat!(
                "wgmma.mma_async.sync.aligned.m64n128k16.f32.",
                $type,
                " {{",
                names!(64),
                "}}, {{",
                $a,
                "}}, ",
                $b,
                ", ",
                $add,
                ", 1, 1, 0; "
            )
        };
    }
    macro_rules! product {
        ($type:literal, $first:literal, $dir:ident) => {
            asm_rows!(
                concat!(
                    "{{ .reg .pred p, q; .reg .b64 b, c; setp.eq.u32 p, 0, 0; setp.ne.u32 q, 0, 0; ",
                    "mov.b64 b, {96}; mov.b64 c, {97}; wgmma.fence.sync.aligned; ",
                    step!($type, "{64}, {65}, {66}, {67}", "b", $first), "add.s64 b, b, 2; ",
                    step!($type, "{68}, {69}, {70}, {71}", "b", "p"), "add.s64 b, b, 2; ",
                    step!($type, "{72}, {73}, {74}, {75}", "b", "p"), "add.s64 b, b, 2; ",
                    step!($type, "{76}, {77}, {78}, {79}", "b", "p"),
                    step!($type, "{80}, {81}, {82}, {83}", "c", "p"), "add.s64 c, c, 2; ",
                    step!($type, "{84}, {85}, {86}, {87}", "c", "p"), "add.s64 c, c, 2; ",
                    step!($type, "{88}, {89}, {90}, {91}", "c", "p"), "add.s64 c, c, 2; ",
                    step!($type, "{92}, {93}, {94}, {95}", "c", "p"),
                    "wgmma.commit_group.sync.aligned; }}"
                ),
                $dir [
                    d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7],
                    d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                ],
                in [
                    a[0][0][0], a[0][0][1], a[0][1][0], a[0][1][1], a[1][0][0], a[1][0][1], a[1][1][0], a[1][1][1],
                ];
                in(reg64) b, in(reg64) c
            )
        };
    }
    // SAFETY: `b` and `c` lie in the shared window by the caller's contract; the rest is in registers.
    unsafe {
        match (HALF, ADD) {
            (true, true) => product!("f16.f16", "p", inout),
            (true, false) => product!("f16.f16", "q", out),
            (false, true) => product!("bf16.bf16", "p", inout),
            (false, false) => product!("bf16.bf16", "q", out),
        }
    }
}

/// `a . b^T` over all 64 columns of 128 rows of each of `b`, started.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_registers_pair<const HALF: bool>(a: &[[[[u32; 4]; 2]; 2]; 2], b: [u32; 2]) -> [[f32; 4]; 16] {
    let mut d = [[0.0; 4]; 16];
    registers_pair::<HALF, false>(&mut d, a, b);
    d
}

/// `d += a . b^T`, likewise.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_add_pair<const HALF: bool>(d: &mut [[f32; 4]; 16], a: &[[[[u32; 4]; 2]; 2]; 2], b: [u32; 2]) {
    registers_pair::<HALF, true>(d, a, b);
}

/// Waits for all products of this warp; `d` are their sums, `a` their operands.
#[cfg(target_feature = "sm_90a")]
#[inline(always)]
pub fn wgmma_wait_sums<const PENDING: u32>(d: &mut [[f32; 4]; 16], a: &mut [[[[u32; 4]; 2]; 2]; 2]) {
    // SAFETY: names what must not be touched before.
    unsafe {
        asm_rows!(
            concat!(
                "wgmma.wait_group.sync.aligned {96}; /* ",
                names!(64),
                ", {64}, {65}, {66}, {67}, {68}, {69}, {70}, {71}, {72}, {73}, {74}, {75}, {76}, {77}, {78}, {79}",
                ", {80}, {81}, {82}, {83}, {84}, {85}, {86}, {87}, {88}, {89}, {90}, {91}, {92}, {93}, {94}, {95} */"
            ),
            inout [
                d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7],
                d[8], d[9], d[10], d[11], d[12], d[13], d[14], d[15],
                a[0][0][0], a[0][0][1], a[0][1][0], a[0][1][1], a[1][0][0], a[1][0][1], a[1][1][0], a[1][1][1],
            ];
            const PENDING
        );
    }
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_nn_32(_d: &mut [[[f32; 4]; 8]; 4], _w: u32, _v: u32) {
    super::ptx::trap("wgmma on a target without")
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_nn_32_half(_d: [&mut [[f32; 4]; 8]; 2], _w: u32, _v: u32) {
    super::ptx::trap("wgmma on a target without")
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_wait_nn_32(_d: &mut [[[f32; 4]; 8]; 4]) {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_wait_nn_32_half(_d: [&mut [[f32; 4]; 8]; 2]) {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_nt_32(_d: &mut [[f32; 4]; 4], _a: u32, _b: u32) {
    super::ptx::trap("wgmma on a target without")
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_wait_32(_d: &mut [[f32; 4]; 4]) {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_registers_pair<const HALF: bool>(_a: &[[[[u32; 4]; 2]; 2]; 2], _b: [u32; 2]) -> [[f32; 4]; 16] {
    super::ptx::trap("wgmma on a target without")
}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_wait_sums<const PENDING: u32>(_d: &mut [[f32; 4]; 16], _a: &mut [[[[u32; 4]; 2]; 2]; 2]) {}

#[cfg(not(target_feature = "sm_90a"))]
#[inline(always)]
pub fn wgmma_add_pair<const HALF: bool>(_d: &mut [[f32; 4]; 16], _a: &[[[[u32; 4]; 2]; 2]; 2], _b: [u32; 2]) {
    super::ptx::trap("wgmma on a target without")
}
