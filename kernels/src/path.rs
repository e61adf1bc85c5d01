//! Which instruction sets a reduction can run on.
//!
//! Owns the run-time detection. Called by [`Reducer`](crate::Reducer), which takes the best path, and by tests and
//! `bench`, which take each. Refuses to pick by data or size.

use std::fmt;

/// One implementation of every reduction. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// Portable code; the compiler may use the target's baseline vectors.
    Scalar,
    /// 256-bit registers: AVX2 and F16C.
    Avx2,
    /// 512-bit registers: AVX-512 F, BW, VL and DQ.
    Avx512,
}

impl Path {
    /// Every path, the best last.
    pub const ALL: [Path; 3] = [Path::Scalar, Path::Avx2, Path::Avx512];

    /// The best path of this machine. The detection behind it is done once per process.
    pub fn best() -> Path {
        Path::ALL
            .into_iter()
            .rfind(|path| path.is_available())
            .unwrap_or(Path::Scalar)
    }

    /// Whether this machine can run the path.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        match self {
            Path::Scalar => true,
            Path::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c"),
            Path::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
        }
    }

    /// Whether this machine can run the path.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Path::Scalar
    }

    /// The lower-case name used in tables and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Path::Scalar => "scalar",
            Path::Avx2 => "avx2",
            Path::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
