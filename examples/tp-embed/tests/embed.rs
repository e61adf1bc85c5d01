//! The example as a user runs it: real processes, a real daemon, the real model.
//!
//! Without the model, which `fetch-model` fetches, the tests that need it say that they are skipped.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing
)]

use allreduced::private::PrivateDaemon;
use serde_json::Value;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_tp-embed");
/// Longest that a run may take. No more than a guard against hanging: debug builds are slow.
const WATCHDOG: Duration = Duration::from_secs(120);

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("model")
}

/// Whether to skip; says so past the harness, which swallows what a passing test prints.
fn no_model() -> bool {
    let missing = !model().join("model.safetensors").is_file();
    if missing {
        let line = "skipped: model not fetched: run examples/tp-embed/fetch-model\n";
        std::io::stderr().write_all(line.as_bytes()).unwrap();
    }
    missing
}

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ended {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}\n{}\n{}", self.stdout, self.stderr))
    }
}

/// Runs the binary to its end. Past the watchdog's time it is killed; its ranks and its daemon end with
/// it, for they lose each other.
fn run(arguments: &[&str]) -> Ended {
    let mut child = Command::new(BINARY)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let read = |from: &mut dyn Read| {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    std::thread::scope(|scope| {
        let stdout = scope.spawn(move || read(&mut stdout));
        let stderr = scope.spawn(move || read(&mut stderr));
        let deadline = Instant::now() + WATCHDOG;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if Instant::now() > deadline {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let ended = Ended {
            code: status.and_then(|status| status.code()),
            stdout: stdout.join().unwrap(),
            stderr: stderr.join().unwrap(),
        };
        assert!(
            status.is_some(),
            "{arguments:?} did not end in {WATCHDOG:?}:\n{}\n{}",
            ended.stdout,
            ended.stderr
        );
        ended
    })
}

/// A file that goes with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn path(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("tp-embed-{}-{name}", std::process::id())))
    }

    fn sentences(name: &str, sentences: &[&str]) -> Self {
        let scratch = Self::path(name);
        std::fs::write(&scratch.0, sentences.join("\n")).unwrap();
        scratch
    }

    fn as_str(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn assert_equal(ended: &Ended, world_size: u64, reductions: u64) {
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    let found = ended.json();
    assert_eq!(found["schema_version"], 1);
    assert_eq!(found["world_size"], world_size);
    assert_eq!(found["equal"], true);
    assert_eq!(found["bit_identical"], true);
    assert!(found["min_cosine"].as_f64().unwrap() >= 0.9999);
    // Far closer than the bound: only the order of additions differs.
    assert!(found["max_abs_difference"].as_f64().unwrap() < 1e-5);
    let ranks = found["ranks"].as_array().unwrap();
    assert_eq!(ranks.len() as u64, world_size);
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank["rank"], number);
        assert_eq!(rank["reductions"], reductions);
        let heads = &rank["heads"];
        let num_heads = heads["end"].as_u64().unwrap() - heads["start"].as_u64().unwrap();
        assert_eq!(num_heads * world_size, 12);
    }
}

fn equals_the_unsharded_model(world_size: u64) {
    if no_model() {
        return;
    }
    let ended = run(&["--json", "--world-size", &world_size.to_string()]);
    // Two a layer, six layers, one batch.
    assert_equal(&ended, world_size, 12);
    // What this model gives with right tokenizer, mask and pooling, to guard against a change that would
    // hit the sharded and the unsharded model alike.
    let similarity = &ended.json()["similarity"];
    for (other, known) in [(1, 0.694_577), (2, 0.942_915), (3, 0.256_876)] {
        let found = similarity[0][other].as_f64().unwrap();
        assert!((found - known).abs() < 1e-5, "{found} {known}");
    }
}

#[test]
fn one_rank_equals_the_unsharded_model() {
    equals_the_unsharded_model(1);
}

#[test]
fn two_ranks_equal_the_unsharded_model() {
    equals_the_unsharded_model(2);
}

#[test]
fn three_ranks_equal_the_unsharded_model() {
    equals_the_unsharded_model(3);
}

#[test]
fn four_ranks_equal_the_unsharded_model() {
    equals_the_unsharded_model(4);
}

#[test]
fn without_the_reduction_the_check_fails() {
    if no_model() {
        return;
    }
    for world_size in ["2", "3"] {
        let ended = run(&[
            "--replace-all-reduce-by-identity",
            "--world-size",
            world_size,
        ]);
        assert_eq!(ended.code, Some(1), "{}\n{}", ended.stdout, ended.stderr);
        let says = |words: &str| assert!(ended.stdout.contains(words), "{}", ended.stdout);
        says("unsharded model: DIFFERENT");
        says("ranks: embeddings DIFFERENT");
    }
}

#[test]
fn the_text_says_what_ran_and_what_was_found() {
    if no_model() {
        return;
    }
    let sentences = Scratch::sentences("text", &["A cat sleeps.", "", "  A kitten naps.  "]);
    let ended = run(&["--world-size", "2", "--sentences", sentences.as_str()]);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.stdout, ended.stderr);
    for words in [
        "2 sentences, world size 2",
        "on backend host\nlane ",
        // Blanks are trimmed, empty lines are no sentences.
        "  A cat sleeps.\n         2",
        "  A kitten naps.\n",
        "unsharded model: equal, min cosine ",
        "ranks: embeddings bit-identical on all",
    ] {
        assert!(ended.stdout.contains(words), "{words}: {}", ended.stdout);
    }
}

#[test]
fn padding_changes_nothing_and_batches_follow_each_other() {
    if no_model() {
        return;
    }
    let few = ["A cat sleeps.", "Rain falls."];
    let long =
        "A much longer sentence makes the tokenizer pad the short ones of its batch. ".repeat(4);
    let mut many = few.to_vec();
    many.push(&long);
    // More than one batch of 16.
    many.resize(18, "Filler.");
    let alone = Scratch::sentences("alone", &few);
    let padded = Scratch::sentences("padded", &many);
    let similarity = |file: &Scratch, reductions| {
        let ended = run(&["--json", "--world-size", "3", "--sentences", file.as_str()]);
        assert_equal(&ended, 3, reductions);
        ended.json()["similarity"][0][1].as_f64().unwrap()
    };
    let (alone, padded) = (similarity(&alone, 12), similarity(&padded, 24));
    assert!((alone - padded).abs() < 1e-5, "{alone} {padded}");
}

#[test]
fn a_running_daemon_is_used() {
    if no_model() {
        return;
    }
    let quiet = [("ALLREDUCED_LOG__LEVEL", "error")];
    let daemon = PrivateDaemon::start(Path::new(BINARY), &[], &quiet).unwrap();
    let socket = daemon.socket().to_str().unwrap();
    assert_equal(&run(&["--json", "--socket", socket]), 2, 12);
    // And again: the first run left nothing behind.
    assert_equal(&run(&["--json", "--socket", socket]), 2, 12);
}

#[test]
fn trouble_is_told_apart_from_a_difference() {
    let refused = |arguments: &[&str], words: &str| {
        let ended = run(arguments);
        assert_eq!(ended.code, Some(2), "{}\n{}", ended.stdout, ended.stderr);
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
    };
    refused(
        &["--model", "/nonexistent"],
        "run examples/tp-embed/fetch-model",
    );
    refused(&["--world-size", "0"], "--world-size");
    refused(&["--sentences", "/nonexistent"], "/nonexistent");
    if no_model() {
        return;
    }
    refused(
        &["--world-size", "5"],
        "12 attention heads cannot be cut into 5 equal parts",
    );
    refused(&["--socket", "/nonexistent"], "no daemon answers");
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    if no_model() {
        return;
    }
    let broken = Scratch::path("broken");
    std::fs::create_dir(&broken.0).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(model().join(file), broken.0.join(file)).unwrap();
    }
    std::fs::write(broken.0.join("model.safetensors"), [0; 64]).unwrap();
    let ended = run(&["--world-size", "3", "--model", broken.as_str()]);
    assert_eq!(ended.code, Some(2), "{}\n{}", ended.stdout, ended.stderr);
    assert!(ended.stderr.contains("safetensors"), "{}", ended.stderr);
    assert!(ended.stderr.contains("failed"), "{}", ended.stderr);
}
