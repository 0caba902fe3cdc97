//! A rank of a trial: makes the planned calls, commits its fault, and reports the outcome.

use std::io::{Write, stdout};
use std::process::{abort, exit, id};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use consort_comm::{CommError, Group, World};
use consort_types::Rng;
use rustix::process::{Pid, Signal, kill_process};

use super::calls::{Started, is_right, start};
use super::plan::{Call, Class, Fault, Kind, Plan, shuffle};

/// Longer than any trial takes on a busy machine: the deadline of waits that a notice must end.
pub(crate) const LONG: Duration = Duration::from_secs(20);
/// The deadline of waits that only a deadline can end.
const SHORT: Duration = Duration::from_millis(300);
const HEAP: usize = 64 << 20;

/// Microseconds, on a clock that all ranks share.
fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

/// Prints one whole line on the standard output, which the test harness also writes to.
fn say(line: &str) {
    let mut out = stdout().lock();
    // On a new line: the harness may have written half of one.
    write!(out, "\n{line}\n").unwrap();
    out.flush().unwrap();
}

/// The exit code of a survivor.
pub(crate) fn code(rank: usize) -> i32 {
    20 + rank as i32
}

/// The exit code of a guilty rank that exits with one.
pub(crate) const GUILTY: i32 = 7;

pub(crate) fn play(plan: &Plan) {
    let world = consort_comm::init().unwrap();
    let rank = world.rank();
    let groups = Groups::new(plan, &world);
    say(&format!("job {} process {} heaps {}", std::env::var("CONSORT_JOB").unwrap(), id(), heaps()));
    let ended = Player { plan, world: &world, groups: &groups, rank }.play();
    match ended {
        Ended::Well => say("done"),
        Ended::Left => say("left"),
        Ended::Failed(failed) => {
            // Every later call on the group returns the same error.
            let group = if failed.on_part { groups.part.as_ref().unwrap() } else { &groups.world };
            let again = group.barrier().and_then(|pending| pending.wait(Instant::now() + LONG)).map(drop);
            assert_eq!(again.unwrap_err(), *failed.error);
            let Failed { began, at, over, error, .. } = &failed;
            let named: Vec<String> = error.culprits().iter().map(usize::to_string).collect();
            let text = error.to_string().replace('\n', "|");
            say(&format!("error {began} {at} {over} {} {text}", named.join(",")));
            if !plan.exits {
                drop(groups);
                drop(world);
            }
            exit(code(rank));
        }
    }
}

/// The inodes of the heaps that are mapped here.
fn heaps() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let heaps = maps.lines().filter(|line| line.contains("/memfd:consort"));
    heaps.filter_map(|line| line.split_whitespace().nth(4)).collect::<Vec<_>>().join(",")
}

struct Groups {
    world: Group,
    /// The group of the part that contains this rank.
    part: Option<Group>,
    /// The process ids of all ranks.
    processes: Vec<i32>,
}

impl Groups {
    fn new(plan: &Plan, world: &World) -> Groups {
        let until = Instant::now() + LONG;
        let group = world.group(HEAP, LONG).unwrap();
        group.set_strict(plan.strict);
        let part = group.subgroup(&plan.parts, until).unwrap();
        let peers = world.control().unwrap().rendezvous(&[], None, LONG).unwrap();
        let processes = peers.iter().map(|peer| i32::try_from(peer.pid).unwrap()).collect();
        Groups { world: group, part, processes }
    }
}

enum Ended {
    Well,
    Left,
    Failed(Failed),
}

struct Failed {
    /// When the failed call began, and when it failed.
    began: u128,
    at: u128,
    /// How long after its deadline, in microseconds; negative if before.
    over: i128,
    on_part: bool,
    error: Box<CommError>,
}

/// The time limits of a call.
struct Clock {
    began: u128,
    until: Instant,
}

impl Clock {
    fn new(limit: Duration) -> Clock {
        Clock { began: now(), until: Instant::now() + limit }
    }

    fn failed(&self, on_part: bool, error: CommError) -> Failed {
        let late = Instant::now().saturating_duration_since(self.until).as_micros() as i128;
        let early = self.until.saturating_duration_since(Instant::now()).as_micros() as i128;
        Failed { began: self.began, at: now(), over: late - early, on_part, error: Box::new(error) }
    }
}

struct Player<'a> {
    plan: &'a Plan,
    world: &'a World,
    groups: &'a Groups,
    rank: usize,
}

impl Player<'_> {
    fn play(&self) -> Ended {
        match self.play_steps() {
            Ok(true) => Ended::Well,
            Ok(false) => Ended::Left,
            Err(failed) => Ended::Failed(failed),
        }
    }

    /// Runs all steps, and then barriers that cannot complete if anything failed. False if this rank left before.
    fn play_steps(&self) -> Result<bool, Failed> {
        let plan = self.plan;
        for (i, calls) in plan.steps.iter().enumerate() {
            let faulty = plan.step == i;
            if faulty && plan.fault.class() == Class::Absence {
                // All begin together, so that only the guilty rank is late.
                self.barrier(LONG)?;
            }
            if faulty && plan.fault == Fault::OtherOrder {
                self.one_by_one(i, calls)?;
                continue;
            }
            if faulty && !plan.in_flight && !self.fault() {
                return Ok(false);
            }
            let mut pendings = self.start(i, calls)?;
            if faulty && plan.in_flight && !self.fault() {
                return Ok(false);
            }
            shuffle(&mut Rng::new(plan.seed ^ (self.rank * 100 + i) as u64), &mut pendings);
            for (at, call, pending) in pendings {
                self.wait((i, at), &call, pending)?;
            }
        }
        // Two: a rank that another one ends may have passed the first already.
        for _ in 0..2 {
            self.barrier(self.limit(plan.steps.len()))?;
        }
        Ok(true)
    }

    /// The limit of a wait in a step: long before the fault, and if a notice must end the wait.
    fn limit(&self, step: usize) -> Duration {
        let absent = self.plan.fault.class() == Class::Absence && step >= self.plan.step;
        if absent { SHORT } else { LONG }
    }

    fn start(&self, step: usize, calls: &[Call]) -> Result<Vec<(usize, Call, Started)>, Failed> {
        let plan = self.plan;
        let mut pendings = Vec::new();
        for (i, call) in calls.iter().enumerate() {
            let Some(group) = self.group(call) else { continue };
            let differs = self.rank == plan.guilty && (step, i) == (plan.step, plan.at);
            let fault = (differs && plan.fault.class() == Class::Mismatch).then_some(plan.fault);
            if fault.is_some() {
                say(&format!("fault {}", now()));
            }
            let clock = Clock::new(self.limit(step));
            let pending = start(group, call, fault);
            pendings.push((i, *call, pending.map_err(|error| clock.failed(call.on_part, error))?));
        }
        Ok(pendings)
    }

    fn wait(&self, (step, at): (usize, usize), call: &Call, pending: Started) -> Result<(), Failed> {
        let clock = Clock::new(self.limit(step));
        let bytes = pending(clock.until).map_err(|error| clock.failed(call.on_part, error))?;
        let group = self.group(call).unwrap();
        assert!(is_right(group, call, &bytes), "{call:?}: the result is wrong");
        let plan = self.plan;
        let differs = plan.fault.class() == Class::Mismatch && (step, at) == (plan.step, plan.at);
        assert!(!differs || !self.meets(group, call), "{call:?}: a result of a call that differs");
        Ok(())
    }

    /// Whether this rank takes part in the guilty rank's wrong call.
    fn meets(&self, group: &Group, call: &Call) -> bool {
        let plan = self.plan;
        let members: Vec<usize> = match call.on_part {
            true => plan.parts.iter().find(|part| part.contains(&self.rank)).unwrap().clone(),
            false => (0..plan.ranks).collect(),
        };
        let Some(guilty) = members.iter().position(|rank| *rank == plan.guilty) else { return false };
        let (me, receiver) = (group.rank(), (guilty + 1) % group.size());
        // A small message of ranks that are not strict has already left its sender.
        call.kind != Kind::Exchange || me == receiver || me == guilty && plan.strict
    }

    /// Waits for each call before the next; the guilty rank makes them in reverse order.
    fn one_by_one(&self, step: usize, calls: &[Call]) -> Result<(), Failed> {
        let mut calls = calls.to_vec();
        if self.rank == self.plan.guilty {
            say(&format!("fault {}", now()));
            calls.reverse();
        }
        for call in &calls {
            for (_, call, pending) in self.start(step, &[*call])? {
                self.wait((step, usize::MAX), &call, pending)?;
            }
        }
        Ok(())
    }

    fn barrier(&self, limit: Duration) -> Result<(), Failed> {
        let clock = Clock::new(limit);
        let outcome = self.groups.world.barrier().and_then(|pending| pending.wait(clock.until));
        outcome.map(drop).map_err(|error| clock.failed(false, error))
    }

    fn group(&self, call: &Call) -> Option<&Group> {
        if call.on_part { self.groups.part.as_ref() } else { Some(&self.groups.world) }
    }

    /// Commits this rank's fault, if it is guilty; returns whether to continue.
    fn fault(&self) -> bool {
        let plan = self.plan;
        let by_another = matches!(plan.fault, Fault::KilledByAnother | Fault::StoppedByAnother);
        if self.rank != if by_another { plan.other } else { plan.guilty } {
            return true;
        }
        if matches!(plan.fault.class(), Class::Death | Class::Absence) {
            say(&format!("fault {}", now()));
        }
        match plan.fault {
            Fault::Killed | Fault::KilledByAnother => self.signal(Signal::KILL),
            Fault::Stopped | Fault::StoppedByAnother => self.signal(Signal::STOP),
            Fault::ExitsWith0 => exit(0),
            Fault::ExitsWithCode => exit(GUILTY),
            Fault::Panics => panic!("the planned panic"),
            Fault::Aborts => abort(),
            Fault::Late => self.come_late(),
            Fault::Leaves => return false,
            _ => {}
        }
        true
    }

    fn signal(&self, signal: Signal) {
        let process = Pid::from_raw(self.groups.processes[self.plan.guilty]).unwrap();
        kill_process(process, signal).unwrap();
        // The signal takes effect a moment later; the rank must not continue until then.
        let until = Instant::now() + LONG;
        while acts(process) && Instant::now() < until {
            thread::yield_now();
        }
    }

    /// Waits until the others have given up.
    fn come_late(&self) {
        let until = Instant::now() + LONG;
        let control = self.world.control().unwrap();
        while !control.failed() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether a process is neither stopped nor dead.
fn acts(process: Pid) -> bool {
    let stat =
        std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"TZX".contains(state))
}
