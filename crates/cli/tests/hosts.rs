//! `consort doctor` and `consort run --hosts` with the MPIs of this machine, on hosts that are network namespaces. A missing
//! MPI is a counted skip, and so are namespaces that the kernel forbids.
//!
//! The ranks are this program itself, so it has no test harness.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

use std::env;
use std::process::{Command, Output};

use consort::{Init, Reduce, Tensor};

const RANK: &str = "__rank";
const CONSORT: &str = env!("CARGO_BIN_EXE_consort");
/// Makes the hosts: how many, the rate of their network, a mark for what they leave behind, the command on the first.
const SCRIPT: &str = include_str!("../../comm/tests/mpi/hosts.sh");
const AGENT: &str = "/run/netns/agent";

/// An mpirun, what its library says of itself, and the variables by which it reaches the hosts of the script.
struct Mpi {
    mpirun: &'static str,
    version: &'static str,
    variables: &'static [(&'static str, &'static str)],
}

const MPIS: [Mpi; 2] = [
    Mpi {
        mpirun: "mpirun.openmpi",
        version: "Open MPI",
        variables: &[
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ("OMPI_MCA_plm_rsh_agent", AGENT),
            ("OMPI_MCA_pml", "ob1"),
            ("OMPI_MCA_btl", "tcp,self"),
            ("OMPI_MCA_btl_tcp_if_include", "eth0"),
            ("OMPI_MCA_oob_tcp_if_include", "eth0"),
            ("OMPI_MCA_hwloc_base_binding_policy", "none"),
        ],
    },
    Mpi {
        mpirun: "mpirun.mpich",
        version: "MPICH",
        variables: &[("HYDRA_LAUNCHER", "rsh"), ("HYDRA_LAUNCHER_EXEC", AGENT)],
    },
];

fn main() {
    if env::args().nth(1).as_deref() == Some(RANK) {
        return rank();
    }
    doctor_lists_what_it_tried();
    let is_there = |mpi: &&Mpi| Command::new(mpi.mpirun).arg("--version").output().is_ok();
    let found: Vec<&Mpi> = MPIS.iter().filter(is_there).collect();
    let with_hosts = on_hosts(2, &["true"], &[]).status.success();
    for mpi in &found {
        doctor_names_the_library_of_the_launcher(mpi);
        if with_hosts {
            a_program_runs_on_hosts_with_prefixed_lines(mpi);
            an_exit_code_is_passed_on(mpi);
        }
    }
    println!("{} of {} MPIs skipped", MPIS.len() - found.len(), MPIS.len());
    println!("tests on hosts: {} skipped", if with_hosts { 0 } else { 2 * found.len() });
}

/// What a rank does: it sums over all ranks, and says with whom.
fn rank() {
    let mesh = Init::new().start().unwrap();
    let mine = Tensor::from_slice(&[mesh.my_rank().unwrap() as f32 + 1.0], &[1]).unwrap();
    let sum = mesh.all_reduce(mine, Reduce::Sum).unwrap().item::<f32>().unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    println!("rank {} of {} on {}: {sum}", mesh.my_rank().unwrap(), mesh.size(), host.trim());
    drop(mesh);
    std::process::exit(env::args().nth(2).map_or(0, |code| code.parse().unwrap()));
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{:?}\n{out}{err}", output.status)
}

/// Runs a command on the first of some hosts.
fn on_hosts(count: usize, command: &[&str], variables: &[(&str, &str)]) -> Output {
    let mark = format!("consort-cli-{}", std::process::id());
    Command::new("unshare")
        .args(["--net", "--mount", "--uts", "sh", "-ec", SCRIPT, "hosts.sh", &count.to_string(), "-", &mark])
        .args(command)
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

fn doctor_lists_what_it_tried() {
    let outside = |command: &mut Command| {
        // As a process that no launcher has started.
        for name in ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"] {
            command.env_remove(name);
        }
        command.output().unwrap()
    };
    let said = outside(Command::new(CONSORT).arg("doctor").env_remove("CONSORT_MPI"));
    assert!(said.status.success(), "{}", text(&said));
    let said = text(&said);
    for name in ["libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi_abi.so.1"] {
        assert!(said.contains(&format!("  {name}")), "{name}: {said}");
    }
    assert!(said.contains("\nA program started like this uses "), "{said}");
    let said = outside(Command::new(CONSORT).arg("doctor").env("CONSORT_MPI", "libno.so.1"));
    let said = text(&said);
    let expected = "A program started like this uses none: mpi: CONSORT_MPI names libno.so.1: ";
    assert!(said.contains(expected) && said.contains("  note: "), "{said}");
}

fn doctor_names_the_library_of_the_launcher(mpi: &Mpi) {
    let mut command = Command::new(mpi.mpirun);
    // There is no agent here.
    let variables = mpi.variables.iter().copied().filter(|(_, value)| *value != AGENT);
    let said = command.args(["-n", "1", CONSORT, "doctor"]).envs(variables).output().unwrap();
    assert!(said.status.success(), "{}", text(&said));
    let said = text(&said);
    // The line of the library that is used names its file, and the line above that file its version.
    let lines: Vec<&str> = said.lines().collect();
    let uses = |line: &&str| line.strip_prefix("A program started like this uses ").is_some();
    let used = lines.iter().copied().find(uses).unwrap_or_else(|| panic!("{said}"));
    let file = used.rsplit(' ').next().unwrap().trim_end_matches('.');
    let at = lines.iter().position(|line| line.trim() == file).unwrap_or_else(|| panic!("{said}"));
    assert!(lines[at - 1].contains(mpi.version), "{said}");
}

fn run_on_hosts(mpi: &Mpi, arguments: &[&str]) -> Output {
    let this = env::current_exe().unwrap().to_string_lossy().into_owned();
    let command = [&[CONSORT, "run", "--hosts", "h1:2,h2:2", "--", &this, RANK], arguments].concat();
    let variables = [mpi.variables, &[("CONSORT_MPIRUN", mpi.mpirun)]].concat();
    on_hosts(2, &command, &variables)
}

fn a_program_runs_on_hosts_with_prefixed_lines(mpi: &Mpi) {
    let ran = run_on_hosts(mpi, &[]);
    assert!(ran.status.success(), "{}: {}", mpi.mpirun, text(&ran));
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    let mut lines: Vec<&str> = said.lines().filter(|line| line.contains(" of 4 on ")).collect();
    lines.sort_unstable();
    let rank = |rank: usize| format!("[{rank}] rank {rank} of 4 on h{}: 10", rank / 2 + 1);
    assert_eq!(lines, [0, 1, 2, 3].map(rank), "{}: {}", mpi.mpirun, text(&ran));
    assert!(!text(&ran).contains("left behind"), "{}: {}", mpi.mpirun, text(&ran));
}

fn an_exit_code_is_passed_on(mpi: &Mpi) {
    let ran = run_on_hosts(mpi, &["7"]);
    assert_eq!(ran.status.code(), Some(7), "{}: {}", mpi.mpirun, text(&ran));
}
