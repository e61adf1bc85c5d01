//! Where there is no GPU: what asks for one is told so. These run where the others are skipped.

use crate::harness::raw::{block_on, refused, try_open};
use crate::harness::{daemon, join, reduce_well, watchdog};
use allreduce_client::blocking::Client;
use allreduce_client::cuda::{DeviceError, devices};
use allreduce_client::{Backend, JoinError, JoinOptions};
use allreduce_contract::cuda::Unavailable;
use allreduce_contract::v1::{self, ErrorCode};
use std::path::Path;
use tonic::Code;

/// Whether this machine shows a GPU; then there is nothing to test here.
fn shows_gpu() -> bool {
    let files = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"];
    let shows = files.iter().any(|file| Path::new(file).exists());
    if shows {
        println!("nothing to test: this machine shows a GPU");
    }
    shows
}

/// No executor is started for it, and backend host is there all the same.
#[test]
fn the_daemon_refuses_backend_cuda_without_a_gpu() {
    let _watchdog = watchdog();
    if shows_gpu() {
        return;
    }
    let daemon = daemon(&[]);
    let wanted = v1::Backend::Cuda as i32;
    let opened = block_on(try_open(daemon.socket(), "cuda", 1, wanted));
    let words = ["backend cuda", "no NVIDIA GPU", "available: host"];
    let status = opened.unwrap_err();
    refused(
        &status,
        Code::FailedPrecondition,
        ErrorCode::Unsupported,
        &words,
    );
    let communicator = join(daemon.socket(), "cuda", 0, 1);
    assert_eq!(communicator.backend(), Backend::Host);
    reduce_well(&[communicator]);
}

/// A client that asks for backend cuda learns what its own machine lacks, before it dials anything.
#[test]
fn the_client_says_what_is_missing() {
    let _watchdog = watchdog();
    if devices().is_ok_and(|devices| !devices.is_empty()) {
        println!("nothing to test: there is a GPU");
        return;
    }
    let daemon = daemon(&[]);
    let client = Client::connect(daemon.socket()).unwrap();
    let options = JoinOptions::new("cuda", 0, 1).backend(Backend::Cuda);
    match client.join(options) {
        Err(error @ JoinError::Cuda(_)) => {
            println!("{error}");
            assert!(error.to_string().starts_with("backend cuda "), "{error}");
            if let JoinError::Cuda(DeviceError::Unavailable(Unavailable::NoLibrary)) = error {
                assert!(error.to_string().contains("libcuda.so.1"), "{error}");
            }
        }
        other => panic!("{other:?}"),
    }
    // Who does not ask gets backend host.
    let communicator = client.join(JoinOptions::new("auto", 0, 1)).unwrap();
    assert_eq!(communicator.backend(), Backend::Host);
    reduce_well(&[communicator]);
}
