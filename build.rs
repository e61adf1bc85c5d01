//! Compiles the protobuf contract to Rust with protox (a protobuf compiler in Rust: no protoc needed), and,
//! with feature `kernels`, the CUDA kernels to a fatbin where nvcc is found.
//!
//! nvcc is NVCC, else CUDA_HOME/bin/nvcc, else the one in PATH; `NVCC=` (empty) says none. Without nvcc the
//! build succeeds, and executors compile the embedded source with NVRTC. So it does, with a warning, where an nvcc that
//! was only found fails; where one was named by NVCC, the build fails.
//! ALLREDUCED_CUDA_ARCHS ("90" or "80,90") builds for fewer architectures; the default is what is supported
//! of 80, 86, 89, 90, 100 and 120 by this nvcc, and PTX for newer ones.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROTO_FILES: [&str; 6] = [
    "allreduced/v1/types.proto",
    "allreduced/v1/control.proto",
    "allreduced/v1/communicator.proto",
    "allreduced/v1/buffers.proto",
    "allreduced/v1/collectives.proto",
    "allreduced/v1/admin.proto",
];

const KERNEL_DIR: &str = "kernels/cuda";
const ARCHS: [&str; 6] = ["80", "86", "89", "90", "100", "120"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto/allreduced");
    let out_dir = PathBuf::from(std::env::var("OUT_DIR")?);
    compile_protos(&out_dir)?;
    if std::env::var_os("CARGO_FEATURE_KERNELS").is_some() {
        compile_kernels(&out_dir)?;
    }
    Ok(())
}

fn compile_protos(out_dir: &Path) -> Result<(), Box<dyn Error>> {
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true);
    compiler.open_files(PROTO_FILES)?;
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

/// Writes all_reduce.fatbin, empty where there is no nvcc.
fn compile_kernels(out_dir: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={KERNEL_DIR}");
    for variable in ["NVCC", "CUDA_HOME", "PATH", "ALLREDUCED_CUDA_ARCHS"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let fatbin = out_dir.join("all_reduce.fatbin");
    let built = match find_nvcc() {
        None => false,
        Some(nvcc) => match run_nvcc(&nvcc, &fatbin) {
            Ok(()) => true,
            Err(error) if std::env::var_os("NVCC").is_some() => return Err(error),
            Err(error) => {
                let first = error
                    .to_string()
                    .lines()
                    .take(3)
                    .collect::<Vec<_>>()
                    .join(" ");
                println!(
                    "cargo::warning=no CUDA kernels in this build, executors will compile them: {first}"
                );
                false
            }
        },
    };
    if !built {
        std::fs::write(&fatbin, [])?;
    }
    // For the test that both ways build what they should.
    println!("cargo::rustc-env=ALLREDUCED_BUILT_WITH_NVCC={built}");
    Ok(())
}

fn run_nvcc(nvcc: &Path, fatbin: &Path) -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={}", nvcc.display());
    let help = Command::new(nvcc).arg("--help").output()?;
    let has_compress_mode = String::from_utf8_lossy(&help.stdout).contains("-compress-mode");
    let listed = Command::new(nvcc).arg("--list-gpu-code").output()?;
    if !listed.status.success() {
        return Err(format!("{} does not run: {}", nvcc.display(), listed.status).into());
    }
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let supported = |arch: &str| {
        let code = format!("sm_{arch}");
        listed.split_whitespace().any(|known| known == code)
    };
    let wanted = std::env::var("ALLREDUCED_CUDA_ARCHS").unwrap_or_default();
    let archs: Vec<&str> = if wanted.is_empty() {
        ARCHS.into_iter().filter(|arch| supported(arch)).collect()
    } else {
        wanted.split(',').map(str::trim).collect()
    };
    let first = archs.first().ok_or_else(|| {
        format!(
            "{} knows none of sm_{}",
            nvcc.display(),
            ARCHS.join(", sm_")
        )
    })?;
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fmad=false", "-fatbin"]);
    if has_compress_mode {
        command.arg("-compress-mode=size");
    }
    command.args([
        "--threads",
        &std::env::var("NUM_JOBS").unwrap_or_else(|_| "1".to_owned()),
    ]);
    command.arg(format!(
        "-gencode=arch=compute_{first},code=compute_{first}"
    ));
    for arch in &archs {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    command.arg("-o").arg(fatbin);
    command.arg(Path::new(KERNEL_DIR).join("all_reduce.cu"));
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!(
            "{} failed ({}); NVCC= (empty) builds without it:\n{}{}",
            nvcc.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    Ok(())
}

fn find_nvcc() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("NVCC") {
        return (!named.is_empty()).then(|| named.into());
    }
    let home = std::env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    home.into_iter()
        .chain(std::env::split_paths(&path))
        .map(|dir| dir.join("nvcc"))
        .find(|nvcc| nvcc.is_file())
}
