//! The engine: see `docs/ARCHITECTURE.md` for the map. Data flows one way:
//! `cli -> engine -> model -> linear and kernels -> device`.

pub mod bench;
pub mod cli;
pub mod device;
pub mod engine;
pub mod kernels;
pub mod linear;
pub mod model;
pub mod plan;
pub mod reference;
pub mod selfcheck;
pub mod text;
pub mod weights;
