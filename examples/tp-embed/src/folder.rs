//! The model's folder, as `fetch-model` leaves it.
//!
//! Owns the names of its files and the reading of config.json. Called by parent, ranks and reference.

use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};

/// The checkpoint.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The configuration.
pub(crate) const CONFIG: &str = "config.json";
/// The tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// The folder does not serve.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderError {
    /// The model has not been fetched.
    #[error("no {file} in {}: run examples/tp-embed/fetch-model", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
        /// What is not in it.
        file: &'static str,
    },
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The configuration is not this kind of model's.
    #[error("{}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

/// Refuses a folder that is not complete.
pub(crate) fn require(folder: &Path) -> Result<(), FolderError> {
    for file in [WEIGHTS, CONFIG, TOKENIZER] {
        if !folder.join(file).is_file() {
            let folder = folder.to_owned();
            return Err(FolderError::Missing { folder, file });
        }
    }
    Ok(())
}

/// Reads config.json, as any type that wants some of it.
pub(crate) fn read_config<C: DeserializeOwned>(folder: &Path) -> Result<C, FolderError> {
    let path = folder.join(CONFIG);
    match std::fs::read_to_string(&path) {
        Ok(text) => {
            serde_json::from_str(&text).map_err(|source| FolderError::Parse { path, source })
        }
        Err(source) => Err(FolderError::Read { path, source }),
    }
}
