//! The one place that maps errors to gRPC statuses.
//!
//! Owns the choice of code and detail for each cause. Every service calls [`ToStatus::to_status`].

use crate::communicator::{BufferError, CallError, EndCause, EpochEnd, GpuError, JoinError};
use crate::executor::{Stopped, exhausted};
use crate::plan::Refusal;
use crate::supervisor::OpenError;
use allreduce_contract::Rank;
use allreduce_contract::status::status_with_detail;
use allreduce_contract::v1::{BadEnum, ErrorCode, ErrorDetail};
use std::fmt::Display;
use tonic::{Code, Status};

/// An error that can be answered.
pub(crate) trait ToStatus: Display {
    /// The gRPC code and the detail.
    fn parts(&self) -> (Code, ErrorDetail);

    /// The status, with the error's words.
    fn to_status(&self) -> Status {
        let (code, detail) = self.parts();
        status_with_detail(code, self.to_string(), &detail)
    }
}

fn detail(code: ErrorCode) -> ErrorDetail {
    ErrorDetail {
        code: code as i32,
        ..ErrorDetail::default()
    }
}

fn about(code: ErrorCode, rank: Rank) -> ErrorDetail {
    ErrorDetail {
        rank: Some(rank.get()),
        ..detail(code)
    }
}

fn amounts(code: ErrorCode, needed: u64, available: u64) -> ErrorDetail {
    ErrorDetail {
        needed,
        available,
        ..detail(code)
    }
}

fn end_detail(code: ErrorCode, end: &EpochEnd) -> ErrorDetail {
    ErrorDetail {
        rank: end.cause.rank().map(Rank::get),
        missing_ranks: end.cause.missing().iter().map(|rank| rank.get()).collect(),
        epoch: end.epoch,
        ..detail(code)
    }
}

impl ToStatus for EpochEnd {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self.cause {
            EndCause::JoinTimeout { .. } => {
                (Code::DeadlineExceeded, end_detail(ErrorCode::Timeout, self))
            }
            EndCause::Ineligible { .. } => (
                Code::FailedPrecondition,
                end_detail(ErrorCode::NotEligible, self),
            ),
            EndCause::RankGone { .. }
            | EndCause::Timeout { .. }
            | EndCause::Gpu { .. }
            | EndCause::Lane { .. } => (Code::Aborted, end_detail(ErrorCode::EpochEnded, self)),
        }
    }
}

impl ToStatus for Refusal {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self {
            Refusal::IntegerAvg(_)
            | Refusal::TooLarge { .. }
            | Refusal::NoKernel { .. }
            | Refusal::NotStaying { .. }
            | Refusal::NoSuchAlgorithm { .. }
            | Refusal::OnlyDelegated(_)
            | Refusal::OnlyRpc { .. }
            | Refusal::NotReachable { .. }
            | Refusal::NoHostWindows
            | Refusal::NoIslands { .. }
            | Refusal::NotDelegated(_)
            | Refusal::NotResident(_) => (Code::InvalidArgument, detail(ErrorCode::Refused)),
            Refusal::TooFewBlocks { .. }
            | Refusal::NotTested
            | Refusal::NoCommonLane
            | Refusal::NeedsMps { .. }
            | Refusal::NoPeerAccess { .. }
            | Refusal::NoResident
            | Refusal::NoBlocksLeft { .. }
            | Refusal::BlocksNotCounted
            | Refusal::NoSuchBackend { .. } => {
                (Code::FailedPrecondition, detail(ErrorCode::Unsupported))
            }
        }
    }
}

impl ToStatus for JoinError {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self {
            JoinError::BadToken => (Code::Unauthenticated, detail(ErrorCode::BadToken)),
            JoinError::Abi { .. } => (Code::FailedPrecondition, detail(ErrorCode::AbiMismatch)),
            JoinError::WorldSizeDiffers { .. } | JoinError::BadRank(_) | JoinError::BadLane(_) => {
                (Code::InvalidArgument, detail(ErrorCode::InvalidField))
            }
            JoinError::RankTaken(rank) => (Code::AlreadyExists, about(ErrorCode::RankTaken, *rank)),
            JoinError::ArenaLimit { asked, limit, .. } => (
                Code::ResourceExhausted,
                amounts(ErrorCode::Limit, *asked, *limit),
            ),
            JoinError::Memory { source, .. } => match exhausted(source) {
                Some((needed, available)) => (
                    Code::ResourceExhausted,
                    amounts(ErrorCode::NoMemory, needed, available),
                ),
                None => (Code::Internal, detail(ErrorCode::Internal)),
            },
            JoinError::Gpu { source, .. } => match source {
                GpuError::NoMemory { needed, available } => (
                    Code::ResourceExhausted,
                    amounts(ErrorCode::NoMemory, *needed, *available),
                ),
                GpuError::Memory(source) => match exhausted(source) {
                    Some((needed, available)) => (
                        Code::ResourceExhausted,
                        amounts(ErrorCode::NoMemory, needed, available),
                    ),
                    None => (Code::Internal, detail(ErrorCode::Internal)),
                },
                GpuError::Unavailable(_)
                | GpuError::UnknownDevice { .. }
                | GpuError::NoKernels(_)
                | GpuError::NotMapped(_)
                | GpuError::Call { .. } => {
                    (Code::FailedPrecondition, detail(ErrorCode::Unsupported))
                }
            },
            JoinError::NoSession(_) => (Code::Internal, detail(ErrorCode::Internal)),
            JoinError::Draining => (Code::Unavailable, detail(ErrorCode::Unavailable)),
        }
    }
}

impl ToStatus for BufferError {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self {
            BufferError::UnknownSession(_) => (Code::NotFound, detail(ErrorCode::UnknownSession)),
            BufferError::UnknownBuffer { .. } | BufferError::UnknownMemory { .. } => {
                (Code::NotFound, detail(ErrorCode::UnknownBuffer))
            }
            BufferError::OutOfBounds { .. } => {
                (Code::InvalidArgument, detail(ErrorCode::OutOfBounds))
            }
            BufferError::Misaligned(_) => (Code::InvalidArgument, detail(ErrorCode::Misaligned)),
            BufferError::BadMemory(_) => (Code::InvalidArgument, detail(ErrorCode::BadMemory)),
            BufferError::BadHandle(_) => (Code::InvalidArgument, detail(ErrorCode::InvalidField)),
            BufferError::WrongBackend { .. } => {
                (Code::FailedPrecondition, detail(ErrorCode::Unsupported))
            }
            BufferError::ArenaFull { needed, available } => (
                Code::ResourceExhausted,
                amounts(ErrorCode::NoMemory, *needed, *available),
            ),
            BufferError::Limit { limit, .. } => (
                Code::ResourceExhausted,
                amounts(ErrorCode::Limit, limit.saturating_add(1), *limit),
            ),
            BufferError::EpochEnded(end) => (Code::Aborted, end_detail(ErrorCode::EpochEnded, end)),
        }
    }
}

impl ToStatus for CallError {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self {
            CallError::UnknownSession(_) => (Code::NotFound, detail(ErrorCode::UnknownSession)),
            CallError::WrongEpoch { session, .. } => (
                Code::InvalidArgument,
                ErrorDetail {
                    epoch: *session,
                    ..detail(ErrorCode::InvalidField)
                },
            ),
            CallError::NotInLane => (Code::FailedPrecondition, detail(ErrorCode::Unsupported)),
            CallError::NotReady { missing } => (
                Code::FailedPrecondition,
                ErrorDetail {
                    missing_ranks: missing.iter().map(|rank| rank.get()).collect(),
                    ..detail(ErrorCode::NotReady)
                },
            ),
            CallError::BadSequence { .. } => (Code::OutOfRange, detail(ErrorCode::BadSequence)),
            CallError::Missing { rank, .. }
            | CallError::BadEnum { rank, .. }
            | CallError::BadStream { rank, .. } => {
                (Code::InvalidArgument, about(ErrorCode::InvalidField, *rank))
            }
            CallError::UnknownBuffer { rank, .. } => {
                (Code::NotFound, about(ErrorCode::UnknownBuffer, *rank))
            }
            CallError::OutOfBounds { rank, .. } => {
                (Code::InvalidArgument, about(ErrorCode::OutOfBounds, *rank))
            }
            CallError::Misaligned { rank, .. } => {
                (Code::InvalidArgument, about(ErrorCode::Misaligned, *rank))
            }
            CallError::Overlap { rank } => {
                (Code::InvalidArgument, about(ErrorCode::Overlap, *rank))
            }
            CallError::NotSignalled { rank, .. } => (
                Code::FailedPrecondition,
                about(ErrorCode::NotSignalled, *rank),
            ),
            CallError::Mismatch { other, .. } => {
                (Code::InvalidArgument, about(ErrorCode::Mismatch, *other))
            }
            CallError::Plan(refusal) => refusal.parts(),
            CallError::Timeout(end) => {
                (Code::DeadlineExceeded, end_detail(ErrorCode::Timeout, end))
            }
            CallError::EpochEnded(end) => (Code::Aborted, end_detail(ErrorCode::EpochEnded, end)),
        }
    }
}

impl ToStatus for OpenError {
    fn parts(&self) -> (Code, ErrorDetail) {
        match self {
            OpenError::BadName(_) | OpenError::BadWorldSize(_) | OpenError::BadBackend(_) => {
                (Code::InvalidArgument, detail(ErrorCode::InvalidField))
            }
            OpenError::Differs { .. } => (
                Code::FailedPrecondition,
                detail(ErrorCode::CommunicatorDiffers),
            ),
            OpenError::Plan(refusal) => refusal.parts(),
            OpenError::Limit { limit } => (
                Code::ResourceExhausted,
                amounts(
                    ErrorCode::Limit,
                    u64::from(*limit).saturating_add(1),
                    u64::from(*limit),
                ),
            ),
            OpenError::Draining | OpenError::NotStarted { .. } => {
                (Code::Unavailable, detail(ErrorCode::Unavailable))
            }
            OpenError::Unknown(_) => (Code::NotFound, detail(ErrorCode::UnknownCommunicator)),
        }
    }
}

impl ToStatus for Stopped {
    fn parts(&self) -> (Code, ErrorDetail) {
        (Code::Unavailable, detail(ErrorCode::Unavailable))
    }
}

impl ToStatus for BadEnum {
    fn parts(&self) -> (Code, ErrorDetail) {
        (Code::InvalidArgument, detail(ErrorCode::InvalidField))
    }
}

/// A message was not what the call takes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadMessage(pub(crate) &'static str);

impl ToStatus for BadMessage {
    fn parts(&self) -> (Code, ErrorDetail) {
        (Code::InvalidArgument, detail(ErrorCode::InvalidField))
    }
}
