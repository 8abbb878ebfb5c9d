//! Loops whose counter indexes registers.

/// Repeats a block for each listed value of `i`, or for those below a constant, written out: arrays that `i` indexes
/// stay in registers. A loop that LLVM leaves rolled would move them to local memory. No `break` or `continue` inside.
///
/// Every listed value is a copy of the block for the compiler, and nesting multiplies them: list no more than needed.
macro_rules! unroll {
    ($i:ident in $($at:literal)+; $body:block) => {
        $({
            let $i: usize = $at;
            $body
        })+
    };
    ($i:ident in $($at:literal)+ below $n:expr; $body:block) => {
        $(if $at < $n {
            let $i: usize = $at;
            $body
        })+
    };
}
pub(crate) use unroll;
