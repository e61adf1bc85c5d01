//! The generated messages, clients and servers of `allreduced.v1`, and their conversions to the
//! vocabulary.
//!
//! Wire enums are open (any i32 may arrive); the vocabulary's are closed. The `TryFrom`s here are the
//! one place where the one becomes the other.

#[allow(missing_docs, unreachable_pub, clippy::all)]
mod generated {
    tonic::include_proto!("allreduced.v1");
}

pub use generated::*;

/// The encoded `FileDescriptorSet` of the package, comments included, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/allreduced.v1.fds"));

/// A wire enum held no value of the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value} is not one of the values of allreduced.v1.{wire_enum}")]
pub struct BadEnum {
    /// The field's name.
    pub field: &'static str,
    /// The number that arrived.
    pub value: i32,
    /// The wire enum's name.
    pub wire_enum: &'static str,
}

macro_rules! wire_enum {
    ($wire:ident, $field:literal, $($name:ident),+) => {
        impl From<crate::$wire> for $wire {
            fn from(value: crate::$wire) -> Self {
                match value {
                    $(crate::$wire::$name => Self::$name,)+
                }
            }
        }

        impl TryFrom<$wire> for crate::$wire {
            type Error = BadEnum;

            fn try_from(value: $wire) -> Result<Self, BadEnum> {
                match value {
                    $($wire::$name => Ok(Self::$name),)+
                    $wire::Unspecified => Err(BadEnum {
                        field: $field,
                        value: value as i32,
                        wire_enum: stringify!($wire),
                    }),
                }
            }
        }

        impl crate::$wire {
            /// Reads the wire value of a field of this type.
            ///
            /// # Errors
            /// When it is unspecified or unknown.
            pub fn from_wire(value: i32) -> Result<Self, BadEnum> {
                $wire::try_from(value)
                    .map_err(|_| BadEnum {
                        field: $field,
                        value,
                        wire_enum: stringify!($wire),
                    })?
                    .try_into()
            }
        }
    };
}

wire_enum!(Dtype, "dtype", F32, F64, F16, Bf16, I32, I64);
wire_enum!(Op, "op", Sum, Avg, Min, Max, Prod);
wire_enum!(Lane, "lane", Rpc, Resident, Delegated);
wire_enum!(Backend, "backend", Host, Cuda);
wire_enum!(
    Algorithm,
    "algorithm",
    OneShot,
    OneShotChunked,
    TwoShot,
    OneShotPush,
    OneShotPull,
    OneShotPullInband,
    TwoShotPush,
    TwoShotPull,
    TwoShotPullInband,
    Hierarchical,
    HostStaged,
    CopyEngineRing
);

#[cfg(test)]
mod tests {
    #[test]
    fn wire_enums_round_trip_and_refuse_the_rest() {
        for dtype in crate::Dtype::ALL {
            let wire = super::Dtype::from(dtype) as i32;
            assert_eq!(crate::Dtype::from_wire(wire), Ok(dtype));
        }
        for value in [0, 7, -1, i32::MAX] {
            let error = crate::Dtype::from_wire(value).map_err(|error| error.value);
            assert_eq!(error, Err(value));
        }
    }
}
