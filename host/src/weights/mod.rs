//! Weights on disk: the bundle, its configuration and its goldens. `bundles/README.md` describes the file.

mod bundle;
mod config;
mod container;
mod drafter;
mod error;
mod goldens;
mod json;
mod layout;
mod manifest;
mod tensor;

pub use bundle::{Bundle, GoldenText, HASHED_BELOW, Settings, Share, TokenizerSpec, Verify};
pub use config::{KV_LORA_RANK, MAX_EXPERTS, ModelConfig, QK_ROPE_HEAD_DIM, RopeScaling};
pub use drafter::{DFlash, DrafterConfig, MAX_DEPTH};
pub use error::{Mismatch, WeightsError};
pub use goldens::{Golden, Marginals};
pub use json::shortest;
pub use layout::{DRAFTER, Expected, Use};
pub use manifest::Declared;
pub use tensor::{bf16_values, f32_values};
