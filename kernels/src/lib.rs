//! Host reductions: the element-wise arithmetic of an all-reduce, at memory speed.
//!
//! Owns the loops that read one element from every rank, reduce them in rank order and store the
//! result, and the scalar reference that says what each bit of it must be. Called by the daemon's
//! host backend, its verifier and its `bench`. Refuses to know about threads, windows, flags or
//! epochs: the caller says which bytes are whose and when they are complete.
//!
//! The rooms:
//!
//! | module | what | unsafe |
//! | --- | --- | --- |
//! | [`reduce`](mod@reduce) | arguments in, kernel chosen once, refusals | the calls into kernels |
//! | [`path`] | which instruction sets this machine has | no |
//! | [`reference`](mod@reference) | the numeric rules, on slices of values | no |
//! | `arithmetic`, `number` | the operators, and what they mean for one value | no |
//! | `scalar` | the loop that every machine has | raw loads and stores |
//! | `simd` | the AVX2 and AVX-512 loops | raw loads and stores, CPU features |
//! | [`chunk`](mod@chunk) | splitting elements among threads | no |
//! | [`measure`] | a reduction against a memcpy, timed in one run | buffers of its own |
//!
//! Floating point relies on the default control word (round to nearest even, no flush to zero),
//! as all Rust code does.

mod arithmetic;
pub mod chunk;
mod job;
pub mod measure;
mod number;
pub mod path;
pub mod reduce;
pub mod reference;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

pub use chunk::chunk;
pub use number::{Bf16, Element, F16, Number};
pub use path::Path;
pub use reduce::{ReduceError, Reducer, Stores, reduce};
