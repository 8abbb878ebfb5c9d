//! The files under a model and the place of every tensor in them, by the name that the engine knows it by.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::container::{Container, Raw};
use super::read_ahead::Span;
use super::{Mismatch, WeightsError};

/// Open files with their tensors.
pub(super) struct Store {
    files: Vec<Container>,
    tensors: BTreeMap<String, Place>,
    /// What the whole is called in messages: a file or a folder.
    path: PathBuf,
}

/// A file and the name of the tensor in it, where that is another.
struct Place {
    file: usize,
    stored: Option<String>,
}

impl Store {
    pub fn new(path: &Path) -> Self {
        Self { files: Vec::new(), tensors: BTreeMap::new(), path: path.to_path_buf() }
    }

    /// All tensors of one file, by their own names.
    pub fn of(file: Container) -> Self {
        let mut store = Self::new(file.path());
        let names: Vec<String> = file.names().map(str::to_string).collect();
        let index = store.add_file(file);
        names.into_iter().for_each(|name| store.add(name, index, None));
        store
    }

    pub fn add_file(&mut self, file: Container) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Makes tensor `stored` of a file known as `name`. A name that is taken is the caller's to refuse.
    pub fn add(&mut self, name: String, file: usize, stored: Option<String>) {
        self.tensors.insert(name, Place { file, stored });
    }

    /// Takes the files and tensors of another store, with `prefix` in front of their names, in place of those that have
    /// such names.
    pub fn take(&mut self, other: Store, prefix: &str) {
        self.tensors.retain(|name, _| !name.starts_with(prefix));
        let first = self.files.len();
        self.files.extend(other.files);
        self.tensors.extend(other.tensors.into_iter().map(|(name, place)| {
            let stored = place.stored.unwrap_or_else(|| name.clone());
            (format!("{prefix}{name}"), Place { file: first + place.file, stored: Some(stored) })
        }));
    }

    pub fn get(&self, name: &str) -> Option<Raw<'_>> {
        let (name, place) = self.tensors.get_key_value(name)?;
        self.files.get(place.file)?.get(place.stored.as_ref().unwrap_or(name))
    }

    /// In order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Where a tensor lies.
    pub fn span(&self, name: &str) -> Option<Span<'_>> {
        let (name, place) = self.tensors.get_key_value(name)?;
        let file = self.files.get(place.file)?;
        Some(Span { file: file.file(), bytes: file.span(place.stored.as_ref().unwrap_or(name))? })
    }

    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn files(&self) -> &[Container] {
        &self.files
    }

    /// Size of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes() as u64).sum()
    }

    /// The error of a broken rule: names the file that holds the tensor it is about, and the tensor's name there.
    pub fn blame(&self, mut mismatch: Mismatch) -> WeightsError {
        let name = mismatch.at.strip_prefix("tensor `").and_then(|rest| rest.strip_suffix('`'));
        let Some(place) = name.and_then(|name| self.tensors.get(name)) else { return mismatch.in_file(&self.path) };
        if let Some(stored) = &place.stored {
            mismatch.at = format!("tensor `{stored}`");
        }
        let path = self.files.get(place.file).map_or(self.path.as_path(), Container::path);
        mismatch.in_file(path)
    }
}
