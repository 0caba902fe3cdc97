//! Who this process is: its rank, the size of the world and the job it belongs to, from the environment.
//!
//! The first launcher in this table whose rank is set decides; with none of them the process is alone, a
//! world of one.
//!
//! | launcher | rank | size | rank on this host |
//! | --- | --- | --- | --- |
//! | `consort run` | `CONSORT_RANK` | `CONSORT_SIZE` | the rank: it has one host |
//! | Open MPI's `mpirun` | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK` |
//! | PMI (MPICH, Intel MPI) | `PMI_RANK` | `PMI_SIZE` | `MPI_LOCALRANKID`, else the rank |
//! | Slurm's `srun` | `SLURM_PROCID` | `SLURM_NTASKS` | `SLURM_LOCALID` |
//! | `torchrun` | `RANK` | `WORLD_SIZE` | `LOCAL_RANK` |
//!
//! `CONSORT_JOB` (the job's name) and `CONSORT_SECRET` (32 hexadecimal digits) say how to reach the job. `consort run`
//! sets both. Under mpirun and srun they are agreed on over MPI; under torchrun the user must set them, equal on all ranks.
//! `CONSORT_ENGINE` (`mpi` or `shm`) says what moves the data, if it should not depend on the number of hosts.
//! `CONSORT_DEADLINE` (seconds, `0.5` or `30`) is the deadline of calls that name none.
//!
//! A rank without its size, a size without its rank, or a value that is not a number is an error and not a world of
//! one: a job whose ranks all assume that they are alone silently gives wrong results. Slurm is the exception: an
//! allocation sets `SLURM_NTASKS` in shells that are not ranks.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use consort_types::Failure;

use crate::job::{Job, Secret};

/// What started this process as a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `consort run`, which also runs the job's coordinator, or a user who set its variables by hand.
    Consort,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// A launcher that speaks PMI: MPICH's and Intel's `mpirun`.
    Pmi,
    /// Slurm's `srun`.
    Slurm,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// Nothing: a world of one.
    Alone,
}

/// A process's place among the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// This rank, from 0.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// The rank among those on this host, from 0.
    pub local_rank: usize,
    /// The launcher that set these.
    pub by: Launcher,
    /// How to reach the job's coordinator, if the environment says so.
    pub job: Option<Job>,
    /// How long calls wait that name no deadline themselves, where the environment says it; else
    /// [`DEFAULT_DEADLINE`](crate::DEFAULT_DEADLINE).
    pub deadline: Option<Duration>,
}

/// The variables of a launcher.
struct Family {
    by: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: Option<&'static str>,
    /// Whether the size is also set for processes that are not ranks.
    size_alone: bool,
}

const FAMILIES: [Family; 5] = [
    Family {
        by: Launcher::Consort,
        rank: "CONSORT_RANK",
        size: "CONSORT_SIZE",
        local_rank: None,
        size_alone: false,
    },
    Family {
        by: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        size_alone: false,
    },
    Family {
        by: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: Some("MPI_LOCALRANKID"),
        size_alone: false,
    },
    Family {
        by: Launcher::Slurm,
        rank: "SLURM_PROCID",
        size: "SLURM_NTASKS",
        local_rank: Some("SLURM_LOCALID"),
        size_alone: true,
    },
    Family {
        by: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: Some("LOCAL_RANK"),
        size_alone: false,
    },
];

impl Launch {
    /// What the environment of this process says.
    pub fn from_env() -> Result<Launch, EnvError> {
        Launch::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// What an environment says, given how to look up a variable in it.
    pub fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Launch, EnvError> {
        let job = read_job(&lookup)?;
        let deadline = lookup(DEADLINE).map(|value| read_deadline(&value)).transpose()?;
        for family in &FAMILIES {
            let (rank, size) = match (lookup(family.rank), lookup(family.size)) {
                (Some(rank), Some(size)) => (rank, size),
                (Some(value), None) => {
                    return Err(EnvError::HalfSet { set: family.rank, value, missing: family.size });
                }
                (None, Some(value)) if !family.size_alone => {
                    return Err(EnvError::HalfSet { set: family.size, value, missing: family.rank });
                }
                (None, _) => continue,
            };
            let (rank, size) = (number(family.rank, &rank)?, number(family.size, &size)?);
            if rank >= size {
                return Err(EnvError::OutOfRange { variable: family.rank, rank, of: family.size, size });
            }
            if family.by == Launcher::Torchrun
                && let Some(local) = lookup("LOCAL_WORLD_SIZE")
            {
                let local = number("LOCAL_WORLD_SIZE", &local)?;
                if local != size {
                    return Err(EnvError::SeveralHosts { size, local });
                }
            }
            let local_rank = match family.local_rank.and_then(|name| Some((name, lookup(name)?))) {
                Some((name, value)) => number(name, &value)?,
                None => rank,
            };
            return Ok(Launch { rank, size, local_rank, by: family.by, job, deadline });
        }
        Ok(Launch { rank: 0, size: 1, local_rank: 0, by: Launcher::Alone, job: None, deadline })
    }
}

const DEADLINE: &str = "CONSORT_DEADLINE";
const ENGINE: &str = "CONSORT_ENGINE";

/// What moves the data between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory on one host, MPI over several.
    Automatic,
    /// Shared memory.
    Shm,
    /// MPI, also on one host.
    Mpi,
}

impl Transport {
    /// What the environment of this process asks for.
    pub fn from_env() -> Result<Transport, EnvError> {
        match std::env::var(ENGINE).as_deref() {
            Err(_) | Ok("") => Ok(Transport::Automatic),
            Ok("shm") => Ok(Transport::Shm),
            Ok("mpi") => Ok(Transport::Mpi),
            Ok(value) => Err(EnvError::Engine { value: value.to_string() }),
        }
    }
}

fn read_deadline(value: &str) -> Result<Duration, EnvError> {
    let seconds = value.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds
        .filter(|deadline| !deadline.is_zero())
        .ok_or_else(|| EnvError::Deadline { value: value.to_string() })
}

fn read_job(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Job>, EnvError> {
    match (lookup("CONSORT_JOB"), lookup("CONSORT_SECRET")) {
        (None, None) => Ok(None),
        (Some(value), None) => {
            Err(EnvError::HalfSet { set: "CONSORT_JOB", value, missing: "CONSORT_SECRET" })
        }
        (None, Some(_)) => Err(EnvError::HalfSet {
            set: "CONSORT_SECRET",
            value: "(not shown)".to_string(),
            missing: "CONSORT_JOB",
        }),
        (Some(name), Some(secret)) => {
            if !Job::is_name(&name) {
                return Err(EnvError::JobName { value: name });
            }
            let length = secret.len();
            let secret = Secret::from_hex(&secret).ok_or(EnvError::Secret { length })?;
            Ok(Some(Job { name, secret }))
        }
    }
}

fn number(variable: &'static str, value: &str) -> Result<usize, EnvError> {
    // `parse` alone would also accept `+1`.
    let digits = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|n: &usize| digits && u32::try_from(*n).is_ok());
    number.ok_or_else(|| EnvError::NotANumber { variable, value: value.to_string() })
}

/// Why the environment does not say who this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvError {
    /// One variable of a pair is set.
    HalfSet {
        /// The one that is.
        set: &'static str,
        /// Its value.
        value: String,
        /// The one that is not.
        missing: &'static str,
    },
    /// A value is not a number.
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A rank is not below the size.
    OutOfRange {
        /// The variable with the rank.
        variable: &'static str,
        /// The rank.
        rank: usize,
        /// The variable with the size.
        of: &'static str,
        /// The size.
        size: usize,
    },
    /// `CONSORT_JOB` is not a name.
    JobName {
        /// Its value.
        value: String,
    },
    /// `CONSORT_SECRET` is not a secret. Its value is not shown.
    Secret {
        /// How many characters it has.
        length: usize,
    },
    /// `CONSORT_ENGINE` names no engine.
    Engine {
        /// Its value.
        value: String,
    },
    /// `torchrun` started ranks on several hosts.
    SeveralHosts {
        /// How many ranks there are.
        size: usize,
        /// How many of them are on this host.
        local: usize,
    },
    /// `CONSORT_DEADLINE` is not a number of seconds.
    Deadline {
        /// Its value.
        value: String,
    },
}

impl EnvError {
    /// The error as a [`Failure`], to which a caller adds its op and its source line.
    pub fn failure(&self) -> Box<Failure> {
        match self {
            EnvError::HalfSet { set, value, missing } => {
                Failure::new((format!("{missing} beside {set}={value}"), "none"))
                    .of("init")
                    .note(format!("set both, or unset {set} to run as a world of one"))
            }
            EnvError::NotANumber { variable, value } => {
                Failure::new(("a number from 0", format!("{value:?}")))
                    .of(format!("init: {variable}"))
                    .note("the launcher sets it; unset it to run without one")
            }
            EnvError::OutOfRange { variable, rank, of, size } => {
                Failure::new((format!("a rank below {of}={size}"), rank.to_string()))
                    .of(format!("init: {variable}"))
                    .note("ranks count from 0")
            }
            EnvError::JobName { value } => {
                Failure::new(("1 to 64 letters, digits, `.`, `_`, `-`", format!("{value:?}")))
                    .of("init: CONSORT_JOB")
                    .note("it must be unique on this host")
            }
            EnvError::Secret { length } => {
                Failure::new(("32 hexadecimal digits", format!("{length} characters")))
                    .of("init: CONSORT_SECRET")
                    .note("`openssl rand -hex 16` makes one")
            }
            EnvError::Engine { value } => Failure::new(("mpi or shm", format!("{value:?}")))
                .of(format!("init: {ENGINE}"))
                .note("unset it for shared memory on one host and MPI over several"),
            EnvError::SeveralHosts { size, local } => {
                Failure::new((format!("all {size} ranks of torchrun on one host"), format!("{local}")))
                    .of("init")
                    .note(format!("over several hosts start with MPI: mpirun -n {size} PROGRAM"))
            }
            EnvError::Deadline { value } => {
                Failure::new(("a number of seconds above 0", format!("{value:?}")))
                    .of(format!("init: {DEADLINE}"))
                    .note("`consort run --deadline SECS` sets it; unset it for the default of 300")
            }
        }
    }
}

impl fmt::Display for EnvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.failure().fmt(f)
    }
}

impl Error for EnvError {}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "00112233445566778899aabbccddeeff";

    fn read(variables: &[(&str, &str)]) -> Result<Launch, EnvError> {
        let of = |name: &str| variables.iter().find(|(key, _)| *key == name);
        Launch::read(|name| of(name).map(|(_, value)| value.to_string()))
    }

    fn place(variables: &[(&str, &str)]) -> (usize, usize, usize, Launcher) {
        let launch = read(variables).unwrap();
        (launch.rank, launch.size, launch.local_rank, launch.by)
    }

    #[test]
    fn each_launcher_is_read() {
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "5"),
            ("OMPI_COMM_WORLD_SIZE", "8"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ];
        assert_eq!(place(&[("CONSORT_RANK", "2"), ("CONSORT_SIZE", "4")]), (2, 4, 2, Launcher::Consort));
        assert_eq!(place(&ompi), (5, 8, 1, Launcher::OpenMpi));
        assert_eq!(place(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), (1, 2, 1, Launcher::Pmi));
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0")];
        assert_eq!(place(&slurm), (3, 4, 0, Launcher::Slurm));
        let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
        assert_eq!(place(&torchrun), (1, 2, 1, Launcher::Torchrun));
        assert_eq!(place(&[]), (0, 1, 0, Launcher::Alone));
    }

    #[test]
    fn our_own_variables_come_first_and_a_slurm_shell_is_no_rank() {
        let both = [("RANK", "1"), ("WORLD_SIZE", "2"), ("CONSORT_RANK", "0"), ("CONSORT_SIZE", "3")];
        assert_eq!(place(&both), (0, 3, 0, Launcher::Consort));
        assert_eq!(place(&[("SLURM_NTASKS", "4")]), (0, 1, 0, Launcher::Alone));
    }

    #[test]
    fn a_job_needs_its_name_and_its_secret() {
        let rank = [("CONSORT_RANK", "0"), ("CONSORT_SIZE", "1")];
        let with = |more: &[(&'static str, &'static str)]| read(&[&rank[..], more].concat());
        let job = with(&[("CONSORT_JOB", "j.1"), ("CONSORT_SECRET", SECRET)]).unwrap().job.unwrap();
        assert_eq!((job.socket().as_str(), job.secret.to_hex().as_str()), ("consort-j.1", SECRET));
        assert_eq!(with(&[]).unwrap().job, None);
        for (more, text) in [
            (&[("CONSORT_JOB", "j")][..], "expected CONSORT_SECRET beside CONSORT_JOB=j, got none"),
            (
                &[("CONSORT_SECRET", SECRET)],
                "expected CONSORT_JOB beside CONSORT_SECRET=(not shown), got none",
            ),
            (&[("CONSORT_JOB", "a b"), ("CONSORT_SECRET", SECRET)], "digits, `.`, `_`, `-`, got \"a b\""),
            (
                &[("CONSORT_JOB", "j"), ("CONSORT_SECRET", "abc")],
                "expected 32 hexadecimal digits, got 3 char",
            ),
        ] {
            let error = with(more).unwrap_err().to_string();
            assert!(error.contains(text) && !error.contains(SECRET), "{error}");
        }
    }

    #[test]
    fn a_deadline_is_a_positive_number_of_seconds() {
        let deadline = |value| read(&[("CONSORT_DEADLINE", value)]).map(|launch| launch.deadline);
        assert_eq!(read(&[]).unwrap().deadline, None);
        assert_eq!(deadline("30"), Ok(Some(Duration::from_secs(30))));
        assert_eq!(deadline("0.25"), Ok(Some(Duration::from_millis(250))));
        assert!(deadline("1e15").is_ok_and(|deadline| deadline > Some(Duration::from_secs(1 << 40))));
        for wrong in ["", "0", "-1", "1e300", "inf", "NaN", "5s", " 5", "1e-12"] {
            let error = deadline(wrong).unwrap_err().to_string();
            let expected =
                format!("init: CONSORT_DEADLINE: expected a number of seconds above 0, got {wrong:?}\n");
            assert!(error.starts_with(&expected) && error.contains("\n  note: "), "{error}");
        }
        let ranks = [("CONSORT_RANK", "1"), ("CONSORT_SIZE", "2"), ("CONSORT_DEADLINE", "7")];
        assert_eq!(read(&ranks).unwrap().deadline, Some(Duration::from_secs(7)));
    }

    #[test]
    fn torchrun_is_for_one_host() {
        let on = |local| {
            read(&[("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", local)])
        };
        assert_eq!(on("4").unwrap().size, 4);
        let error = on("2").unwrap_err().to_string();
        assert!(error.contains("all 4 ranks of torchrun on one host, got 2"), "{error}");
        assert!(error.contains("mpirun -n 4"), "{error}");
    }

    #[test]
    fn half_set_and_malformed_variables_are_named() {
        for (variables, text) in [
            (&[("CONSORT_RANK", "1")][..], "init: expected CONSORT_SIZE beside CONSORT_RANK=1, got none"),
            (&[("WORLD_SIZE", "2")], "init: expected RANK beside WORLD_SIZE=2, got none"),
            (&[("SLURM_PROCID", "2")], "init: expected SLURM_NTASKS beside SLURM_PROCID=2, got none"),
            (
                &[("PMI_RANK", "-1"), ("PMI_SIZE", "2")],
                "init: PMI_RANK: expected a number from 0, got \"-1\"",
            ),
            (
                &[("PMI_RANK", "+1"), ("PMI_SIZE", "2")],
                "init: PMI_RANK: expected a number from 0, got \"+1\"",
            ),
            (&[("RANK", "0"), ("WORLD_SIZE", "")], "init: WORLD_SIZE: expected a number from 0, got \"\""),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "init: RANK: expected a rank below WORLD_SIZE=2, got 2"),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], "init: RANK: expected a rank below WORLD_SIZE=0, got 0"),
        ] {
            let error = read(variables).unwrap_err().to_string();
            assert!(error.starts_with(text) && error.contains("\n  note: "), "{error}");
        }
    }
}
