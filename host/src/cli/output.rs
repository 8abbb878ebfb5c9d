//! Results to stdout, everything else to stderr.

use std::fmt;
use std::io::{self, Write};

use serde::Serialize;

use super::failure::{Failure, Result};

/// Writes to stdout at once.
pub fn put(text: impl fmt::Display) -> Result<()> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Output(e),
    })
}

/// Writes a line to stdout.
pub fn line(text: impl fmt::Display) -> Result<()> {
    put(format_args!("{text}\n"))
}

/// Writes one JSON document to stdout, in one line.
pub fn json(document: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(document).map_err(|e| Failure::Output(e.into()))?;
    line(text)
}

/// Writes a line to stderr. Nobody reading it is no reason to fail.
pub fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Bytes as people read them: powers of 1000, as in the sizes of files.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        scaled(f, self.0, &["B", "kB", "MB", "GB", "TB"])
    }
}

/// A count as people read it.
pub struct Count(pub u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        scaled(f, self.0, &["", "K", "M", "B", "T"])
    }
}

/// Three digits and a unit; whole numbers below 1000.
fn scaled(f: &mut fmt::Formatter, value: u64, units: &[&str]) -> fmt::Result {
    let mut scaled = value as f64;
    let mut unit = 0;
    // 999.5 would print as 1000.
    while scaled >= 999.5 && unit + 1 < units.len() {
        scaled /= 1000.0;
        unit += 1;
    }
    let decimals = match (unit, scaled) {
        (0, _) | (_, 99.95..) => 0,
        (_, 9.995..) => 1,
        _ => 2,
    };
    let text = format!("{scaled:.decimals$} {}", units[unit]);
    f.pad(text.trim_end())
}

#[cfg(test)]
mod tests {
    use super::{Bytes, Count};

    #[test]
    fn scaled_numbers() {
        for (value, bytes) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (999_600, "1.00 MB"),
            (18_950_000, "18.9 MB"),
            (595_177_988_208, "595 GB"),
            (u64::MAX, "18446744 TB"),
        ] {
            assert_eq!(Bytes(value).to_string(), bytes);
        }
        assert_eq!([Count(12).to_string(), Count(1_026_408_232_448).to_string()], ["12", "1.03 T"]);
        assert_eq!(format!("{:>8}|", Bytes(5)), "     5 B|");
    }
}
