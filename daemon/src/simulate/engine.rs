//! The engine: jobs that share bounds, in time.
//!
//! Owns the events (a job starts, its last byte leaves, its last byte arrives), the max-min fair rates in between, and
//! the ranks' way through the phases. Called by the simulation with what it has made of a topology and a schedule.
//! Refuses to know GPUs, links or algorithms: a job is bytes and the numbers of the bounds that they go through.

/// What several jobs share.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Bound {
    /// For people.
    pub(super) name: String,
    /// GB/s of all jobs together, by the number of distinct groups that they are of ([`Job::uses`]) less one; the last
    /// entry holds for more. Infinite where it binds nobody.
    pub(super) gbps: Vec<f64>,
}

impl Bound {
    fn at(&self, groups: u32) -> f64 {
        let index = groups.saturating_sub(1) as usize;
        let gbps = self.gbps.get(index).or(self.gbps.last());
        gbps.copied().unwrap_or(f64::INFINITY)
    }
}

/// Groups that a bound can tell apart.
const GROUPS: usize = 64;

/// Bytes from one node to another, in one phase.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Job {
    /// Number of the phase.
    pub(super) phase: usize,
    /// The node that has the bytes.
    pub(super) from: usize,
    /// The node that waits for them.
    pub(super) to: usize,
    /// The node that moves them: its phase is not over before they have left.
    pub(super) mover: usize,
    /// How many.
    pub(super) bytes: f64,
    /// From the moment at which both `from` and `mover` are in the phase until the first byte leaves.
    pub(super) before_us: f64,
    /// From the last byte's leaving until `to` knows that it is there.
    pub(super) after_us: f64,
    /// The bounds that it shares, each once, and the group that it is of there.
    pub(super) uses: Vec<(usize, usize)>,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    /// By phase: when the last rank was through it; infinite if some bytes never arrive.
    pub(super) ends_us: Vec<f64>,
    /// By bound: its use, integrated over time: microseconds at full use.
    pub(super) full_us: Vec<f64>,
    /// By job: bytes that have arrived.
    pub(super) arrived: Vec<f64>,
    /// Rounds that it took.
    pub(super) events: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Somebody is not in the phase yet.
    Waits,
    /// Its first byte leaves then.
    Starts(f64),
    /// Bytes leave, at a rate (bytes a microsecond); the last one then, if the rate stays.
    Flows { left: f64, rate: f64, until: f64 },
    /// It is known to be there then.
    Arrives(f64),
    /// It is.
    Done,
}

struct Run<'a> {
    job: &'a Job,
    state: State,
}

impl Run<'_> {
    /// When something happens to it, if nothing happens to others.
    fn next_us(&self) -> f64 {
        match self.state {
            State::Waits | State::Done => f64::INFINITY,
            State::Starts(at) | State::Arrives(at) => at,
            State::Flows { until, .. } => until,
        }
    }
}

/// How a node is through the phases.
#[derive(Debug, Clone)]
struct Node {
    /// By phase: when it came to it; infinite if it has not.
    entered_us: Vec<f64>,
    /// By phase: jobs that it waits for.
    awaited: Vec<usize>,
    /// The one that it is in.
    phase: usize,
    /// Between two phases.
    gap_us: f64,
    /// Whether the end of a phase is its own.
    is_rank: bool,
}

impl Node {
    /// Goes on as far as it can. Returns whether it came to another phase.
    fn go_on(&mut self, now: f64, ends_us: &mut [f64]) -> bool {
        let from = self.phase;
        while let (Some(0), Some(entered)) = (
            self.awaited.get(self.phase),
            self.entered_us.get(self.phase).copied(),
        ) {
            let over = now.max(entered);
            if let Some(end) = ends_us.get_mut(self.phase).filter(|_| self.is_rank) {
                *end = end.max(over);
            }
            self.phase += 1;
            if let Some(next) = self.entered_us.get_mut(self.phase) {
                *next = over + self.gap_us;
            }
        }
        self.phase != from
    }

    fn entered(&self, phase: usize) -> f64 {
        let entered = self.entered_us.get(phase).copied();
        entered.unwrap_or(f64::INFINITY)
    }

    fn has_one_less(&mut self, phase: usize) {
        if let Some(awaited) = self.awaited.get_mut(phase) {
            *awaited = awaited.saturating_sub(1);
        }
    }
}

/// Events this close are one: what is equal by symmetry differs by rounding only.
fn tolerance_us(now: f64) -> f64 {
    1e-9 + now * 1e-12
}

/// Runs all jobs. Nodes 0 to `ranks` (exclusive) are ranks, which take `gap_us` between two phases; others take none, and
/// their phases' ends do not count.
///
/// A node is in phase 0 at time 0, and in the next when all jobs that are addressed to it have arrived and all that it moves have
/// left; a job starts when its source and its mover are in its phase.
///
/// It ends: each round but the last takes at least one job (the one whose event is the earliest) from Starts to Flows, from Flows to
/// Arrives, or from Arrives to Done, and none ever goes back, so there are at most 3 rounds for each job, whatever the rates; a rate of
/// 0 is no event, and a round without an event is the last.
pub(super) fn run(
    ranks: usize,
    phases: usize,
    gap_us: f64,
    jobs: &[Job],
    bounds: &[Bound],
) -> Outcome {
    let count = jobs
        .iter()
        .map(|job| job.from.max(job.to).max(job.mover) + 1)
        .fold(ranks, usize::max);
    let mut nodes: Vec<Node> = (0..count)
        .map(|node| Node {
            entered_us: (0..phases)
                .map(|phase| if phase == 0 { 0.0 } else { f64::INFINITY })
                .collect(),
            awaited: vec![0; phases],
            phase: 0,
            gap_us: if node < ranks { gap_us } else { 0.0 },
            is_rank: node < ranks,
        })
        .collect();
    for job in jobs {
        // One's own reads have left when they are there.
        for node in awaiting(job) {
            let of = nodes.get_mut(node);
            if let Some(awaited) = of.and_then(|of| of.awaited.get_mut(job.phase)) {
                *awaited += 1;
            }
        }
    }
    let mut runs: Vec<Run<'_>> = jobs
        .iter()
        .map(|job| Run {
            job,
            state: State::Waits,
        })
        .collect();
    let mut ends_us = vec![0.0; phases];
    let mut full_us = vec![0.0; bounds.len()];
    let mut loads = vec![Load::default(); bounds.len()];
    let mut now = 0.0_f64;
    let mut events = 0;
    for node in &mut nodes {
        node.go_on(now, &mut ends_us);
    }
    release(&mut runs, &nodes);
    loop {
        let next = runs.iter().map(Run::next_us).fold(f64::INFINITY, f64::min);
        if !next.is_finite() {
            break;
        }
        events += 1;
        let passed = (next - now).max(0.0);
        now = now.max(next);
        for (full, load) in full_us.iter_mut().zip(&loads) {
            *full += load.used * passed;
        }
        let due = now + tolerance_us(now);
        let (mut rates_change, mut nodes_change) = (false, false);
        for run in &mut runs {
            let is_due = run.next_us() <= due;
            run.state = match run.state {
                State::Starts(_) if is_due => {
                    rates_change = true;
                    State::Flows {
                        left: run.job.bytes,
                        rate: 0.0,
                        until: f64::INFINITY,
                    }
                }
                State::Flows { .. } if is_due => {
                    rates_change = true;
                    if run.job.mover != run.job.to
                        && let Some(mover) = nodes.get_mut(run.job.mover)
                    {
                        nodes_change = true;
                        mover.has_one_less(run.job.phase);
                    }
                    State::Arrives(now + run.job.after_us)
                }
                State::Flows { left, rate, until } => State::Flows {
                    left: (left - rate * passed).max(0.0),
                    rate,
                    until,
                },
                State::Arrives(_) if is_due => {
                    nodes_change = true;
                    if let Some(to) = nodes.get_mut(run.job.to) {
                        to.has_one_less(run.job.phase);
                    }
                    State::Done
                }
                state => state,
            };
        }
        if nodes_change {
            let mut came = false;
            for node in &mut nodes {
                came |= node.go_on(now, &mut ends_us);
            }
            if came {
                release(&mut runs, &nodes);
            }
        }
        if rates_change {
            share(&mut runs, bounds, &mut loads, now);
        }
    }
    if runs.iter().any(|run| run.state != State::Done) {
        // Whatever was not through by then never is.
        let stuck = nodes.iter().filter(|node| node.is_rank);
        let first = stuck.map(|node| node.phase).min().unwrap_or(0);
        for end in ends_us.iter_mut().skip(first) {
            *end = f64::INFINITY;
        }
    }
    Outcome {
        ends_us,
        full_us,
        arrived: runs
            .iter()
            .map(|run| match run.state {
                State::Done => run.job.bytes,
                _ => 0.0,
            })
            .collect(),
        events,
    }
}

/// Who cannot go on without a job.
fn awaiting(job: &Job) -> impl Iterator<Item = usize> {
    std::iter::once(job.to).chain((job.mover != job.to).then_some(job.mover))
}

/// Gives a start to the jobs whose source and mover are in their phase.
fn release(runs: &mut [Run<'_>], nodes: &[Node]) {
    for run in runs.iter_mut().filter(|run| run.state == State::Waits) {
        let entered = |node: usize| {
            let node = nodes.get(node);
            node.map_or(0.0, |node| node.entered(run.job.phase))
        };
        let both = entered(run.job.from).max(entered(run.job.mover));
        if both.is_finite() {
            run.state = State::Starts(both + run.job.before_us);
        }
    }
}

/// What goes through a bound at the moment.
#[derive(Debug, Clone, Copy, Default)]
struct Load {
    /// GB/s.
    gbps: f64,
    left: f64,
    /// Jobs without a rate yet.
    open: u32,
    /// One bit each.
    groups: u64,
    is_tight: bool,
    /// Share of `gbps` that is used.
    used: f64,
}

/// Max-min fair: all rates grow alike, and those that go through a bound that is full stay. Each round fixes at least one job's
/// rate, so there are at most as many as jobs or bounds.
fn share(runs: &mut [Run<'_>], bounds: &[Bound], loads: &mut [Load], now: f64) {
    /// GB/s in bytes a microsecond.
    const BYTES: f64 = 1e3;
    /// What is a job's own until its rate is fixed.
    const OPEN: f64 = -1.0;
    loads.fill(Load::default());
    for run in runs.iter_mut() {
        if let State::Flows { rate, .. } = &mut run.state {
            *rate = OPEN;
            for (bound, group) in &run.job.uses {
                if let Some(load) = loads.get_mut(*bound) {
                    load.open += 1;
                    load.groups |= 1 << (group % GROUPS);
                }
            }
        }
    }
    for (load, bound) in loads.iter_mut().zip(bounds) {
        load.gbps = bound.at(load.groups.count_ones());
        load.left = load.gbps;
    }
    loop {
        let least = loads
            .iter()
            .filter(|load| load.open > 0)
            .map(|load| load.left / f64::from(load.open))
            .fold(f64::INFINITY, f64::min);
        let is_bound = least.is_finite();
        for load in loads.iter_mut() {
            let fair = load.left / f64::from(load.open.max(1));
            load.is_tight = is_bound && load.open > 0 && fair <= least * (1.0 + 1e-12);
        }
        let mut is_over = true;
        for run in runs.iter_mut() {
            let State::Flows { left, rate, until } = &mut run.state else {
                continue;
            };
            if *rate != OPEN {
                continue;
            }
            let mut uses = run.job.uses.iter();
            if is_bound && !uses.any(|(of, _)| loads.get(*of).is_some_and(|load| load.is_tight)) {
                is_over = false;
                continue;
            }
            let gbps = least.max(0.0);
            *rate = gbps * BYTES;
            *until = match (*left > 0.0, *rate > 0.0) {
                (true, true) => now + *left / *rate,
                (true, false) => f64::INFINITY,
                (false, _) => now,
            };
            for (bound, _) in run.job.uses.iter().filter(|_| is_bound) {
                if let Some(load) = loads.get_mut(*bound) {
                    load.left = (load.left - gbps).max(0.0);
                    load.open = load.open.saturating_sub(1);
                }
            }
        }
        if is_over {
            break;
        }
    }
    for load in loads.iter_mut() {
        load.used = match load.gbps.is_finite() && load.gbps > 0.0 && load.groups != 0 {
            true => 1.0 - load.left / load.gbps,
            false => 0.0,
        };
    }
}
