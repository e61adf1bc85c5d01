//! The plan: the one place that decides how a reduction runs.
//!
//! Owns [`plan`], a total function from what is asked to a [`Plan`] that the executor can launch, or a
//! typed [`Refusal`] that reaches every rank before anything is launched. Its matches have no
//! catch-all, so a new algorithm, lane or backend does not compile until it is decided here. Called by
//! the communicator (each reduction) and the executor (the lane, at join). Refuses to look at a
//! machine: what it needs to know comes in [`PlanRequest`].

use allreduce_contract::{Algorithm, Backend, Dtype, Lane, Op, WorldSize};

/// What is to be reduced, and with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlanRequest {
    /// Where the windows live.
    pub backend: Backend,
    /// How the reduction is triggered.
    pub lane: Lane,
    /// Number of ranks.
    pub world_size: WorldSize,
    /// Elements of each rank's tensor.
    pub num_elems: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Operator.
    pub op: Op,
    /// Threads that may share one reduction, at least 1.
    pub max_threads: usize,
}

/// How it is reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Threads that share the work; 1 runs on the thread that owns the communicator.
    pub threads: usize,
}

/// Why it is not reduced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The mean of integers has no exact value.
    #[error("op avg is not defined for the integer dtype {0}: use sum and divide")]
    IntegerAvg(Dtype),
    /// The tensor's length in bytes does not fit 64 bits.
    #[error("{num_elems} elements of {dtype} are more bytes than 64 bits count")]
    TooLarge {
        /// Elements asked for.
        num_elems: u64,
        /// Their type.
        dtype: Dtype,
    },
    /// The backend has no such lane.
    #[error("lane {lane} is not available on backend {backend}; available: {available}")]
    NoSuchLane {
        /// The lane asked for.
        lane: Lane,
        /// The backend in use.
        backend: Backend,
        /// The lanes there are.
        available: &'static str,
    },
    /// This daemon has no such backend.
    #[error("backend {0} is not available in this daemon; available: host")]
    NoSuchBackend(Backend),
}

/// Bytes read (all ranks' tensors) up to which a reduction runs on the communicator's own thread. There
/// one thread takes some 30 us (docs/benchmarks.md, lane "reduce"), a fraction of a round trip; more, and
/// every other call of the communicator would wait for it noticeably.
pub(crate) const INLINE_MAX_BYTES: u64 = 1 << 20;

/// Bytes read for each thread that shares a reduction, at least.
const BYTES_PER_THREAD: u64 = 512 << 10;

/// Decides.
///
/// # Errors
/// A [`Refusal`] says why this cannot be run.
pub(crate) fn plan(request: PlanRequest) -> Result<Plan, Refusal> {
    let PlanRequest {
        backend,
        lane,
        world_size,
        num_elems,
        dtype,
        op,
        max_threads,
    } = request;
    check_lane(backend, lane)?;
    check_op(dtype, op)?;
    let bytes_read = num_elems
        .checked_mul(dtype.size_bytes() as u64)
        .ok_or(Refusal::TooLarge { num_elems, dtype })?
        .saturating_mul(u64::from(world_size.get()));
    if bytes_read <= INLINE_MAX_BYTES {
        return Ok(Plan {
            algorithm: Algorithm::OneShot,
            threads: 1,
        });
    }
    let worth = usize::try_from(bytes_read / BYTES_PER_THREAD).unwrap_or(usize::MAX);
    Ok(Plan {
        algorithm: Algorithm::OneShotChunked,
        threads: worth.clamp(1, max_threads.max(1)),
    })
}

fn check_lane(backend: Backend, lane: Lane) -> Result<(), Refusal> {
    match (backend, lane) {
        (Backend::Host, Lane::Rpc) => Ok(()),
        (Backend::Host, Lane::Resident | Lane::Delegated) => Err(Refusal::NoSuchLane {
            lane,
            backend,
            available: "rpc",
        }),
        (Backend::Cuda, Lane::Rpc | Lane::Resident | Lane::Delegated) => {
            Err(Refusal::NoSuchBackend(backend))
        }
    }
}

fn check_op(dtype: Dtype, op: Op) -> Result<(), Refusal> {
    match (op, dtype) {
        (Op::Avg, Dtype::I32 | Dtype::I64) => Err(Refusal::IntegerAvg(dtype)),
        (Op::Avg, Dtype::F32 | Dtype::F64 | Dtype::F16 | Dtype::Bf16)
        | (Op::Sum | Op::Min | Op::Max | Op::Prod, _) => Ok(()),
    }
}

/// The lane a rank gets, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LaneChoice {
    /// The lane.
    pub lane: Lane,
    /// Why, for people.
    pub reason: String,
}

/// Chooses a lane: the first of `wanted` that the backend has, or the backend's best if none is named.
///
/// # Errors
/// [`Refusal::NoSuchLane`] or [`Refusal::NoSuchBackend`] for the first wanted lane, if none is to be had.
pub(crate) fn choose_lane(backend: Backend, wanted: &[Lane]) -> Result<LaneChoice, Refusal> {
    let Some(first) = wanted.first() else {
        check_lane(backend, Lane::Rpc)?;
        return Ok(LaneChoice {
            lane: Lane::Rpc,
            reason: format!("auto: rpc is the only lane of backend {backend}"),
        });
    };
    match wanted
        .iter()
        .find(|lane| check_lane(backend, **lane).is_ok())
    {
        Some(lane) if lane == first => Ok(LaneChoice {
            lane: *lane,
            reason: "asked for".to_owned(),
        }),
        Some(lane) => Ok(LaneChoice {
            lane: *lane,
            reason: format!("asked for, after {first}, which backend {backend} has not"),
        }),
        None => check_lane(backend, *first).map(|()| LaneChoice {
            lane: *first,
            reason: "asked for".to_owned(),
        }),
    }
}

/// The backend a communicator gets, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendChoice {
    /// The backend.
    pub backend: Backend,
    /// Why, for people.
    pub reason: String,
}

/// Chooses a backend.
///
/// # Errors
/// [`Refusal::NoSuchBackend`].
pub(crate) fn choose_backend(wanted: Option<Backend>) -> Result<BackendChoice, Refusal> {
    match wanted {
        None => Ok(BackendChoice {
            backend: Backend::Host,
            reason: "auto: host is the only backend of this daemon".to_owned(),
        }),
        Some(Backend::Host) => Ok(BackendChoice {
            backend: Backend::Host,
            reason: "asked for".to_owned(),
        }),
        Some(Backend::Cuda) => Err(Refusal::NoSuchBackend(Backend::Cuda)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::select;

    fn requests() -> impl Strategy<Value = PlanRequest> {
        let sizes = prop_oneof![
            0_u64..64,
            (0_u32..64, 0_u64..3)
                .prop_map(|(bit, off)| (1_u64 << bit).wrapping_add(off).wrapping_sub(1)),
            any::<u64>(),
        ];
        (
            select(&Backend::ALL[..]),
            select(&Lane::ALL[..]),
            1_u32..=16,
            sizes,
            select(&Dtype::ALL[..]),
            select(&Op::ALL[..]),
            0_usize..9,
        )
            .prop_map(
                |(backend, lane, world_size, num_elems, dtype, op, max_threads)| PlanRequest {
                    backend,
                    lane,
                    world_size: WorldSize::new(world_size).unwrap(),
                    num_elems,
                    dtype,
                    op,
                    max_threads,
                },
            )
    }

    proptest! {
        #[test]
        fn every_point_is_a_plan_that_can_be_launched_or_a_reasoned_refusal(request in requests()) {
            match plan(request) {
                Ok(plan) => {
                    prop_assert!(plan.threads >= 1 && plan.threads <= request.max_threads.max(1));
                    let inline = plan.algorithm == Algorithm::OneShot;
                    let bytes = request.num_elems as u128
                        * request.dtype.size_bytes() as u128
                        * u128::from(request.world_size.get());
                    prop_assert_eq!(inline, bytes <= u128::from(INLINE_MAX_BYTES));
                    prop_assert!(!inline || plan.threads == 1);
                }
                Err(refusal) => {
                    prop_assert!(!refusal.to_string().is_empty());
                    let refused = request.backend == Backend::Cuda
                        || request.lane != Lane::Rpc
                        || (request.op == Op::Avg && request.dtype.is_integer())
                        || request.num_elems.checked_mul(request.dtype.size_bytes() as u64).is_none();
                    prop_assert!(refused, "{}", refusal);
                }
            }
            prop_assert_eq!(plan(request), plan(request));
        }
    }

    #[test]
    fn lanes_fall_back_only_to_what_was_named() {
        let choice = choose_lane(Backend::Host, &[Lane::Resident, Lane::Rpc]).unwrap();
        assert_eq!(choice.lane, Lane::Rpc);
        assert!(choice.reason.contains("resident"), "{}", choice.reason);
        assert!(choose_lane(Backend::Host, &[Lane::Resident]).is_err());
        assert_eq!(choose_lane(Backend::Host, &[]).unwrap().lane, Lane::Rpc);
        assert!(choose_backend(Some(Backend::Cuda)).is_err());
    }
}
