//! Prints how reductions compare with a memcpy of as many bytes, on this machine and one thread.
//!
//! `cargo run --release -p allreduce-kernels --example reduce_bench [all]`: the default is the cases with a
//! target; `all` adds every dtype and path.

use allreduce_contract::{Dtype, Op};
use allreduce_kernels::measure::{Case, Destinations, run};
use allreduce_kernels::{Path, ReduceError, Stores};

const SMALL_BYTES: usize = 43_008;
const LARGE_BYTES: usize = 16 << 20;

fn main() -> Result<(), ReduceError> {
    let all = std::env::args().any(|argument| argument == "all");
    println!("memcpy: as many bytes, read and written together, as the reduction moves");
    println!(
        "dtype  op    N  dsts      bytes  path    stores        reduce us p50     p99   memcpy us p50     p99  ratio"
    );
    let dtypes = if all {
        &Dtype::ALL[..]
    } else {
        &[Dtype::F32, Dtype::Bf16]
    };
    let paths = if all { &Path::ALL[..] } else { &[Path::best()] };
    for &path in paths.iter().filter(|path| path.is_available()) {
        for &dtype in dtypes {
            for len_bytes in [SMALL_BYTES, LARGE_BYTES] {
                for world_size in [2, 4, 8] {
                    for destinations in
                        [Destinations::One, Destinations::InPlace, Destinations::Each]
                    {
                        print(&Case {
                            dtype,
                            op: Op::Sum,
                            world_size,
                            len_bytes,
                            destinations,
                            path,
                            stores: Stores::Auto,
                        })?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn print(case: &Case) -> Result<(), ReduceError> {
    let iterations = if case.len_bytes > 1 << 20 { 40 } else { 4000 };
    let measured = run(case, iterations)?;
    println!(
        "{:<5}  {:<4} {:>2}  {:<7} {:>8}  {:<6}  {:<12} {:>14.2} {:>7.1} {:>15.2} {:>7.1}  {:>5.2}",
        case.dtype,
        case.op,
        case.world_size,
        format!("{:?}", case.destinations),
        case.len_bytes,
        case.path,
        format!("{:?}", case.stores),
        measured.reduce_us_p50,
        measured.reduce_us_p99,
        measured.memcpy_us_p50,
        measured.memcpy_us_p99,
        measured.ratio(),
    );
    Ok(())
}
