//! JSON of a bundle's header and metadata. A key given twice is an error: readers disagree on which one counts.

use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::Mismatch;

/// Parses `text`, the metadata entry `key`.
pub(super) fn parse<T: DeserializeOwned>(key: &str, text: &str) -> Result<T, Mismatch> {
    unique_keys(text)
        .and_then(|()| serde_json::from_str(text))
        .map_err(|e| Mismatch::metadata(key, "valid JSON of its kind", e))
}

/// Field `name` of the object that is the metadata entry `key`. An absent field reads as null, which an `Option`
/// accepts.
pub(super) fn field<T: DeserializeOwned>(key: &str, object: &Value, name: &str) -> Result<T, Mismatch> {
    let value = object.get(name);
    serde_json::from_value(value.cloned().unwrap_or_default()).map_err(|e| {
        let text = e.to_string();
        let expected = text.rsplit_once(", expected ").map_or("all its parts", |(_, expected)| expected);
        let found = match value {
            None => "nothing".into(),
            Some(Value::Object(_)) => text.clone(),
            Some(other) => other.to_string(),
        };
        Mismatch::new(format_args!("metadata `{key}`, field `{name}`"), expected, found)
    })
}

/// Writes an f32 with the digits that it was read from, and not those of its value as f64.
pub(super) fn short<S: serde::Serializer>(value: &f32, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_f64(shortest(*value))
}

/// The f64 with the shortest digits that round to `value`.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(value.into())
}

/// Reads every named field of a struct from a JSON object.
macro_rules! read_fields {
    ($key:expr, $object:expr, $($name:ident),+ $(,)?) => {
        Self { $($name: json::field($key, $object, stringify!($name))?),+ }
    };
}
pub(super) use read_fields;

/// Fails on text that is not JSON, and on a repeated key at any depth.
pub(crate) fn unique_keys(text: &str) -> serde_json::Result<()> {
    serde_json::from_str::<Unique>(text).map(|_| ())
}

/// Any JSON value, looked at and dropped.
struct Unique;

impl<'de> serde::Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(UniqueVisitor)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: Error>(self) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Unique, A::Error> {
        while seq.next_element::<Unique>()?.is_some() {}
        Ok(Unique)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Unique>()?;
            if let Some(key) = seen.replace(key) {
                return Err(A::Error::custom(format_args!("key `{key}` twice")));
            }
        }
        Ok(Unique)
    }
}

#[cfg(test)]
mod tests {
    use super::unique_keys;

    #[test]
    fn repeated_keys_are_found_at_any_depth() {
        assert!(unique_keys(r#"{"a": 1, "b": [{"a": 1}, {"a": null}], "c": {"a": "x"}}"#).is_ok());
        for text in [r#"{"a": 1, "a": 1}"#, r#"[{"b": {"x": 1.5, "x": true}}]"#, r#"{"a": 1, "\u0061": 2}"#] {
            assert!(unique_keys(text).unwrap_err().to_string().contains("twice"), "{text}");
        }
        assert!(unique_keys("{\"a\": 1} x").is_err());
        assert!(unique_keys(&"[".repeat(100_000)).is_err());
    }
}
