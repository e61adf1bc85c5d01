//! What benchmarks of this crate's inside need from it.
//!
//! Owns nothing but a door: `benches/plan.rs` times [`crate::plan::plan`] through it. Not an interface for anybody else.

use crate::config::Config;
use crate::explain::{Asked, Machine, Question};
use allreduce_contract::{Dtype, Op, WorldSize};

/// Plans for a machine that is described.
pub struct Planner {
    asked: Asked,
}

impl Planner {
    /// Of a preset.
    ///
    /// # Panics
    /// If there is no such preset or world size.
    #[allow(clippy::panic, clippy::unwrap_used)] // a benchmark's own mistake
    pub fn new(preset: &str, world_size: u32) -> Self {
        let machine = Machine {
            topology: crate::topology::preset(preset).unwrap(),
            origin: "preset".to_owned(),
            config: Config::default(),
            tuned: None,
        };
        Self {
            asked: machine.communicator(WorldSize::new(world_size).unwrap(), None, None),
        }
    }

    /// Decides; whether it can be launched.
    pub fn plan(&self, bytes: u64) -> bool {
        let question = Question {
            num_elems: bytes / 2,
            dtype: Dtype::Bf16,
            op: Op::Sum,
        };
        self.asked.plan(question, None).is_ok()
    }
}
