//! Errors on the wire: a gRPC status with an [`ErrorDetail`] in its details.
//!
//! Owns the encoding (google.rpc.Status in `grpc-status-details-bin`, as in the gRPC richer error
//! model, <https://grpc.io/docs/guides/error/>). The daemon's one mapping of errors calls
//! [`status_with_detail`]; the client calls [`detail_of`]. Nobody parses messages.

use crate::v1::ErrorDetail;
use prost::Message;

/// google.rpc.Status, the three fields of it.
#[derive(Clone, PartialEq, prost::Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

const DETAIL_TYPE_URL: &str = "type.googleapis.com/allreduced.v1.ErrorDetail";

/// A status that carries a detail.
pub fn status_with_detail(
    code: tonic::Code,
    message: impl Into<String>,
    detail: &ErrorDetail,
) -> tonic::Status {
    let message = message.into();
    let rpc_status = RpcStatus {
        code: code as i32,
        message: message.clone(),
        details: vec![prost_types::Any {
            type_url: DETAIL_TYPE_URL.to_owned(),
            value: detail.encode_to_vec(),
        }],
    };
    tonic::Status::with_details(code, message, rpc_status.encode_to_vec().into())
}

/// The detail of a status, if it carries one that can be read.
pub fn detail_of(status: &tonic::Status) -> Option<ErrorDetail> {
    let rpc_status = RpcStatus::decode(status.details()).ok()?;
    let any = rpc_status
        .details
        .iter()
        .find(|any| any.type_url == DETAIL_TYPE_URL)?;
    ErrorDetail::decode(any.value.as_slice()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::ErrorCode;

    #[test]
    fn details_survive_the_wire() {
        let detail = ErrorDetail {
            code: ErrorCode::Timeout as i32,
            missing_ranks: vec![1, 3],
            epoch: 7,
            ..ErrorDetail::default()
        };
        let status = status_with_detail(tonic::Code::DeadlineExceeded, "late", &detail);
        assert_eq!(detail_of(&status), Some(detail));
        assert_eq!(detail_of(&tonic::Status::internal("plain")), None);
    }
}
