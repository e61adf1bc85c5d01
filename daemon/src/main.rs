//! The `allreduced` binary.

fn main() -> std::process::ExitCode {
    allreduced::cli::main()
}
