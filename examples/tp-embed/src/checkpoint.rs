//! The checkpoint: a safetensors file, of which a rank reads only what it owns.
//!
//! Owns the file and its header. Called by the model while it is built. Refuses element types other than
//! f32 and ranges outside a tensor. Nothing is mapped: a part of the rows is one read, a part of the
//! columns one short read for each row.

use candle_core::{Device, Tensor};
use safetensors::tensor::{Dtype, Metadata};
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Longest header that is read.
const MAX_HEADER_LEN_BYTES: u64 = 16 << 20;
const ELEM_BYTES: usize = size_of::<f32>();

/// A weight was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckpointError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no safetensors file.
    #[error("{} is not a safetensors file: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The tensor is missing, or not what the model is made of.
    #[error("tensor {name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// candle refused it.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The part of a weight that is read. A linear layer's weight is (out, in).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    /// All of it.
    Whole,
    /// These indices of the first dimension: some of a linear layer's outputs.
    Rows(Range<usize>),
    /// These indices of the second of two dimensions: some of a linear layer's inputs.
    Columns(Range<usize>),
}

/// An open checkpoint.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start_bytes: u64,
    read_bytes: Cell<u64>,
}

impl Checkpoint {
    /// Opens a file and reads its header.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let read = |source| CheckpointError::Read {
            path: path.to_owned(),
            source,
        };
        let header = |reason: String| CheckpointError::Header {
            path: path.to_owned(),
            reason,
        };
        let file = File::open(path).map_err(read)?;
        let file_len_bytes = file.metadata().map_err(read)?.len();
        let mut len = [0; 8];
        file.read_exact_at(&mut len, 0).map_err(read)?;
        let header_len_bytes = u64::from_le_bytes(len);
        if header_len_bytes > MAX_HEADER_LEN_BYTES {
            return Err(header(format!("a header of {header_len_bytes} bytes")));
        }
        let mut text = vec![0; header_len_bytes as usize];
        file.read_exact_at(&mut text, 8).map_err(read)?;
        let metadata: Metadata =
            serde_json::from_slice(&text).map_err(|error| header(error.to_string()))?;
        let data_start_bytes = 8 + header_len_bytes;
        if data_start_bytes + metadata.data_len() as u64 != file_len_bytes {
            return Err(header(format!(
                "it has {file_len_bytes} bytes, its header describes {}",
                data_start_bytes + metadata.data_len() as u64
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            metadata,
            data_start_bytes,
            read_bytes: Cell::new(0),
        })
    }

    /// Bytes of weights read so far.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.get()
    }

    /// Reads a tensor, or a part of it.
    pub(crate) fn read(&self, name: &str, cut: &Cut) -> Result<Tensor, CheckpointError> {
        let wrong = |reason: String| CheckpointError::Tensor {
            name: name.to_owned(),
            reason,
        };
        let info = self
            .metadata
            .info(name)
            .ok_or_else(|| wrong("the checkpoint has none of this name".to_owned()))?;
        if info.dtype != Dtype::F32 {
            return Err(wrong(format!("its elements are {}, not F32", info.dtype)));
        }
        // The header is valid: shape and offsets agree, and the data is inside the file.
        let tensor_start_bytes = self.data_start_bytes + info.data_offsets.0 as u64;
        let outside = || wrong(format!("{cut:?} is no part of shape {:?}", info.shape));
        let within = |part: &Range<usize>, len: usize| part.start <= part.end && part.end <= len;
        let mut bytes = Vec::new();
        let shape = match (cut, info.shape.as_slice()) {
            (Cut::Whole, shape) => {
                let num_elems = shape.iter().product::<usize>();
                self.append(&mut bytes, tensor_start_bytes, num_elems * ELEM_BYTES)?;
                shape.to_vec()
            }
            (Cut::Rows(rows), [num_rows, rest @ ..]) if within(rows, *num_rows) => {
                let row_len_bytes = rest.iter().product::<usize>() * ELEM_BYTES;
                let start_bytes = tensor_start_bytes + (rows.start * row_len_bytes) as u64;
                self.append(&mut bytes, start_bytes, rows.len() * row_len_bytes)?;
                [&[rows.len()], rest].concat()
            }
            (Cut::Columns(columns), [num_rows, num_columns]) if within(columns, *num_columns) => {
                for row in 0..*num_rows {
                    let start = row * num_columns + columns.start;
                    let start_bytes = tensor_start_bytes + (start * ELEM_BYTES) as u64;
                    self.append(&mut bytes, start_bytes, columns.len() * ELEM_BYTES)?;
                }
                vec![*num_rows, columns.len()]
            }
            (Cut::Rows(_) | Cut::Columns(_), _) => return Err(outside()),
        };
        let (words, _) = bytes.as_chunks::<ELEM_BYTES>();
        let elems: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        Ok(Tensor::from_vec(elems, shape, &Device::Cpu)?)
    }

    fn append(
        &self,
        bytes: &mut Vec<u8>,
        start_bytes: u64,
        len_bytes: usize,
    ) -> Result<(), CheckpointError> {
        let filled = bytes.len();
        bytes.resize(filled + len_bytes, 0);
        let (_, rest) = bytes.split_at_mut(filled);
        self.file
            .read_exact_at(rest, start_bytes)
            .map_err(|source| CheckpointError::Read {
                path: self.path.clone(),
                source,
            })?;
        self.read_bytes
            .set(self.read_bytes.get() + len_bytes as u64);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::collections::HashMap;

    /// A checkpoint with one tensor "w" of shape (4, 6) and elements 0..24.
    fn checkpoint(name: &str) -> Checkpoint {
        let path = std::env::temp_dir().join(format!("tp-embed-{}-{name}", std::process::id()));
        let elems: Vec<f32> = (0..24_u8).map(f32::from).collect();
        let tensor = Tensor::from_vec(elems, (4, 6), &Device::Cpu).unwrap();
        candle_core::safetensors::save(&HashMap::from([("w", tensor)]), &path).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        // The open file stays readable.
        std::fs::remove_file(&path).unwrap();
        checkpoint
    }

    fn values(tensor: &Tensor) -> Vec<Vec<f32>> {
        tensor.to_vec2().unwrap()
    }

    #[test]
    fn cuts_are_what_narrow_would_give() {
        let checkpoint = checkpoint("cuts");
        let whole = checkpoint.read("w", &Cut::Whole).unwrap();
        assert_eq!(whole.dims(), [4, 6]);
        for part in [0..2, 1..4, 2..2] {
            let narrow = |dim| whole.narrow(dim, part.start, part.len()).unwrap();
            let rows = checkpoint.read("w", &Cut::Rows(part.clone())).unwrap();
            assert_eq!(values(&rows), values(&narrow(0)));
            let columns = checkpoint.read("w", &Cut::Columns(part.clone())).unwrap();
            assert_eq!(values(&columns), values(&narrow(1)));
        }
    }

    #[test]
    fn only_the_cut_is_read() {
        let checkpoint = checkpoint("bytes");
        checkpoint.read("w", &Cut::Columns(0..2)).unwrap();
        assert_eq!(checkpoint.read_bytes(), 4 * 2 * 4);
        checkpoint.read("w", &Cut::Rows(3..4)).unwrap();
        assert_eq!(checkpoint.read_bytes(), 4 * 2 * 4 + 6 * 4);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let checkpoint = checkpoint("refused");
        assert!(checkpoint.read("v", &Cut::Whole).is_err());
        assert!(checkpoint.read("w", &Cut::Rows(3..5)).is_err());
        assert!(checkpoint.read("w", &Cut::Columns(6..7)).is_err());
    }
}
