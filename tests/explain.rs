//! `allreduced explain` and `tune`, from end to end, on a machine without a GPU.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use allreduce_client::blocking::Client;
use allreduce_client::{AllReduceOptions, JoinOptions, Lane, Op};
use harness::{Ran, Scratch, command, daemon, ranks, run_within, watchdog};
use serde_json::Value;
use std::time::Duration;

const PRESETS: [&str; 10] = [
    "v100x4-plx",
    "rtxpro6000x4-gen5-switch",
    "rtxpro6000x8-gen5-3switch",
    "sm120x8-gen5-2socket",
    "a800x8-gen4-2x4",
    "l40sx8-gen4",
    "h100x8-nvlink",
    "4090x4-nop2p",
    "gen5x8-one-root",
    "rtxpro6000x8-gen5-4vs-2socket",
];

fn run(arguments: &[&str]) -> Ran {
    run_within(command(arguments), Duration::from_secs(120))
}

fn explain(arguments: &[&str]) -> Value {
    let ran = run(&[&["explain", "--json"], arguments].concat());
    assert!(ran.status.success(), "{arguments:?}: {}", ran.stderr);
    ran.json()
}

#[test]
fn every_preset_is_planned_and_explained() {
    let _watchdog = watchdog();
    for preset in PRESETS {
        for bytes in ["0", "2", "43008", "67108864"] {
            let answer = explain(&["--topology", preset, "--bytes", bytes]);
            assert_eq!(answer["schema_version"], 1);
            assert_eq!(answer["topology"], preset);
            let algorithm = answer["algorithm"].as_str().unwrap();
            let predicted = answer["predicted_us"].as_f64().unwrap();
            let floor = answer["floor_us"].as_f64().unwrap();
            assert!(
                predicted >= floor && floor > 0.0,
                "{preset} {bytes}: {answer}"
            );
            assert!(!answer["reason"].as_str().unwrap().is_empty());
            let candidates = answer["candidates"].as_array().unwrap();
            assert_eq!(candidates.len(), 9, "{answer}");
            for candidate in candidates {
                let is_refused = candidate["refused"].is_string();
                assert_eq!(
                    candidate["predicted_us"].is_null(),
                    is_refused,
                    "{candidate}"
                );
                // The chosen one is the cheapest that is not refused.
                if !is_refused {
                    assert!(
                        candidate["predicted_us"].as_f64().unwrap() >= predicted,
                        "{answer}"
                    );
                }
            }
            let chosen = candidates.iter().find(|one| one["algorithm"] == algorithm);
            assert_eq!(chosen.unwrap()["predicted_us"].as_f64(), Some(predicted));
        }
        let words = run(&["explain", "--topology", preset]);
        for word in ["topology ", "plan ", "predicted ", "floor ", "candidate "] {
            assert!(words.stdout.contains(word), "{word}: {}", words.stdout);
        }
    }
}

/// The README shows what is printed.
#[test]
fn the_readme_is_true() {
    let _watchdog = watchdog();
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    let call = "$ allreduced explain --topology gen5x8-one-root\n";
    let (_, shown) = readme.split_once(call).unwrap();
    let (shown, _) = shown.split_once("```").unwrap();
    let ran = run(&["explain", "--topology", "gen5x8-one-root"]);
    assert_eq!(ran.stdout.trim_end(), shown.trim_end());
}

/// The fault that this product answers: PCIe, more than two GPUs, and what engines do there.
#[test]
fn eight_gpus_on_pcie_take_two_shots_near_the_floor() {
    let _watchdog = watchdog();
    let preset = ["--topology", "gen5x8-one-root"];
    let answer = explain(&preset);
    assert_eq!(answer["fabric"], "pcie_one_root");
    assert_eq!(answer["algorithm"], "two_shot_push");
    assert!(answer["predicted_us"].as_f64().unwrap() <= 8.5, "{answer}");
    let floor = answer["floor_us"].as_f64().unwrap();
    assert!((floor - 6.7).abs() < 0.05, "{answer}");
    let steps = explain(&[&preset[..], &["--simulate"]].concat());
    assert_eq!(steps["reductions"], 122);
    let auto = &steps["steps"][0];
    for key in ["simulated_us", "predicted_us"] {
        assert!(auto[key].as_f64().unwrap() <= 1050.0, "{steps}");
    }
    // No other does better.
    for step in steps["steps"].as_array().unwrap() {
        if let Some(us) = step["simulated_us"].as_f64() {
            assert!(
                us >= auto["simulated_us"].as_f64().unwrap() * 0.999,
                "{steps}"
            );
        }
    }
}

#[test]
fn without_peer_access_there_is_a_way_and_it_is_said() {
    let _watchdog = watchdog();
    let answer = explain(&["--topology", "4090x4-nop2p"]);
    assert_eq!(answer["fabric"], "no_peer_access");
    assert_eq!(answer["lane"], "rpc");
    assert_eq!(answer["algorithm"], "host_staged");
    assert!(
        answer["lane_reason"]
            .as_str()
            .unwrap()
            .contains("peer access")
    );
    let asked = explain(&["--topology", "4090x4-nop2p", "--lane", "delegated"]);
    assert!(asked["algorithm"].is_null(), "{asked}");
    assert!(asked["reason"].as_str().unwrap().contains("peer access"));
    let large = explain(&["--topology", "4090x4-nop2p", "--bytes", "67108864"]);
    assert_eq!(large["algorithm"], "copy_engine_ring");
}

#[test]
fn sweeps_and_pictures() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    for (name, more) in [("map.svg", &["--sweep"][..]), ("lines.svg", &[][..])] {
        let file = scratch.path(name);
        let file = file.to_str().unwrap();
        let arguments = [
            "explain",
            "--topology",
            "sm120x8-gen5-2socket",
            "--plot",
            file,
        ];
        let ran = run(&[&arguments[..], more].concat());
        assert!(ran.status.success(), "{}", ran.stderr);
        let picture = std::fs::read_to_string(file).unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"));
        assert!(picture.contains("two_shot_push"), "{name}");
    }
    let map = explain(&["--topology", "sm120x8-gen5-2socket", "--sweep"]);
    let rows = map["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    for row in rows {
        for cell in row["cells"].as_array().unwrap() {
            assert!(
                cell["algorithm"].is_string() && cell["predicted_us"].as_f64() > Some(0.0),
                "{cell}"
            );
        }
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let bad = scratch.path("bad.toml");
    std::fs::write(&bad, "schema_version = 1\nname = \"x\"\ngpu = 3\n").unwrap();
    let bad = bad.to_str().unwrap();
    let nowhere = scratch.path("nowhere");
    let nowhere = nowhere.join("x.svg");
    let nowhere = nowhere.to_str().unwrap();
    for (arguments, says) in [
        (
            &["--topology", "gen6x99"][..],
            "neither a preset (gen5x8-one-root",
        ),
        (&["--topology", bad], "bad.toml"),
        (&["--world-size", "0"], "world_size 0"),
        (&["--world-size", "17"], "world_size 17"),
        (&["--bytes", "7"], "no whole number of bf16"),
        (&["--dtype", "i32", "--op", "avg"], "avg is not defined"),
        (&["--tuned", nowhere], "No such file"),
        (
            &["--topology", "l40sx8-gen4", "--plot", nowhere],
            "No such file",
        ),
        (
            &["--simulate", "--workload", "nothing"],
            "neither a shipped workload",
        ),
    ] {
        let ran = run(&[&["explain"], arguments].concat());
        assert!(!ran.status.success(), "{arguments:?}: {}", ran.stdout);
        assert!(ran.stderr.contains(says), "{arguments:?}: {}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
    }
    // Types that the kernels lack are a refusal in the answer.
    let answer = explain(&[
        "--topology",
        "l40sx8-gen4",
        "--dtype",
        "i32",
        "--bytes",
        "8",
    ]);
    assert!(answer["algorithm"].is_null());
    assert!(
        answer["reason"]
            .as_str()
            .unwrap()
            .contains("use backend host"),
        "{answer}"
    );
}

/// What `tune` keeps is what a daemon of this machine then does, and says; a table of another machine is left alone.
#[test]
fn a_tuned_table_is_obeyed_where_it_was_measured() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let file = scratch.path("tuned.toml");
    let path = file.to_str().unwrap();
    let ran = run(&[
        "tune",
        "--backend",
        "host",
        "--world-size",
        "2",
        "--lane",
        "rpc,delegated",
        "--dtype",
        "f32",
        "--bytes",
        "64,4096",
        "--rounds",
        "3",
        "--output",
        path,
        "--json",
    ]);
    assert!(ran.status.success(), "{}", ran.stderr);
    let table = ran.json();
    let sets = table["set"].as_array().unwrap();
    assert_eq!(sets.len(), 2);
    for set in sets {
        assert!(
            set["row"]
                .as_array()
                .unwrap()
                .iter()
                .all(|row| row["us"].as_f64() > Some(0.0)),
            "{set}"
        );
        assert_eq!(
            set["choice"].as_array().unwrap().last().unwrap()["up_to_bytes"],
            4096
        );
    }
    let shown = explain(&[
        "--backend",
        "host",
        "--world-size",
        "2",
        "--dtype",
        "f32",
        "--bytes",
        "4096",
        "--tuned",
        path,
    ]);
    assert_eq!(shown["reason"], "measured fastest on this machine");
    assert!(
        shown["candidates"]
            .as_array()
            .unwrap()
            .iter()
            .any(|one| one["measured_us"].as_f64() > Some(0.0))
    );

    // Other than the program would choose, so that it is seen to be obeyed: 4 MiB by one thread.
    let fingerprint = table["fingerprint"].as_str().unwrap();
    let text = format!(
        "schema_version = 1\nfingerprint = {fingerprint:?}\nmeasured = \"by hand\"\n\
         [[set]]\nworld_size = 2\ngpus = 0\nlane = \"rpc\"\ndtype = \"f32\"\n\
         [[set.choice]]\nup_to_bytes = 8388608\nalgorithm = \"one_shot\"\n"
    );
    for (text, expected, says) in [
        (text.clone(), "one_shot", "tuned table"),
        (
            text.replace(fingerprint, "0123456789abcdef"),
            "one_shot_chunked",
            "another topology",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let daemon = daemon(&[("ALLREDUCED_TOPOLOGY__TUNED", path)]);
        let algorithms = ranks(2, |rank| {
            let options = JoinOptions::new("tuned", rank, 2).lanes([Lane::Rpc]);
            let joined = Client::connect(daemon.socket()).unwrap().join(options);
            let communicator = joined.unwrap();
            let buffer = communicator.allocate::<f32>(1 << 20).unwrap();
            let reduced =
                communicator.all_reduce_with(buffer, Op::Sum, AllReduceOptions::default());
            let algorithm = reduced.unwrap().1.algorithm.to_string();
            // Its stats are looked at below.
            (algorithm, communicator)
        });
        let (algorithms, _communicators): (Vec<String>, Vec<_>) = algorithms.into_iter().unzip();
        assert_eq!(algorithms, [expected, expected]);
        let status = run(&[
            "status",
            "--json",
            "--socket",
            daemon.socket().to_str().unwrap(),
        ]);
        assert!(status.stdout.contains(says), "{}", status.stdout);
    }
    // A table that is none is a configuration error.
    std::fs::write(&file, "schema_version = 9\n").unwrap();
    let config = scratch.path("config.toml");
    std::fs::write(&config, format!("[topology]\ntuned = {path:?}\n")).unwrap();
    let checked = run(&["check-config", config.to_str().unwrap()]);
    assert_eq!(checked.status.code(), Some(78));
    assert!(
        checked.stderr.contains("topology.tuned"),
        "{}",
        checked.stderr
    );
}
