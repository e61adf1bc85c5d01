//! `allreduced demo`: the main job end to end, and that its verifier can fail.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use harness::{Ran, Scratch, command, run_within, watchdog};
use std::path::Path;
use std::time::Duration;

fn demo(arguments: &[&str]) -> Ran {
    let mut command = command(&["demo"]);
    command.args(arguments);
    run_within(command, Duration::from_secs(60))
}

/// What every successful demo shows; answers its JSON.
fn verified(arguments: &[&str], reductions: u64) -> serde_json::Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let ran = demo(&all);
    let json = ran.json();
    assert_eq!(ran.status.code(), Some(0), "{json:#} {}", ran.stderr);
    assert_eq!(json["reductions"], reductions, "{json:#}");
    assert_eq!(json["verified"], reductions, "{json:#}");
    assert_eq!(json["mismatched"], 0, "{json:#}");
    json
}

#[test]
fn the_default_workload_is_verified() {
    let _watchdog = watchdog();
    let json = verified(&["--steps", "2"], 244);
    for (key, value) in [
        ("backend", serde_json::json!("host")),
        ("world_size", 4.into()),
        ("lane", "delegated".into()),
        ("algorithm", "two_shot".into()),
        ("dtype", "bf16".into()),
        ("bytes", 43_008.into()),
        ("schema_version", 1.into()),
    ] {
        assert_eq!(json[key], value, "{key}");
    }
    let positive = |group: &str, key: &str| {
        let value = json[group][key].as_f64();
        assert!(value.is_some_and(|value| value > 0.0), "{group}.{key}");
        value.unwrap()
    };
    assert!(positive("step_us", "p50") <= positive("step_us", "p99"));
    assert!(positive("reduction_us", "p50") <= positive("reduction_us", "p99"));
    assert!(positive("reduction_us", "p99") <= positive("reduction_us", "max"));
}

/// The demo's whole worth is that it notices. Broken by a verifier that compares with nothing, only
/// across ranks, or on one rank only.
#[test]
fn one_flipped_bit_is_found() {
    let _watchdog = watchdog();
    for (world_size, bytes, fault) in [
        ("2", "43008", "5:1:3"),
        ("4", "43008", "5:1:3"),
        // The last bit of the last rank's last result.
        ("4", "1024", "122:3:8191"),
        ("1", "1024", "1:0:0"),
    ] {
        let ran = demo(&[
            "--steps",
            "1",
            "--json",
            "--world-size",
            world_size,
            "--bytes",
            bytes,
            "--inject-bit-flip",
            fault,
        ]);
        let json = ran.json();
        assert_eq!(ran.status.code(), Some(1), "{json:#}");
        assert_eq!(json["mismatched"], 1, "{world_size} {fault}: {json:#}");
        assert_eq!(json["verified"], 121, "{world_size} {fault}: {json:#}");
        assert_eq!(json["reductions"], 122);
    }
    let ran = demo(&[
        "--steps",
        "1",
        "--bytes",
        "64",
        "--inject-bit-flip",
        "5:1:3",
    ]);
    assert_eq!(ran.status.code(), Some(1));
    assert!(
        ran.stdout.contains("verified 121 of 122, 1 mismatched"),
        "{}",
        ran.stdout
    );
}

#[test]
fn other_shapes_are_verified() {
    let _watchdog = watchdog();
    for (world_size, dtype, op, bytes) in [
        (1, "f32", "sum", "4"),
        (3, "f32", "avg", "1228"),
        (3, "f64", "min", "56"),
        (2, "f16", "max", "30002"),
        (2, "i32", "prod", "8188"),
        (5, "i64", "sum", "24"),
        // Nothing to reduce.
        (2, "bf16", "sum", "0"),
    ] {
        let ranks = world_size.to_string();
        let arguments = [
            "--steps",
            "1",
            "--world-size",
            &ranks,
            "--dtype",
            dtype,
            "--op",
            op,
            "--bytes",
            bytes,
        ];
        let json = verified(&arguments, 122);
        assert_eq!(json["world_size"], world_size);
        assert_eq!(json["dtype"], dtype);
        assert_eq!(json["op"], op);
        assert_eq!(json["bytes"].to_string(), bytes);
    }
}

#[test]
fn a_workload_file_is_run() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let file = scratch.file(
        "w.toml",
        "about = \"mixed\"\n\
         [[reductions]]\nrepeat = 3\nop = \"sum\"\ndtype = \"bf16\"\nbytes = 514\n\
         [[reductions]]\nop = \"max\"\ndtype = \"f32\"\nbytes = 4\n\
         # Above the bound of inline reductions.\n\
         [[reductions]]\nop = \"sum\"\ndtype = \"bf16\"\nbytes = 600002\n",
    );
    let json = verified(
        &[
            "--workload",
            file.to_str().unwrap(),
            "--steps",
            "4",
            "--world-size",
            "2",
            "--lane",
            "rpc",
        ],
        20,
    );
    assert_eq!(json["dtype"], "bf16");
    assert_eq!(json["bytes"], 514);
    let kinds = json["kinds"].as_array().unwrap();
    let large = kinds.iter().find(|kind| kind["bytes"] == 600_002).unwrap();
    assert_eq!(large["algorithm"], "one_shot_chunked");
    assert_eq!(large["reductions"], 4);
}

#[test]
fn every_shipped_decode_workload_is_verified() {
    let _watchdog = watchdog();
    for name in [
        "kimi-k2.5-verify",
        "llama-3-70b-decode-1",
        "llama-3-70b-decode-8",
    ] {
        for lane in ["delegated", "resident", "rpc"] {
            let ran = demo(&[
                "--workload",
                name,
                "--steps",
                "1",
                "--world-size",
                "2",
                "--lane",
                lane,
                "--json",
            ]);
            let json = ran.json();
            assert_eq!(ran.status.code(), Some(0), "{name}: {json:#}");
            assert_eq!(json["workload"], name);
            assert_eq!(json["lane"], lane);
            assert_eq!(json["verified"], json["reductions"]);
            assert!(json["reductions"].as_u64().unwrap() > 0);
        }
    }
}

#[test]
fn the_table_says_backend_lane_and_verdict() {
    let _watchdog = watchdog();
    let ran = demo(&["--steps", "1", "--world-size", "2", "--bytes", "512"]);
    assert_eq!(ran.status.code(), Some(0), "{}", ran.stderr);
    for words in [
        "backend        host",
        "lane           delegated (auto: ranks reduce",
        "one_shot",
        "verified 122 of 122",
        "arrival skew   rank 1",
    ] {
        assert!(ran.stdout.contains(words), "no {words:?} in {}", ran.stdout);
    }
    // No progress bar where nobody watches.
    assert!(ran.stderr.is_empty(), "{}", ran.stderr);
}

/// Broken by an argument that is ignored, or that fails without saying why.
#[test]
fn bad_arguments_are_refused_with_a_reason() {
    let has_gpu = Path::new("/dev/nvidiactl").exists();
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let bad_workload = scratch.file("w.toml", "[[reductions]]\nop = \"sum\"\nbits = 5\n");
    for (arguments, reason) in [
        (&["--world-size", "0"][..], "world_size 0 is not in 1..=16"),
        (&["--world-size", "17"], "world_size 17 is not in 1..=16"),
        (&["--bytes", "7"], "no whole number of bf16"),
        (&["--dtype", "bf17"], "unknown dtype"),
        (&["--op", "xor"], "unknown op"),
        (
            &["--dtype", "i32", "--op", "avg", "--bytes", "8"],
            "avg is not defined",
        ),
        (&["--lane", "warp"], "auto"),
        (
            &["--lane", "delegated", "--inject-bit-flip", "1:0:0"],
            "lane rpc only",
        ),
        (
            &["--backend", "cuda", "--dtype", "f64"],
            if has_gpu {
                "use backend host"
            } else {
                "backend cuda: no"
            },
        ),
        (&["--steps", "0"], "--steps"),
        (&["--workload", "no-such"], "neither a shipped workload"),
        (
            &["--workload", bad_workload.to_str().unwrap()],
            "unknown field `bits`",
        ),
        (
            &["--workload", "kimi-k2.5-verify", "--bytes", "8"],
            "--bytes",
        ),
        (&["--inject-bit-flip", "1:2"], "REDUCTION:RANK:BIT"),
    ] {
        let mut all = vec!["--json"];
        all.extend(arguments);
        let ran = demo(&all);
        assert!(!ran.status.success(), "{arguments:?}");
        assert!(
            ran.stderr.contains(reason),
            "{arguments:?}: no {reason:?} in {}",
            ran.stderr
        );
        assert!(ran.stdout.is_empty(), "{arguments:?}: {}", ran.stdout);
    }
}
