//! The command line.
//!
//! Owns the arguments and the exit codes. Each subcommand is a module of its own; this one parses,
//! dispatches and turns errors into words on standard error.

use crate::backend::Fault;
use crate::config::{Config, ConfigError, ENV_CONFIG, ENV_SOCKET, Flags};
use crate::supervisor::Private;
use crate::{bench, demo, executor, explain, log, probe, status, supervisor, tune};
use allreduce_contract::default_socket;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// EX_CONFIG of sysexits.h: the configuration is wrong; restarting does not help.
const EXIT_CONFIG: u8 = 78;
/// EX_UNAVAILABLE of sysexits.h: no daemon answers.
const EXIT_UNAVAILABLE: u8 = 69;

/// All-reduce for the workers of LLM serving engines, as a daemon of the node.
#[derive(Debug, Parser)]
#[command(name = "allreduced", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon.
    Serve(ServeArguments),
    /// Start a private daemon and worker processes, reduce a workload, check every result.
    Demo(demo::Arguments),
    /// Measure lanes, sizes and peers.
    Bench(bench::Arguments),
    /// Ask which algorithm would run, how long it would take and why, on this machine or a described one.
    Explain(explain::Arguments),
    /// Measure which algorithm is the fastest here, for `serve` to use.
    Tune(tune::Arguments),
    /// Measure what connects the GPUs of this machine, and check that their data arrive.
    Probe(probe::Arguments),
    /// Show what a running daemon does.
    Status(StatusArguments),
    /// Check a configuration file; exit code 78 if it is wrong.
    CheckConfig {
        /// The file.
        file: PathBuf,
    },
    /// One communicator's executor; started by `serve`.
    #[command(hide = true)]
    Executor {
        /// The communicator, for `ps`.
        #[allow(dead_code)]
        name: String,
    },
    /// One rank of `demo`; started by it.
    #[command(hide = true)]
    DemoWorker,
    /// One rank of `tune`; started by it.
    #[command(hide = true)]
    TuneWorker,
    /// One process of `bench`; started by it.
    #[command(hide = true)]
    BenchPeer,
    /// One process of `probe`; started by it.
    #[command(hide = true)]
    ProbeWorker,
}

#[derive(Debug, clap::Args)]
struct ServeArguments {
    /// Configuration file.
    #[arg(long, value_name = "FILE", env = ENV_CONFIG)]
    config: Option<PathBuf>,
    /// The socket; goes before file and environment.
    #[arg(long, value_name = "PATH", env = ENV_SOCKET)]
    socket: Option<PathBuf>,
    /// Be the private daemon of one parent: say "ready" on standard output, end with standard input.
    #[arg(long, hide = true)]
    until_stdin_closes: bool,
    /// Flip one bit of one result: REDUCTION:RANK:BIT. Tests the verifier of `demo`.
    #[arg(long, hide = true, value_parser = parse_fault)]
    inject_bit_flip: Option<Fault>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StatusArguments {
    /// The daemon's socket.
    #[arg(long, value_name = "PATH", env = ENV_SOCKET)]
    socket: Option<PathBuf>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// A value, or auto.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice<T>(pub(crate) Option<T>);

/// Reads a value by name, or auto.
pub(crate) fn parse_auto<T: std::str::FromStr<Err = allreduce_contract::UnknownName>>(
    text: &str,
) -> Result<Choice<T>, String> {
    match text {
        "auto" => Ok(Choice(None)),
        name => match name.parse() {
            Ok(value) => Ok(Choice(Some(value))),
            Err(error) => Err(format!("{error}, auto")),
        },
    }
}

/// Reads REDUCTION:RANK:BIT.
pub(crate) fn parse_fault(text: &str) -> Result<Fault, String> {
    let wanted = || format!("{text:?} is not REDUCTION:RANK:BIT");
    let numbers: Vec<u64> = text
        .split(':')
        .map(|part| part.parse().map_err(|_| wanted()))
        .collect::<Result<_, _>>()?;
    match numbers.as_slice() {
        [reduction, rank, bit] => Ok(Fault {
            reduction: *reduction,
            rank: u32::try_from(*rank).map_err(|_| wanted())?,
            bit: *bit,
        }),
        _ => Err(wanted()),
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    run(Arguments::parse())
}

/// How a process of the daemon's own is called (argv[0]), whatever its executable.
pub(crate) const CHILD_NAME: &str = "allreduced";

/// Runs the process's command line if it is one that the daemon gives its own children, so that a
/// program which starts a private daemon ([`crate::private::PrivateDaemon`]) can be its executable.
/// Call it first in main. The program's own subcommands may have any name: children are told by argv[0].
pub fn run_as_child() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    let is_child = arguments.next()? == CHILD_NAME;
    let first = arguments.next()?;
    let known = ["serve", "executor"].iter().any(|name| first == *name);
    (is_child && known).then(|| run(Arguments::parse()))
}

fn run(arguments: Arguments) -> ExitCode {
    match arguments.command {
        Command::Serve(arguments) => serve(arguments),
        Command::Executor { name: _ } => run_executor(),
        Command::CheckConfig { file } => match Config::check_file(&file) {
            Ok(_) => {
                println!("{}: ok", file.display());
                ExitCode::SUCCESS
            }
            Err(error) => bad_config(&error),
        },
        Command::Status(StatusArguments { socket, json }) => {
            let socket = socket.unwrap_or_else(default_socket);
            match status::run(&socket, json) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => fail(&error, EXIT_UNAVAILABLE),
            }
        }
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Tune(arguments) => tune::run(&arguments),
        Command::TuneWorker => tune::run_worker(),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::DemoWorker => demo::run_worker(),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::BenchPeer => bench::run_peer(),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::ProbeWorker => probe::run_worker(),
    }
}

fn fail(error: &dyn std::fmt::Display, code: u8) -> ExitCode {
    eprintln!("allreduced: {error}");
    ExitCode::from(code)
}

fn bad_config(error: &ConfigError) -> ExitCode {
    for line in error.to_string().lines() {
        eprintln!("allreduced: {line}");
    }
    ExitCode::from(EXIT_CONFIG)
}

fn serve(arguments: ServeArguments) -> ExitCode {
    let flags = Flags {
        socket: arguments.socket,
    };
    // A variable that is not Unicode is not one of ours.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let config = match Config::load(arguments.config.as_deref(), environment, &flags) {
        Ok(config) => config,
        Err(error) => return bad_config(&error),
    };
    let _log = log::init(&config.log);
    let private = Private {
        until_stdin_closes: arguments.until_stdin_closes,
        fault: arguments.inject_bit_flip,
    };
    match supervisor::serve(config, private) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error, 1),
    }
}

fn run_executor() -> ExitCode {
    // Else ps and top would show "exe", which is how it was started.
    let _ = nix::sys::prctl::set_name(c"allreduced-exec");
    let spec = match executor::read_spec() {
        Ok(spec) => spec,
        Err(error) => return fail(&error, 1),
    };
    let _log = log::init(&spec.log);
    match executor::run(spec) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "executor failed");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn faults_are_read() {
        let fault = parse_fault("3:1:9").unwrap();
        assert_eq!((fault.reduction, fault.rank, fault.bit), (3, 1, 9));
        for bad in ["", "1:2", "1:2:3:4", "a:1:1", "1:4294967296:1"] {
            assert!(parse_fault(bad).is_err(), "{bad}");
        }
    }
}
