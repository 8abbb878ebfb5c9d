#![allow(dead_code, reason = "shared by the test programs; none uses all of it")]
//! Bundles taken apart, changed and written anew, with or without hashes that agree.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};

/// The folder that holds `bundles/`: `KDTREE_ROOT`, or the working directory of cargo's tests.
pub fn root() -> PathBuf {
    std::env::var_os("KDTREE_ROOT").map_or_else(|| ".".into(), PathBuf::from)
}

/// A bundle that ships.
pub fn shipped(name: &str) -> PathBuf {
    let path = root().join("bundles").join(format!("{name}.kdtr"));
    assert!(path.is_file(), "{} is missing", path.display());
    path
}

/// A stored tensor.
#[derive(Clone)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A bundle taken apart.
#[derive(Clone)]
pub struct Parts {
    pub metadata: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Parts {
    /// A bundle that ships.
    pub fn of(name: &str) -> Self {
        Self::read(&shipped(name))
    }

    /// The bundle in a file.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let tensor = Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            (name.to_string(), tensor)
        });
        let metadata = header.metadata().clone().unwrap().into_iter().collect();
        Self { metadata, tensors: tensors.collect() }
    }

    /// A metadata entry as JSON.
    pub fn get(&self, key: &str) -> Value {
        serde_json::from_str(&self.metadata[key]).unwrap()
    }

    /// Changes a metadata entry as JSON.
    pub fn edit(&mut self, key: &str, change: impl FnOnce(&mut Value)) {
        let mut value = self.get(key);
        change(&mut value);
        self.metadata.insert(key.into(), value.to_string());
    }

    /// Sets one field of a metadata entry; `null` takes it out.
    pub fn set(&mut self, key: &str, field: &str, to: Value) {
        self.edit(key, |value| {
            let fields = value.as_object_mut().unwrap();
            match to {
                Value::Null => fields.remove(field),
                to => fields.insert(field.into(), to),
            };
        });
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.get_mut(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Values of a bf16 tensor, changed row by row: `change(row, values)`.
    pub fn change_rows(&mut self, name: &str, change: impl Fn(usize, &mut [f32])) {
        let tensor = self.tensor(name);
        assert_eq!(tensor.dtype, Dtype::BF16, "{name}");
        let width = tensor.shape.last().copied().unwrap();
        let bf16 = |b: &[u8]| half::bf16::from_le_bytes([b[0], b[1]]).to_f32();
        let mut values: Vec<f32> = tensor.bytes.chunks_exact(2).map(bf16).collect();
        values.chunks_exact_mut(width).enumerate().for_each(|(row, values)| change(row, values));
        tensor.bytes = values.into_iter().flat_map(|v| half::bf16::from_f32(v).to_le_bytes()).collect();
    }

    /// Stores weight `name` in another format: `entry` has the manifest's fields beside the shape, `stored` the tensors
    /// with what follows the name.
    pub fn replace(&mut self, name: &str, entry: Value, stored: impl IntoIterator<Item = (&'static str, Tensor)>) {
        self.edit("manifest", |manifest| {
            let shape = manifest[name]["shape"].take();
            manifest[name] = entry;
            manifest[name]["shape"] = shape;
        });
        for suffix in ["", ".qw", ".sc"] {
            self.tensors.remove(&format!("{name}{suffix}"));
        }
        self.tensors.extend(stored.into_iter().map(|(suffix, tensor)| (format!("{name}{suffix}"), tensor)));
    }

    /// Makes the hashes those of the tensors as they are now.
    pub fn rehash(&mut self) {
        let hashes = self.tensors.iter().map(|(name, t)| (name.clone(), json!(blake3::hash(&t.bytes).to_string())));
        self.metadata.insert("blake3".into(), Value::Object(hashes.collect()).to_string());
    }

    /// The file.
    pub fn bytes(&self) -> Vec<u8> {
        let views =
            self.tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        safetensors::serialize(views, Some(self.metadata.clone().into_iter().collect())).unwrap()
    }

    pub fn write(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, self.bytes()).unwrap();
        path
    }
}

/// Takes a file into header and data.
pub fn split(file: &[u8]) -> (String, Vec<u8>) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (String::from_utf8(file[8..8 + length].to_vec()).unwrap(), file[8 + length..].to_vec())
}

/// Puts a header in front of data.
pub fn join(header: &str, data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header.as_bytes(), data].concat()
}
