//! What a decision costs: the plan for every size, on machines that are described.

use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;

fn decide(criterion: &mut Criterion) {
    for name in ["gen5x8-one-root", "h100x8-nvlink", "a800x8-gen4-2x4"] {
        let planner = allreduced::measure::Planner::new(name, 8);
        for bytes in [1024, 43_008, 1 << 20, 64 << 20] {
            criterion.bench_function(&format!("plan/{name}/{bytes}"), |bencher| {
                bencher.iter(|| planner.plan(black_box(bytes)));
            });
        }
    }
}

criterion_group!(benches, decide);
criterion_main!(benches);
