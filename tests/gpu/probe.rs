//! `allreduced probe` on a machine with GPUs.

use crate::harness::{Scratch, command, run_within};
use crate::rank::gpus;
use std::time::Duration;

/// Every pair that the machine has, or its one GPU with itself: rates, a flag, and data that arrive; and a file that the daemon
/// takes. Broken by a kernel that copies wrongly, a flag that nobody answers, and a driver's "no" that ends the probe.
#[test]
fn every_pair_is_measured_and_checked() {
    let Some((_watchdog, devices)) = gpus() else {
        return;
    };
    let scratch = Scratch::new();
    let file = scratch.path("topology.toml");
    let mut probe = command(&["probe", "--backend", "cuda", "--json", "--bytes", "8388608"]);
    probe.arg("--output").arg(&file);
    let ran = run_within(probe, Duration::from_secs(200));
    println!("{}\n{}", ran.stdout, ran.stderr);
    let json = ran.json();
    assert_eq!(json["backend"], "cuda");
    assert_eq!(json["gpus"].as_array().unwrap().len(), devices.len());
    let pairs = json["pairs"].as_array().unwrap();
    let wanted = match devices.len() {
        1 => 1,
        several => several * (several - 1),
    };
    assert_eq!(pairs.len(), wanted);
    for pair in pairs {
        if pair["peer_access"] == false {
            // Why is said.
            assert_ne!(pair["troubles"].as_array().unwrap().len(), 0, "{pair}");
            continue;
        }
        for key in ["write_gbps", "read_gbps", "flag_us"] {
            assert!(
                pair[key].as_f64().is_some_and(|value| value > 0.0),
                "{key}: {pair}"
            );
        }
        assert_eq!(pair["data"], "right", "{pair}");
        assert_eq!(pair["troubles"].as_array().unwrap().len(), 0, "{pair}");
    }
    assert!(ran.status.success());
    if devices.len() == 1 {
        assert_eq!(json["fabric"], "loopback");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("memory_gbps = "), "{text}");
        assert!(text.contains(devices[0].uuid()), "{text}");
    }
    let config = scratch.file("config.toml", &format!("[topology]\nfile = {file:?}\n"));
    let checked = run_within(
        command(&["check-config", config.to_str().unwrap()]),
        Duration::from_secs(20),
    );
    assert!(checked.status.success(), "{}", checked.stderr);
}
