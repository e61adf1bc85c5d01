//! What the kernel that stays takes from a worker's own kernels: a measurement, which asserts nothing of time.
//!
//! Owns the ranks, whose kernel is parked or armed, and a process with torch (tax.py) that multiplies and copies meanwhile.
//! Each state is measured between two of the state without ranks, and shown as a ratio to their mean. Says "skipped" without a GPU,
//! MPS or torch. Run it by name, with --ignored.

use crate::harness::daemon;
use crate::harness::worker::Worker;
use crate::lanes::{all_answer, gpus_with_mps, start};
use allreduce_client::Lane;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Blocks for each rank, of 2 ranks.
const BLOCKS: [u32; 4] = [1, 2, 4, 6];

type Times = BTreeMap<String, f64>;

struct Torch {
    child: Child,
    told: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Torch {
    /// None if there is no torch.
    fn start() -> Option<Self> {
        let script = std::env::var("ALLREDUCED_TAX_PY").unwrap_or_else(|_| {
            concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/gpu/tax.py").to_owned()
        });
        let spawned = Command::new("python3")
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match spawned {
            Ok(child) => child,
            Err(error) => {
                println!("skipped: python3: {error}");
                return None;
            }
        };
        let told = child.stdin.take().unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        says.read_line(&mut line).unwrap();
        if line.trim() != "ready" {
            println!(
                "{}",
                if line.is_empty() {
                    "skipped: no torch\n"
                } else {
                    &line
                }
            );
            let _ = child.wait();
            return None;
        }
        Some(Self { child, told, says })
    }

    fn measure(&mut self) -> Times {
        self.told.write_all(b"measure\n").unwrap();
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ratios to what the same took without ranks, before and after.
fn row(what: &str, before: &Times, with: &Times, after: &Times) {
    let ratios: Vec<String> = with
        .iter()
        .map(|(case, us)| {
            let without = f64::midpoint(before[case], after[case]);
            let noise = (before[case] - after[case]).abs() / without;
            format!("{:>7.3} (+-{noise:.3})", us / without)
        })
        .collect();
    println!("tax {what:<22} {}", ratios.join(" "));
}

#[test]
#[ignore = "a measurement: run it by name"]
fn tax_of_the_resident_kernel() {
    let Some((_watchdog, _)) = gpus_with_mps() else {
        return;
    };
    let Some(mut torch) = Torch::start() else {
        return;
    };
    torch.measure();
    let mut without = torch.measure();
    let cases: Vec<&str> = without.keys().map(String::as_str).collect();
    println!("tax {:<22} {}", "without ranks, us", cases.join(" | "));
    let times: Vec<String> = without.values().map(|us| format!("{us:.1}")).collect();
    println!("tax {:<22} {}", "", times.join(" | "));
    for blocks in BLOCKS {
        let blocks = blocks.to_string();
        let daemon = daemon(&[
            ("ALLREDUCED_CUDA__RESIDENT_BLOCKS", &blocks),
            // It stays armed until it is told otherwise.
            ("ALLREDUCED_CUDA__RESIDENT_IDLE_US", "600000000"),
        ]);
        let mut ranks: Vec<Worker> = start(&daemon, "tax", 2, Lane::Resident);
        all_answer(&mut ranks, "capture", "captured");
        all_answer(&mut ranks, "replay 2", "replayed");
        all_answer(&mut ranks, "sync", "synced");
        assert_eq!(ranks[0].ask("arm"), "done");
        let armed = torch.measure();
        assert_eq!(ranks[0].ask("disarm"), "done");
        let parked = torch.measure();
        // It works still.
        all_answer(&mut ranks, "replay 2", "replayed");
        all_answer(&mut ranks, "sync", "synced");
        all_answer(&mut ranks, "found", "right");
        all_answer(&mut ranks, "leave", "left");
        drop(ranks);
        drop(daemon);
        let after = torch.measure();
        row(
            &format!("armed, 2 x {blocks} blocks"),
            &without,
            &armed,
            &after,
        );
        row(
            &format!("parked, 2 x {blocks} blocks"),
            &without,
            &parked,
            &after,
        );
        without = after;
    }
}
