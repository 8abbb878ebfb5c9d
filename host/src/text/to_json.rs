//! `tojson` as chat templates know it: Python's `json.dumps` with its separators, order of keys, and characters as they
//! are.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::Formatter;

/// The filter. It takes `indent`, `separators`, `sort_keys`, `ensure_ascii`.
pub(super) fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let fault = |e: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, e.to_string());
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(fault(&"`separators` are two")),
        None => [if indent.is_some() { "," } else { ", " }.into(), ": ".into()],
    };
    let python = Python { item, key, indent, depth: 0, full: false };
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, python);
    let written = match sort_keys {
        // This value keeps its keys sorted.
        Some(true) => serde_json::to_value(&value).and_then(|sorted| sorted.serialize(&mut serializer)),
        _ => value.serialize(&mut serializer),
    };
    written.map_err(|e| fault(&e))?;
    let text = String::from_utf8(bytes).map_err(|e| fault(&e))?;
    Ok(if ensure_ascii == Some(true) { ascii(&text) } else { text })
}

/// Other characters as `\uXXXX`; they stand only inside strings.
fn ascii(text: &str) -> String {
    let mut units = [0; 2];
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c.is_ascii() {
            true => out.push(c),
            false => c.encode_utf16(&mut units).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
        }
        out
    })
}

struct Python {
    item: String,
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Whether the list or object that ends next has an entry.
    full: bool,
}

impl Python {
    fn line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            None => Ok(()),
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
        }
    }

    fn next<W: ?Sized + Write>(&self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.line(out)
    }

    fn open<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        (self.depth, self.full) = (self.depth + 1, false);
        out.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.full {
            self.line(out)?;
        }
        out.write_all(bracket)
    }
}

impl Formatter for Python {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.full = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.full = true;
        Ok(())
    }
}
