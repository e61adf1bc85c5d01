//! Compiles the protobuf contract to Rust with protox (a protobuf compiler in Rust: no protoc needed).

use std::error::Error;
use std::path::PathBuf;

const FILES: [&str; 6] = [
    "allreduced/v1/types.proto",
    "allreduced/v1/control.proto",
    "allreduced/v1/communicator.proto",
    "allreduced/v1/buffers.proto",
    "allreduced/v1/collectives.proto",
    "allreduced/v1/admin.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto/allreduced");
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(FILES)?;
    // The encoding by protox keeps comments and options that prost-types would drop.
    std::fs::write(
        out_dir.join("allreduced.v1.fds"),
        compiler.encode_file_descriptor_set(),
    )?;

    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
