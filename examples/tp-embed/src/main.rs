//! A serving worker on a real model: all-MiniLM-L6-v2, tensor-parallel over processes.
//!
//! The parent tokenizes, starts one process for each rank (and a private daemon, unless one is named),
//! sends all of them the sentences and checks their embeddings against candle-transformers' unsharded
//! model. Exit codes, as of cmp: 0 equal, 1 different, 2 trouble.
//!
//! Modules: `worker` is a rank's life; `rank_sum` is where it meets allreduced; `model`, `shard` and
//! `checkpoint` are the sharded model, read from `folder`; `ranks` starts the processes and `job` is what
//! passes between them; `text`, `pooling`, `reference`, `check` and `output` are around it.

mod check;
mod checkpoint;
mod folder;
mod job;
mod model;
mod output;
mod pooling;
mod rank_sum;
mod ranks;
mod reference;
mod shard;
mod text;
mod worker;

use allreduce_client::blocking::Client;
use allreduced::private::PrivateDaemon;
use anyhow::{Context, ensure};
use check::Verdict;
use clap::Parser;
use job::Job;
use output::Outcome;
use shard::Shard;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const EXIT_DIFFERENT: u8 = 1;
const EXIT_TROUBLE: u8 = 2;

/// Where `fetch-model` puts it.
const DEFAULT_MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/model");

/// What is embedded if no file is given. The lengths differ, so that padding matters.
const SENTENCES: [&str; 6] = [
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "Each rank holds a part of every layer, and the ranks add up what they have computed.",
    "Tensor parallelism splits the matrices of a model over several devices.",
];

/// Embeds sentences with all-MiniLM-L6-v2, tensor-parallel over processes that reduce through
/// allreduced, and checks the result against the unsharded model.
#[derive(Debug, Parser)]
#[command(name = "tp-embed", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    embed: Embed,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// One rank; started by the parent, with a job on standard input.
    #[command(hide = true, name = ranks::SUBCOMMAND)]
    Rank,
}

#[derive(Debug, clap::Args)]
struct Embed {
    /// Number of ranks; must divide the model's heads and intermediate columns.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    world_size: u32,
    /// Sentences, one a line.
    #[arg(long, value_name = "FILE")]
    sentences: Option<PathBuf>,
    /// A running daemon's socket; without it, a private daemon is started and ended.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Folder with model.safetensors, config.json and tokenizer.json.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_MODEL)]
    model: PathBuf,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Sum nothing, to show that the check notices.
    #[arg(long, hide = true)]
    replace_all_reduce_by_identity: bool,
}

fn main() -> ExitCode {
    if let Some(code) = allreduced::cli::run_as_child() {
        return code;
    }
    let Arguments { command, embed } = Arguments::parse();
    let done = match command {
        Some(Command::Rank) => run_rank(),
        None => run_parent(&embed),
    };
    done.unwrap_or_else(|error| {
        eprintln!("tp-embed: {error:#}");
        ExitCode::from(EXIT_TROUBLE)
    })
}

fn run_rank() -> anyhow::Result<ExitCode> {
    let job: Job = serde_json::from_reader(std::io::stdin().lock()).context("the job")?;
    let report = worker::run(&job).with_context(|| format!("rank {}", job.shard.rank))?;
    print_line(&serde_json::to_string(&report)?)?;
    Ok(ExitCode::SUCCESS)
}

fn run_parent(arguments: &Embed) -> anyhow::Result<ExitCode> {
    let sentences = read_sentences(arguments.sentences.as_deref())?;
    let model = &arguments.model;
    folder::require(model)?;
    let shard = |rank| Shard {
        rank,
        world_size: arguments.world_size,
    };
    // Each rank would refuse as well; once is enough.
    folder::read_config::<model::Config>(model)?.owned(shard(0))?;
    let batches = text::batches(&model.join(folder::TOKENIZER), &sentences)?;

    let executable = std::env::current_exe().context("this program's own path")?;
    let (socket, daemon) = match &arguments.socket {
        Some(socket) => (socket.clone(), None),
        None => {
            let quiet = [("ALLREDUCED_LOG__LEVEL", "warn")];
            let daemon = PrivateDaemon::start(&executable, &[], &quiet)?;
            (daemon.socket().to_owned(), Some(daemon))
        }
    };
    // As above: said once.
    Client::connect(&socket)?;
    let job = |rank| Job {
        shard: shard(rank),
        socket: socket.clone(),
        // Runs that share a daemon must not meet.
        communicator: format!("tp-embed-{}", std::process::id()),
        model: model.clone(),
        batches: batches.clone(),
        replace_all_reduce_by_identity: arguments.replace_all_reduce_by_identity,
    };
    let jobs: Vec<Job> = (0..arguments.world_size).map(job).collect();
    let reports = ranks::run(&executable, &jobs)?;
    drop(daemon);

    let reference = reference::embed(model, &batches)?;
    let bits: Vec<_> = reports
        .iter()
        .map(|report| report.embeddings.as_slice())
        .collect();
    let verdict = Verdict::new(&bits, &reference);
    let first = reports.first().context("no rank reported")?;
    let embeddings: Vec<_> = first
        .embeddings
        .iter()
        .map(|bits| check::floats(bits))
        .collect();
    let outcome = Outcome::new(
        first,
        &reports,
        &sentences,
        &embeddings,
        verdict,
        arguments.replace_all_reduce_by_identity,
    );
    if arguments.json {
        print_line(&serde_json::to_string_pretty(&outcome)?)?;
    } else {
        print_line(outcome.text()?.trim_end())?;
    }
    Ok(if verdict.is_good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_DIFFERENT)
    })
}

fn read_sentences(file: Option<&Path>) -> anyhow::Result<Vec<String>> {
    let Some(file) = file else {
        return Ok(SENTENCES.map(str::to_owned).to_vec());
    };
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let sentences: Vec<String> = lines.map(str::to_owned).collect();
    ensure!(!sentences.is_empty(), "{}: no sentences", file.display());
    Ok(sentences)
}

/// Unlike println!, answers an error when nobody reads.
fn print_line(text: &str) -> std::io::Result<()> {
    writeln!(std::io::stdout().lock(), "{text}")
}
