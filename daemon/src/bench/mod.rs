//! stub while building
use std::process::ExitCode;
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}
pub(crate) fn run(_: &Arguments) -> ExitCode {
    ExitCode::FAILURE
}
pub(crate) fn run_peer() -> ExitCode {
    ExitCode::FAILURE
}
