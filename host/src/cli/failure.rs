//! Every way a command ends badly, and the one table of exit codes.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::device::DeviceError;
use crate::engine::EngineError;
use crate::text::TextError;
use crate::weights::WeightsError;

pub type Result<T> = std::result::Result<T, Failure>;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A flag that is wrong, or that cannot be honoured.
    #[error("{0}")]
    Usage(String),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Text(#[from] TextError),
    /// A file beside the bundle.
    #[error("{}: {source}", file.display())]
    File { file: PathBuf, source: io::Error },
    /// What came out is not what should have.
    #[error("{0}")]
    Verification(String),
    #[error("interrupted")]
    Interrupted,
    /// The reader of stdout has gone, which is no fault.
    #[error("stdout was closed")]
    Closed,
    #[error("stdout: {0}")]
    Output(io::Error),
    /// A model that does not fit.
    #[error("{0}")]
    Memory(String),
    /// A file that could not be written.
    #[error("{0}")]
    Write(String),
}

impl Failure {
    pub fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Closed => 0,
            Self::Output(_) | Self::Write(_) => 1,
            Self::Usage(_) => 2,
            Self::Weights(_) | Self::Text(_) | Self::File { .. } => 3,
            Self::Device(error) => device(error),
            Self::Engine(error) => match error {
                EngineError::Device(error) => device(error),
                EngineError::Weights(_) | EngineError::Unsupported(_) => 3,
                EngineError::Request(_) => 2,
                EngineError::NonFinite(_) => 6,
            },
            Self::Memory(_) => 5,
            Self::Verification(_) => 7,
            Self::Interrupted => 130,
        }
    }

    /// Says on stderr what happened, and gives the code to exit with.
    pub fn report(&self) -> ExitCode {
        if !matches!(self, Self::Closed) {
            super::output::note(format_args!("error: {self}"));
        }
        ExitCode::from(self.exit_code())
    }
}

fn device(error: &DeviceError) -> u8 {
    match error {
        DeviceError::OutOfMemory { .. } => 5,
        DeviceError::Request(_) => 2,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        let memory = || DeviceError::OutOfMemory { bytes: 1 };
        for (failure, code) in [
            (Failure::Closed, 0),
            (Failure::Write("x".into()), 1),
            (Failure::Memory("x".into()), 5),
            (Failure::usage("x"), 2),
            (Failure::Engine(EngineError::Request("x".into())), 2),
            (Failure::Text(TextError::Encode("x".into())), 3),
            (Failure::Engine(EngineError::Unsupported("x".into())), 3),
            (Failure::Device(DeviceError::NoDevice("x".into())), 4),
            (Failure::Device(memory()), 5),
            (Failure::Device(DeviceError::Request("x".into())), 2),
            (Failure::Engine(EngineError::Device(memory())), 5),
            (Failure::Engine(EngineError::NonFinite("x".into())), 6),
            (Failure::Verification("x".into()), 7),
            (Failure::Interrupted, 130),
        ] {
            assert_eq!(failure.exit_code(), code, "{failure:?}");
        }
    }
}
