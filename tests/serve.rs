//! `serve` and `check-config` as an operator meets them: sockets, configuration, signals.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, missing_docs, unreachable_pub)]

mod harness;

use harness::raw::{executor_pid, info};
use harness::worker::Worker;
use harness::{
    SOON, Scratch, Serve, binary, children_of, command, eventually, is_alive, join_all, run,
    run_within, watchdog,
};
use nix::sys::signal::Signal;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

#[test]
fn worker_entry() {
    harness::worker::run_if_asked();
}

fn mode(path: impl AsRef<Path>) -> u32 {
    let path = path.as_ref();
    let metadata = std::fs::symlink_metadata(path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    metadata.permissions().mode() & 0o777
}

fn answers(socket: &Path) -> bool {
    let status = run(&["status", "--socket", socket.to_str().unwrap()]);
    status.status.success()
}

/// Nothing of the daemon is left: no socket, lock, directory.
fn nothing_left(scratch: &Scratch) {
    let left: Vec<_> = std::fs::read_dir(&scratch.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().starts_with("d.sock"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_stale_socket_is_taken_over() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    for _ in 0..2 {
        let mut serve = Serve::start(&socket, &[], &[]);
        assert!(answers(&socket));
        serve.kill_hard();
        let left = std::fs::symlink_metadata(&socket).unwrap();
        assert!(left.file_type().is_socket(), "what there is to take over");
        assert!(!answers(&socket));
    }
    let mut last = Serve::start(&socket, &[], &[]);
    assert!(answers(&socket));
    last.close();
    assert!(last.ended().success());
    nothing_left(&scratch);
}

/// Broken by a daemon that removes whatever it finds at its path.
#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let first = Serve::start(&socket, &[], &[]);
    let communicators = join_all(&socket, "first", 2);
    let second = run(&["serve", "--socket", socket.to_str().unwrap()]);
    assert!(!second.status.success());
    let pid = format!("(pid {})", first.pid());
    assert!(second.stderr.contains(&pid), "{}", second.stderr);
    let shown = socket.display().to_string();
    assert!(second.stderr.contains(&shown), "{}", second.stderr);
    assert!(answers(&socket));
    harness::reduce_well(&communicators);
    // A daemon that is too busy to accept is live too: the lock says so.
    first.signal(Signal::SIGSTOP);
    let second = run(&["serve", "--socket", socket.to_str().unwrap()]);
    first.signal(Signal::SIGCONT);
    assert!(!second.status.success());
    assert!(second.stderr.contains(&pid), "{}", second.stderr);
    harness::reduce_well(&communicators);
}

#[test]
fn what_is_no_socket_is_left_alone() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let file = scratch.file("precious", "keep me");
    let dir = scratch.path("dir");
    std::fs::create_dir(&dir).unwrap();
    let link = scratch.path("link");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for path in [&file, &dir, &link] {
        let ran = run(&["serve", "--socket", path.to_str().unwrap()]);
        assert!(!ran.status.success());
        assert!(ran.stderr.contains("is not a socket"), "{}", ran.stderr);
        assert!(ran.stderr.contains(&path.display().to_string()));
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "keep me");
    assert!(link.is_symlink() && dir.is_dir());
}

#[test]
fn long_socket_paths_are_refused_by_name() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    // 108 bytes do not fit the address; 100 do, but not those of the executors.
    for len in [108, 100] {
        let start = format!("{}/", scratch.0.display());
        let path = format!("{start}{}", "x".repeat(len - start.len()));
        let ran = run(&["serve", "--socket", &path]);
        assert_eq!(ran.status.code(), Some(78), "{}", ran.stderr);
        for word in ["listen.path", &path, "107", &format!("{len} bytes")] {
            assert!(ran.stderr.contains(word), "no {word} in {}", ran.stderr);
        }
        let config = scratch.file("c.toml", &format!("[listen]\npath = \"{path}\"\n"));
        for ran in both(&config) {
            let at = format!("{}:2: listen.path: ", config.display());
            assert!(ran.stderr.contains(&at), "{}", ran.stderr);
        }
    }
    let ran = run(&["serve", "--socket", "relative.sock"]);
    assert_eq!(ran.status.code(), Some(78), "{}", ran.stderr);
    assert!(ran.stderr.contains("absolute"), "{}", ran.stderr);
}

/// `check-config FILE` and `serve --config FILE`, which must agree.
fn both(config: &Path) -> [harness::Ran; 2] {
    let config = config.to_str().unwrap();
    let both = [
        run(&["check-config", config]),
        run(&["serve", "--config", config]),
    ];
    for ran in &both {
        assert_eq!(ran.status.code(), Some(78), "{}", ran.stderr);
        assert!(ran.stdout.is_empty(), "{}", ran.stdout);
    }
    both
}

#[test]
fn bad_configurations_name_line_key_and_reason() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    for (text, line, key, reason) in [
        (
            "[communicator]\nmax_open = \"5\"\n",
            2,
            "communicator.max_open: ",
            "expected u32",
        ),
        (
            "[log]\n\nlevl = \"info\"\n",
            3,
            "log.levl: ",
            "unknown field `levl`",
        ),
        ("[nonsense]\n", 1, "nonsense: ", "unknown field `nonsense`"),
        (
            "[communicator]\ndefault_timeout_ms = 0\n",
            2,
            "communicator.default_timeout_ms: ",
            "at least 1",
        ),
        ("[host\n", 1, "", ""),
        ("[listen]\nmode = \"abc\"\n", 2, "listen.mode: ", "octal"),
    ] {
        let config = scratch.file("c.toml", text);
        for ran in both(&config) {
            let start = format!("allreduced: {}:{line}: {key}", config.display());
            assert!(ran.stderr.starts_with(&start), "{}", ran.stderr);
            assert!(ran.stderr.contains(reason), "{}", ran.stderr);
        }
    }
    let missing = scratch.path("missing.toml");
    for ran in both(&missing) {
        assert!(ran.stderr.contains("cannot be read"), "{}", ran.stderr);
    }
    let good = scratch.file("good.toml", "[communicator]\nmax_open = 3\n");
    let ran = run(&["check-config", good.to_str().unwrap()]);
    assert_eq!(ran.status.code(), Some(0), "{}", ran.stderr);
    assert!(ran.stdout.ends_with(": ok\n"), "{}", ran.stdout);
}

#[test]
fn bad_variables_are_refused() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    for (name, value, word) in [
        ("ALLREDUCED_COMMUNICATOR__MAX_OPEM", "4", "max_opem"),
        ("ALLREDUCED_NONSENSE", "1", "nonsense"),
        ("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "many", "max_open"),
        ("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "0", "max_open"),
    ] {
        let mut command = command(&["serve", "--socket"]);
        command.arg(scratch.path("d.sock")).env(name, value);
        let ran = run_within(command, SOON);
        assert_eq!(ran.status.code(), Some(78), "{name}: {}", ran.stderr);
        assert!(
            ran.stderr.to_lowercase().contains(word),
            "{name}: {}",
            ran.stderr
        );
    }
    nothing_left(&scratch);
}

/// The file is read, the environment goes before it, flags before both.
#[test]
fn the_configuration_is_in_force() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let config = scratch.file(
        "c.toml",
        "[listen]\npath = \"/nowhere/x.sock\"\nmode = \"0600\"\n[communicator]\nmax_open = 1\n",
    );
    let _serve = Serve::start(
        &socket,
        &["--config", config.to_str().unwrap()],
        &[("ALLREDUCED_COMMUNICATOR__MAX_OPEN", "2")],
    );
    assert_eq!(mode(&socket), 0o600);
    let open = |name: &str| {
        harness::raw::block_on(harness::raw::try_open(&socket, name, 1, 0)).map(|_| ())
    };
    open("one").unwrap();
    open("two").unwrap();
    assert!(open("three").is_err());
}

/// Broken by a mode that is set after bind (a moment of 0777 & ~umask), or not at all.
#[test]
fn the_sockets_mode_does_not_depend_on_the_umask() {
    let _watchdog = watchdog();
    for umask in ["000", "022", "077", "777"] {
        let scratch = Scratch::new();
        let socket = scratch.path("d.sock");
        let mut command = std::process::Command::new("sh");
        command
            .arg("-c")
            .arg(format!("umask {umask}; exec \"$0\" \"$@\""))
            .args([
                binary().as_str(),
                "serve",
                "--until-stdin-closes",
                "--socket",
            ])
            .arg(&socket)
            .env("ALLREDUCED_LOG__LEVEL", "error");
        let _serve = Serve::start_command(command);
        assert_eq!(mode(&socket), 0o660, "umask {umask}");
        let opened = harness::raw::block_on(harness::raw::open(&socket, "mode", 1));
        assert_eq!(mode(&opened.executor_socket), 0o660, "umask {umask}");
        assert_eq!(mode(&opened.companion_socket), 0o660, "umask {umask}");
        // Who may connect may pass, not list.
        assert_eq!(mode(scratch.path("d.sock.d")), 0o710, "umask {umask}");
    }
}

/// Ranks are told, finish and leave; the daemon exits well before its deadline, with nothing left.
#[test]
fn sigterm_drains() {
    let _watchdog = watchdog();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let scratch = Scratch::new();
        let socket = scratch.path("d.sock");
        // Longer than this test may take: only leaving ends the drain.
        let timeout = ("ALLREDUCED_SHUTDOWN__DRAIN_TIMEOUT_MS", "600000");
        let mut serve = Serve::start(&socket, &[], &[timeout]);
        let mut workers = Worker::start_all(&socket, "drain", 2);
        let executor = executor_pid(&socket, "drain");
        serve.signal(signal);
        for worker in &mut workers {
            assert_eq!(worker.ask("draining"), "draining");
        }
        // What is joined still works.
        for worker in &mut workers {
            worker.tell("reduce");
        }
        for worker in &mut workers {
            assert_eq!(worker.answer(), "reduced");
        }
        for worker in &mut workers {
            worker.tell("leave");
        }
        assert_eq!(serve.ended().code(), Some(0));
        assert!(!is_alive(executor));
        nothing_left(&scratch);
    }
}

/// Broken by a drain that waits for whoever does not leave.
#[test]
fn sigterm_does_not_wait_for_those_who_stay() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let timeout = ("ALLREDUCED_SHUTDOWN__DRAIN_TIMEOUT_MS", "300");
    let mut serve = Serve::start(&socket, &[], &[timeout]);
    let mut workers = Worker::start_all(&socket, "stay", 2);
    // One waits in a call, and one executor does not even run.
    workers[0].tell("reduce");
    let _frozen = Worker::start_all(&socket, "frozen", 1);
    let executors = [
        executor_pid(&socket, "stay"),
        executor_pid(&socket, "frozen"),
    ];
    harness::remember_child(executors[1]);
    harness::send_signal(executors[1], Signal::SIGSTOP);
    assert_eq!(children_of(serve.pid()).len(), 2);
    serve.signal(Signal::SIGTERM);
    assert_eq!(serve.ended().code(), Some(0));
    harness::forget_child(executors[1]);
    let answer = workers[0].answer();
    assert!(answer.contains(" over "), "{answer}");
    for executor in executors {
        assert!(!is_alive(executor));
    }
    nothing_left(&scratch);
}

/// A second signal does not wait for the drain.
#[test]
fn told_twice_it_ends_at_once() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let timeout = ("ALLREDUCED_SHUTDOWN__DRAIN_TIMEOUT_MS", "600000");
    let mut serve = Serve::start(&socket, &[], &[timeout]);
    let mut workers = Worker::start_all(&socket, "twice", 1);
    serve.signal(Signal::SIGTERM);
    assert_eq!(workers[0].ask("draining"), "draining");
    serve.signal(Signal::SIGTERM);
    assert_eq!(serve.ended().code(), Some(0));
    nothing_left(&scratch);
}

/// Without ranks, executors exit after a while, and their communicators are gone.
#[test]
fn idle_executors_exit() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let idle = ("ALLREDUCED_COMMUNICATOR__IDLE_TIMEOUT_MS", "300");
    let serve = Serve::start(&socket, &[], &[idle]);
    let communicators = join_all(&socket, "idle", 2);
    let executor = executor_pid(&socket, "idle");
    harness::reduce_well(&communicators);
    drop(communicators);
    eventually("it exits", || info(&socket, "idle").is_none().then_some(()));
    assert!(!is_alive(executor));
    assert!(children_of(serve.pid()).is_empty());
    // And comes back when it is wanted, counting from 1.
    let communicators = join_all(&socket, "idle", 2);
    harness::reduce_well(&communicators);
    assert_eq!(info(&socket, "idle").unwrap().incarnation, 1);
}

#[test]
fn the_command_line_says_what_it_is() {
    let _watchdog = watchdog();
    let ran = run(&["--version"]);
    assert!(ran.status.success());
    assert!(ran.stdout.starts_with("allreduced "), "{}", ran.stdout);
    for subcommand in ["serve", "demo", "bench", "status", "check-config"] {
        let ran = run(&[subcommand, "--help"]);
        assert!(ran.status.success());
        assert!(ran.stdout.contains("Usage"), "{}", ran.stdout);
        assert!(!ran.stdout.contains("inject"), "hidden flags are shown");
    }
    assert_eq!(run(&["nonsense"]).status.code(), Some(2));
    assert_eq!(run(&[]).status.code(), Some(2));
}

/// Broken by a log that panics, or waits, when standard error takes nothing.
#[test]
fn a_daemon_whose_log_takes_nothing_serves() {
    let _watchdog = watchdog();
    let scratch = Scratch::new();
    let socket = scratch.path("d.sock");
    let full = std::fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut daemon = std::process::Command::new(env!("CARGO_BIN_EXE_allreduced"))
        .args(["serve", "--socket"])
        .arg(&socket)
        .stderr(full)
        .spawn()
        .unwrap();
    eventually("it serves", || {
        std::os::unix::net::UnixStream::connect(&socket).ok()
    });
    harness::reduce_well(&harness::join_all(Path::new(&socket), "mute", 2));
    harness::send_signal(daemon.id(), Signal::SIGTERM);
    let ended = eventually("it ends", || daemon.try_wait().unwrap());
    assert!(ended.success(), "{ended}");
}
