//! Weights on disk: a bundle with its goldens (`bundles/README.md` describes the file), or a checkpoint folder
//! (`docs/checkpoints.md`). [`Bundle`] is either.

mod bundle;
mod census;
mod checkpoint;
mod config;
mod container;
mod convert;
mod drafter;
mod error;
mod goldens;
mod json;
mod kdtr;
mod layout;
mod manifest;
mod read_ahead;
mod settings;
mod store;
mod tensor;

pub use bundle::{Bundle, HASHED_BELOW, Share, Verify};
pub use census::{Census, Role, Table};
pub use checkpoint::Folder;
pub use config::{KV_LORA_RANK, MAX_EXPERTS, ModelConfig, QK_ROPE_HEAD_DIM, RopeScaling};
pub use convert::{Conversion, ConvertError, Scales, Written};
pub use drafter::{DFlash, DrafterConfig, MAX_DEPTH};
pub use error::{Mismatch, WeightsError};
pub use goldens::{Golden, Marginals};
pub use json::shortest;
pub(crate) use json::unique_keys;
pub use layout::{DRAFTER, Expected, Use};
pub use manifest::Declared;
pub use settings::{GoldenText, Settings, TemplateSource, TokenizerKind, TokenizerSpec};
pub use tensor::{bf16_values, f32_values};
