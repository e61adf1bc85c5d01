//! Before Ready: ranks that cannot take part, and one verdict for all.

use crate::harness::daemon;
use crate::harness::raw::{NO_HEARTBEATS, block_on, hello, info, refused, refused_hello};
use crate::rank::{gpu_of, gpus, join_all, reduce_well};
use crate::raw::{Joining, open};
use allreduce_contract::cuda::Context;
use allreduce_contract::v1::ErrorCode;
use tonic::Code;

/// A device that the daemon does not see is refused with those that it does see.
#[test]
fn an_unknown_device_is_named_with_those_that_are_visible() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_HEARTBEATS]);
    block_on(async {
        let opened = open(daemon.socket(), "unknown", 1).await;
        for uuid in [
            "GPU-00000000-0000-0000-0000-000000000000",
            "MIG-00000000-0000-0000-0000-000000000000",
            "0",
            "",
        ] {
            let mut hello = hello(&opened, 0, 1);
            uuid.clone_into(&mut hello.device_uuid);
            let status = refused_hello(&opened, hello).await;
            println!("{}", status.message());
            let quoted = format!("{uuid:?}");
            let words = [&quoted, gpu_of(&devices, 0).uuid(), "CUDA_VISIBLE_DEVICES"];
            refused(
                &status,
                Code::FailedPrecondition,
                ErrorCode::Unsupported,
                &words,
            );
        }
    });
    let joined = join_all(daemon.socket(), "unknown", 1, &devices);
    reduce_well(&joined);
}

/// A rank that says that it cannot map its window: every rank gets the same verdict, which names it. So does one
/// that says that it has, without the proof.
#[test]
fn a_rank_that_cannot_map_its_window_is_named_to_all() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let daemon = daemon(&[NO_HEARTBEATS]);
    let contexts: Vec<_> = (0..2)
        .map(|rank| Context::retain(gpu_of(&devices, rank).clone()).unwrap())
        .collect();
    // What rank 1 says, and what everybody then hears.
    let faults = [
        ("CUDA_ERROR_TEST", "CUDA_ERROR_TEST"),
        ("", "does not arrive"),
    ];
    for (error, heard) in faults {
        block_on(async {
            let opened = open(daemon.socket(), "verdict", 2).await;
            let mut ranks = Vec::new();
            for (rank, context) in (0..).zip(&contexts) {
                ranks.push(Joining::start(&opened, rank, 2, context.device().uuid()).await);
            }
            let mapping = ranks[0].map(&contexts[0]);
            ranks[0].mapped("");
            ranks[1].mapped(error);
            for rank in &mut ranks {
                let status = rank.refusal().await;
                println!("{}", status.message());
                let words = ["rank 1", heard];
                let detail = refused(
                    &status,
                    Code::FailedPrecondition,
                    ErrorCode::NotEligible,
                    &words,
                );
                assert_eq!(detail.rank, Some(1));
            }
            drop(mapping);
        });
    }
    assert_eq!(info(daemon.socket(), "verdict").unwrap().incarnation, 1);
    let joined = join_all(daemon.socket(), "verdict", 2, &devices);
    assert_eq!(joined[0].communicator.epoch(), 3);
    reduce_well(&joined);
}
