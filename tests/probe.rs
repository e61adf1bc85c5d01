//! `allreduced probe` and topology files, from end to end, on a machine without a GPU (tests/gpu/probe.rs: with one).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use harness::{Ran, Scratch, command, run_within, watchdog};
use std::time::Duration;

fn run(arguments: &[&str]) -> Ran {
    run_within(command(arguments), Duration::from_secs(90))
}

/// The file that a probe wrote is one that the configuration takes.
#[test]
fn what_the_probe_writes_is_a_topology() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let file = scratch.path("topology.toml");
    let ran = run(&[
        "probe",
        "--backend",
        "host",
        "--json",
        "--output",
        file.to_str().unwrap(),
    ]);
    assert!(ran.status.success(), "{}", ran.stderr);
    let json = ran.json();
    assert_eq!(json["schema_version"], 1);
    assert_eq!(json["backend"], "host");
    assert_eq!(json["fabric"], "host");
    assert_eq!(json["output"], file.to_str().unwrap());
    assert_eq!(json["fingerprint"].as_str().unwrap().len(), 16);
    for key in ["core_copy_gbps", "core_copy_far_gbps"] {
        assert!(json["host"][key].as_f64().unwrap() > 0.0, "{json}");
    }
    let several = json["host"]["cores"].as_array().unwrap().len() > 1;
    let flag = json["host"]["core_flag_us"].as_f64();
    assert_eq!(flag.is_some_and(|us| us > 0.0), several, "{json}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("core_copy_gbps = "), "{text}");
    assert!(text.contains("measured by allreduced"), "{text}");
    // Nothing else is left beside it, but what the test itself keeps there.
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 2);

    let config = scratch.path("config.toml");
    std::fs::write(&config, format!("[topology]\nfile = {file:?}\n")).unwrap();
    let checked = run(&["check-config", config.to_str().unwrap()]);
    assert!(checked.status.success(), "{}", checked.stderr);
    // A file that was damaged, or is gone, is a configuration error.
    std::fs::write(
        &file,
        text.replace("core_copy_gbps = ", "core_copy_gbps = -"),
    )
    .unwrap();
    let checked = run(&["check-config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(78));
    let says = |text: &str| {
        assert!(checked.stderr.contains(text), "{}", checked.stderr);
    };
    says("config.toml:2: topology.file: ");
    says("topology.toml:");
    says("rates.core_copy_gbps");
    std::fs::remove_file(&file).unwrap();
    let checked = run(&["check-config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(78));
    let served = run(&["serve", "--config", config.to_str().unwrap()]);
    assert_eq!(served.status.code(), Some(78), "{}", served.stderr);
}

#[test]
fn nothing_is_written_unasked_and_that_is_said() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let mut command = command(&["probe", "--backend", "host"]);
    command.current_dir(&scratch.0);
    let ran = run_within(command, Duration::from_secs(60));
    assert!(ran.status.success(), "{}", ran.stderr);
    assert!(ran.stdout.contains("nothing is written"), "{}", ran.stdout);
    assert!(ran.stdout.contains("one core copies"), "{}", ran.stdout);
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 1);
}

/// Before anything is measured: on a machine with GPUs that takes minutes.
#[test]
fn an_output_that_cannot_be_written_is_refused_first() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    for output in ["/nowhere/t.toml", scratch.0.to_str().unwrap()] {
        // With a probe that would hang, were it to begin.
        let ran = run(&[
            "probe",
            "--inject-hang",
            "--timeout-ms",
            "3600000",
            "--output",
            output,
        ]);
        assert_eq!(ran.status.code(), Some(1));
        assert!(ran.stderr.contains(output), "{}", ran.stderr);
        assert!(ran.stderr.contains("cannot be written"), "{}", ran.stderr);
        assert_eq!(ran.stdout, "");
    }
}

#[test]
fn bad_flags_are_refused() {
    let _watchdog = watchdog();
    for arguments in [
        ["--backend", "gpu"],
        ["--bytes", "0"],
        ["--bytes", "many"],
        ["--timeout-ms", "0"],
        ["--timeout-ms", "-1"],
        ["--output", ""],
    ] {
        let ran = run(&["probe", arguments[0], arguments[1]]);
        assert!(!ran.status.success(), "{arguments:?}");
        assert_ne!(ran.stderr, "", "{arguments:?}");
        assert_eq!(ran.stdout, "", "{arguments:?}");
    }
}

/// A child that hangs, as one does whose driver hangs, costs its deadline and not the probe.
#[test]
fn a_child_that_hangs_is_given_up() {
    let _watchdog = watchdog();
    let hang = ["probe", "--inject-hang", "--timeout-ms", "300", "--backend"];
    let ran = run(&[&hang[..], &["cuda"]].concat());
    assert_eq!(ran.status.code(), Some(1));
    assert!(
        ran.stderr.contains("its process was killed"),
        "{}",
        ran.stderr
    );
    // Left to choose, the probe goes on with what there is, and says why.
    let ran = run(&[&hang[..], &["auto", "--json"]].concat());
    assert!(ran.status.success(), "{}", ran.stderr);
    let json = ran.json();
    assert_eq!(json["backend"], "host");
    let hint = json["hints"][0].as_str().unwrap();
    assert!(hint.contains("its process was killed"), "{json}");
}
