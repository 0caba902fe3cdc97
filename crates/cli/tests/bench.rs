//! Runs `consort bench` with the built binary, briefly: its output is complete, and nothing is left behind.
//!
//! No time is compared with anything: the speed of the machine is not tested.
#![allow(clippy::unwrap_used, reason = "a test ends where it cannot go on")]

#[path = "../../consort/tests/processes/mpirun.rs"]
mod mpirun;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

const OPS: [&str; 11] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "pingpong",
    "ring",
    "all_reduce_common",
    "all_gather_common",
    "broadcast_common",
    "all_reduce_outside",
];

/// Exit code, standard output and standard error of `consort bench` with arguments that are split at `|`.
fn bench(arguments: &str) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.arg("bench").args(arguments.split('|')).stdin(Stdio::null());
    // Variables set around the tests are not meant for the ranks.
    for name in ["CONSORT_RANK", "CONSORT_SIZE", "CONSORT_JOB", "CONSORT_SECRET"] {
        command.env_remove(name);
    }
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The objects that it writes.
#[track_caller]
fn objects(arguments: &str) -> Vec<Value> {
    let (code, out, err) = bench(arguments);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn check(objects: &[Value], transport: &str, ranks: u64, ops: &[&str], sizes: &[u64]) {
    let mut seen = BTreeSet::new();
    for object in objects {
        assert_eq!((&object["bench"], &object["transport"]), (&"comm".into(), &transport.into()));
        assert_eq!((&object["ranks"], &object["live"]), (&ranks.into(), &1.into()));
        for field in ["us", "bound_us", "gbs", "line_us", "cpu_us", "cpu_ns_per_byte"] {
            assert!(object[field].is_number(), "{field} in {object}");
        }
        assert!(object["line_us"].as_f64().unwrap() > 0.0 && object["samples"].as_u64().unwrap() > 0);
        assert!(["near", "far", "mixed"].contains(&object["mode"].as_str().unwrap()));
        seen.insert((object["op"].as_str().unwrap(), object["bytes"].as_u64().unwrap()));
    }
    let all = ops.iter().flat_map(|op| sizes.iter().map(|size| (*op, *size))).collect();
    assert_eq!(seen, all);
}

#[test]
fn every_op_gives_a_figure() {
    let figures = objects("comm|--sizes|4,4096|--seconds|0.05|--json");
    check(&figures, "shm", 2, &OPS, &[4, 4096]);
    for figure in figures {
        let op = figure["op"].as_str().unwrap();
        let special = op.ends_with("_common") || op.ends_with("_outside");
        assert_eq!(figure["plain_us"].is_number(), special, "{figure}");
    }
}

#[test]
fn threads_and_more_ranks_than_cores_are_measured_too() {
    let threads = objects("comm|--transport|local|--ranks|3|--sizes|4,100k|--seconds|0.01|--json");
    check(&threads, "local", 3, &OPS, &[4, 102_400]);
    let many = objects("comm|--ranks|5|--ops|all_reduce,ring|--sizes|8k|--seconds|0.01|--json");
    check(&many, "shm", 5, &["all_reduce", "ring"], &[8192]);
}

#[test]
fn the_table_is_for_people() {
    let (code, out, err) = bench("comm|--ops|all_reduce,all_gather_common|--sizes|64k|--seconds|0.01");
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("2 processes, live data, medians\n\nop "), "{out}");
    assert!(out.contains("\nall_gather_common    64 KiB "), "{out}");
    assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
}

#[test]
fn wrong_arguments_are_one_error() {
    let check = |arguments: &str, expected: &str| {
        let (code, out, err) = bench(arguments);
        assert_eq!((code, out.as_str(), err), (1, "", format!("error: bench: {expected}\n")));
    };
    check("comm|--ranks|1", "--ranks: expected numbers from 2 to 64, got `1`");
    check(
        "comm|--sizes|4,6",
        "--sizes: expected multiples of 4 such as 1024, 64k or 16m, up to 1024m, got `6`",
    );
    check("comm|--seconds|0", "--seconds: expected a number above 0 and up to 3600, got 0");
    check("comm|--near|0", "--near: expected a number of microseconds above 0, got 0");
    check("comm|--peer| ", "--peer: expected a command, got nothing");
    check(
        "comm|--peer|peer|--ranks|2,4",
        "--peer: expected {ranks} in the command, because --ranks has several numbers",
    );
    check(
        "comm|--peer|peer|--transport|local",
        "--peer: expected --transport shm or mpi, got local\n  note: a peer's ranks are processes",
    );
    check("comm|--transport|mpi|--mpirun| ", "--mpirun: expected a command, got nothing");
    check(
        "comm|--transport|mpi|--mpirun|mpirun|--ranks|2,4",
        "--mpirun: expected {ranks} in the command, because --ranks has several numbers",
    );
    check("launch|--mpirun| ", "--mpirun: expected a command, got nothing");
    check("train|-n|3", "-n: expected 1, 2, 4 or 8, got 3");
    check("train|--batch|0", "--batch: expected a number above 0, got 0");
    check("programs|--seconds|0", "--seconds: expected a number above 0 and up to 3600, got 0");
    check("programs|--peer|halo", "--peer: expected CASE=COMMAND, got `halo`");
    check("programs|--rounds|0", "--rounds: expected a number from 1 to 1000, got 0");
    check("programs|--cases|nothing", "--cases: no case for 2 ranks begins with `nothing`");
    check("eager|--seconds|0", "--seconds: expected a number above 0 and up to 3600, got 0");
    check("eager|--cases|add_9,some|--seconds|0.01", "--cases: no case for 2 ranks begins with `add_9,some`");
    check("compile|--seconds|0", "--seconds: expected a number above 0 and up to 3600, got 0");
    check("compile|-n|0", "-n: expected a number from 1 to 64, got 0");
    check("compile|--cases|tp_huge|--seconds|0.01", "--cases: no case for 2 ranks begins with `tp_huge`");
    check("launch|--seconds|nan", "--seconds: expected a number above 0 and up to 3600, got NaN");
    let (code, _, err) = bench("comm|--ops|all_reduce,some");
    assert!(code == 1 && err.starts_with("error: bench: --ops: expected some of all_reduce, "), "{err}");
}

#[test]
fn a_peer_that_fails_is_one_error() {
    let quick = "comm|--ops|ring|--sizes|4|--seconds|0.01|--peer";
    let check = |peer: &str, expected: &str| {
        let (code, out, err) = bench(&format!("{quick}|{peer}"));
        assert_eq!((code, out.as_str(), err), (1, "", format!("error: bench: peer{expected}\n")));
    };
    check("/no/such/peer", ": cannot start `/no/such/peer`: No such file or directory (os error 2)");
    check("false", " ended (exit status: 1) before all its ranks had reported");
    let (code, out, err) = bench(&format!("{quick}|ls /no/such/folder"));
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(
        err.starts_with("error: bench: peer ended (exit status: 2) before all its ranks had reported"),
        "{err}"
    );
    assert!(err.contains("its output: ") && err.contains("/no/such/folder"), "{err}");
}

#[test]
fn the_launcher_is_measured_beside_a_peer() {
    let launches = objects("launch|--seconds|0.01|--peer|true|--json");
    assert_eq!(launches.len(), 1);
    assert_eq!((&launches[0]["bench"], &launches[0]["ranks"]), (&"launch".into(), &2.into()));
    for field in ["us", "peer_us", "ratio", "samples"] {
        assert!(launches[0][field].as_f64().unwrap() > 0.0, "{field}");
    }
    let (code, out, err) = bench("launch|--seconds|0.01|--peer|false");
    assert_eq!(
        (code, out.as_str(), err.as_str()),
        (1, "", "error: bench: peer: `false` ended with exit status: 1\n")
    );
}

/// The mpiruns of this machine that can compile C programs, each with a peer of `benches`; prints which cannot.
fn with_peer(name: &str) -> Vec<(&'static str, PathBuf)> {
    let mut found = Vec::new();
    for mpirun in mpirun::mpiruns() {
        // mpirun.mpich has mpicc.mpich.
        let family = mpirun.split([' ', '.']).nth(1).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../benches/{name}.c"));
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.{family}"));
        let mut compiler = Command::new(format!("mpicc.{family}"));
        match compiler.args(["-O1", "-o"]).args([&program, &source]).output() {
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                found.push((mpirun, program));
            }
            Err(_) => println!("1 skipped: no mpicc.{family}"),
        }
    }
    found
}

#[test]
fn operations_over_mpi_are_measured_beside_the_same_calls() {
    for (mpirun, peer) in with_peer("peer_mpi") {
        let peer = format!("{mpirun} {}", peer.display());
        let start = format!("comm|--transport|mpi|--mpirun|{mpirun}|--seconds|0.01");
        let figures = objects(&format!("{start}|--peer|{peer}|--sizes|4k|--json"));
        check(&figures, "mpi", 2, &OPS[..7], &[4096]);
        for figure in &figures {
            for field in ["peer_us", "nonblocking_us", "nonblocking_more_us", "check_us"] {
                assert!(figure[field].is_number(), "{field} in {figure}");
            }
        }
        let (code, out, err) = bench(&format!("{start}|--ops|all_reduce|--sizes|4"));
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.starts_with("2 processes over MPI, live data, medians\n\nop "), "{out}");
        assert!(out.lines().all(|line| line.chars().count() <= 100), "{out}");
    }
}

#[test]
fn a_start_and_a_compiled_call_over_mpi_are_measured() {
    for (mpirun, peer) in with_peer("peer_start") {
        let peer = format!("{mpirun} {}", peer.display());
        let launches = objects(&format!("launch|--seconds|0.01|--mpirun|{mpirun}|--peer|{peer}|--json"));
        assert_eq!((&launches[0]["bench"], &launches[0]["ranks"]), (&"launch".into(), &2.into()));
        assert!(launches[0]["us"].as_f64().unwrap() > 0.0 && launches[0]["more_us"].is_number());
        let figures =
            objects(&format!("compile|--cases|one_op_comm|--mpirun|{mpirun}|--seconds|0.01|--json"));
        assert!(figures.len() == 1 && figures[0]["case"] == "one_op_comm", "{figures:?}");
        assert!(figures[0]["overhead_us"].is_number(), "{figures:?}");
    }
}

#[test]
fn tensors_are_measured_beside_their_limits() {
    let figures =
        objects("eager|--cases|all_reduce_owned_1m,all_reduce_shared_1m,add_8|--seconds|0.01|--json");
    let cases: Vec<&str> = figures.iter().map(|figure| figure["case"].as_str().unwrap()).collect();
    assert_eq!(cases, ["all_reduce_owned_1m", "all_reduce_shared_1m", "add_8_floats"]);
    for figure in &figures {
        assert_eq!(figure["bench"], "eager");
        for field in ["us", "limit_us", "ratio"] {
            assert!(figure[field].is_number(), "{field} in {figure}");
        }
        assert!(figure["samples"].as_u64().unwrap() >= 5 && figure["beside"].is_string(), "{figure}");
    }
    assert_eq!((figures[2]["limit_us"].as_f64(), &figures[2]["beside"]), (Some(0.25), &"0.25 us".into()));
    let (code, out, err) = bench("eager|--cases|add_8|--seconds|0.01");
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("case ") && lines[1].starts_with("add_8_floats "), "{out}");
    assert_eq!(lines.len(), 2, "{out}");
}

#[test]
fn programs_are_measured_in_their_modes() {
    let figures = objects("programs|--seconds|0.01|--json|--small");
    let of = |case: &str| -> Vec<&str> {
        let of_case = figures.iter().filter(|figure| figure["case"] == case);
        of_case.map(|figure| figure["mode"].as_str().unwrap()).collect()
    };
    for case in ["tp_brief", "tp_decode", "tp_tiny"] {
        assert_eq!(of(case), ["compiled", "eager", "broken", "no_collectives"]);
    }
    for case in ["ring_attention", "halo_exchange", "halo_jacobi"] {
        assert_eq!(of(case), ["compiled", "eager", "no_exchange"]);
    }
    assert_eq!(of("ring_kernel"), ["compiled", "eager"]);
    assert_eq!(of("coalesced"), ["compiled", "eager", "compiled_each", "eager_each"]);
    for figure in &figures {
        assert!(figure["bench"] == "programs" && figure["ranks"] == 2, "{figure}");
        assert!(figure["ms"].as_f64().unwrap() > 0.0 && figure["samples"].as_u64().unwrap() > 0, "{figure}");
        let broken = figure["mode"] == "broken";
        assert_eq!(figure["breaks"].as_u64().unwrap_or(0), if broken { 4 } else { 0 }, "{figure}");
        assert!(broken || figure["copied_bytes"] == 0, "{figure}");
    }
    let (code, out, err) = bench("programs|--cases|ring_k|--seconds|0.01|--small");
    assert_eq!((code, err.as_str(), out.lines().count()), (0, "", 3));
}

#[test]
fn steps_of_training_are_measured_beside_themselves() {
    let peer = "dp=printf {\"ms\":25,\"variant\":\"flat\"}\\n{\"ms\":7.5,\"variant\":\"ddp\"}\\n";
    for more in ["", "|--adam"] {
        let figures =
            objects(&format!("train|--seconds|0.01|--json|--small|--batch|4|--rounds|2|--peer|{peer}{more}"));
        let cases: Vec<&str> = figures.iter().map(|figure| figure["case"].as_str().unwrap()).collect();
        assert_eq!(cases, ["dp", "zero", "tp", "recompute", "llama"]);
        for figure in &figures {
            assert!(
                figure["bench"] == "train"
                    && figure["ranks"] == 2
                    && figure["batch"] == 4
                    && figure["breaks"] == 0,
                "{figure}"
            );
            for field in ["ms", "peak_bytes", "state_bytes", "copied_bytes", "compile_ms", "wire_bytes"] {
                assert!(figure[field].is_number(), "{field} in {figure}");
            }
            // Bytes that are copied for communication have their reasons, and there is no reason without bytes.
            let copies = figure["copies"].as_array().unwrap();
            assert_eq!(figure["copied_bytes"] == 0, copies.is_empty(), "{figure}");
            assert!(copies.iter().all(|copy| copy.as_str().is_some_and(|copy| !copy.is_empty())), "{figure}");
            if figure["case"] == "dp" || figure["case"] == "zero" {
                assert_eq!(figure["copied_bytes"], 0, "{figure}");
            }
            let case = figure["case"].as_str().unwrap();
            assert_eq!(
                figure["no_collectives_ms"].is_number(),
                ["dp", "zero", "tp"].contains(&case),
                "{figure}"
            );
            assert_eq!(figure["kept_ms"].is_number(), case == "recompute", "{figure}");
            let expected = if figure["case"] == "dp" { 7.5.into() } else { Value::Null };
            assert_eq!(figure["peer_ms"], expected, "{figure}");
        }
        let bytes = |place: usize| figures[place]["state_bytes"].as_u64().unwrap();
        // Two blocks of two weights of 8 x 8, and for Adam as many twice and a counter; half of it on each rank.
        let of_adam = |weights: u64| if more.is_empty() { weights } else { 3 * weights + 8 };
        assert_eq!([bytes(0), bytes(1), bytes(2)], [1024, 512, 512].map(of_adam));
        assert!(
            figures[4]["weights_bytes"].is_null() && figures[4]["saved_bytes"].is_null(),
            "{}",
            figures[4]
        );
    }
    let (code, out, err) = bench("train|--cases|dp,recompute|--seconds|0.01|--small");
    assert_eq!((code, err.as_str(), out.lines().count()), (0, "", 4), "{out}");
    let dp: Vec<&str> = out.lines().nth(1).unwrap().split_whitespace().collect();
    // After the time of the step and that without communication, each with its unit.
    assert!(dp[0] == "dp" && dp[5].ends_with('x'), "{out}");
    // The targets of what was measured: there was no peer.
    assert!(out.lines().next().unwrap().ends_with("  wanted"), "{out}");
    assert_eq!(targets(&out, "dp"), ["ms/no_collectives_ms", "copied_bytes"]);
    assert_eq!(
        targets(&out, "recompute"),
        ["ms/kept_ms", "saved_bytes/kept_saved_bytes", "compile_ms", "copied_bytes"]
    );
    assert!(out.contains(", saved_bytes/kept_saved_bytes 0.10 of 0.4, compile_ms "), "{out}");
    assert!(out.contains(", copied_bytes 0 of 0\n"), "{out}");
    assert!(out.contains("x of its saved activations (4 KiB of 40 KiB)"), "{out}");
}

/// The fields of a case that have targets; checks that those are missed of which the number says so.
#[track_caller]
fn targets<'a>(table: &'a str, case: &str) -> Vec<&'a str> {
    let row = table.lines().find(|line| line.split_whitespace().next() == Some(case)).unwrap();
    let check = |target: &'a str| {
        let words: Vec<&str> = target.split(' ').collect();
        let [got, most] = [1, 3].map(|at| words[at].parse::<f64>().unwrap());
        // A number that is rounded to the target may have been on either side.
        assert!(got == most || (got > most) == (words.get(4) == Some(&"missed")), "{target}");
        words[0]
    };
    // The last column.
    row.rsplit("  ").next().unwrap().split(", ").map(check).collect()
}

#[test]
fn zero_is_measured_against_data_parallel_on_four_ranks() {
    // Two blocks of two weights of 8 x 8 floats: of dp weights and gradients, and 512 bytes of a layer that is gathered.
    let (code, out, err) = bench("train|--cases|dp,zero|-n|4|--seconds|0.01|--small");
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(targets(&out, "zero"), ["ms/no_collectives_ms", "weights_bytes", "copied_bytes"]);
    let figures = objects("train|--cases|dp,zero|-n|4|--seconds|0.01|--small|--json");
    let [dp, zero] = [0, 1].map(|place| figures[place]["weights_bytes"].as_f64().unwrap());
    assert_eq!(figures[1]["layer_bytes"], 512);
    let most = (0.3 * dp + 512.0).round();
    assert!(out.contains(&format!(", weights_bytes {zero} of {most}, copied_bytes 0 of 0\n")), "{out}");
    // Not where there are others, or where dp was not measured.
    for arguments in ["train|--cases|dp,zero|-n|2", "train|--cases|zero|-n|4"] {
        let (_, out, _) = bench(&format!("{arguments}|--seconds|0.01|--small"));
        assert_eq!(targets(&out, "zero"), ["ms/no_collectives_ms", "copied_bytes"]);
    }
}

#[test]
fn a_python_that_has_pytorch_is_a_peer() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("a_python_that_has_pytorch_is_a_peer");
    std::fs::create_dir_all(&folder).unwrap();
    // It writes down how it is called.
    let script = |name: &str, answer: &str| {
        let (path, calls) = (folder.join(name), folder.join(format!("{name}.calls")));
        let text = format!("#!/bin/sh\necho \"$@\" >> {}\n{answer}\n", calls.display());
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(&calls, "").unwrap();
        (path, calls)
    };
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let bench = |python: &Path, more: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["bench", "train", "--seconds", "0.01", "--small", "--batch", "4", "--python"]);
        let output = command.arg(python).args(more.split('|')).current_dir(&checkout).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    };
    let (python, calls) = script("with", "echo '{\"mode\":\"ddp\",\"ms\":0.001}'");
    let (code, out, err) = bench(&python, "--cases|dp");
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(targets(&out, "dp"), ["ms/no_collectives_ms", "ms/peer_ms", "copied_bytes"]);
    assert!(out.contains(" of 0.9 missed, "), "{out}");
    let calls_of = |calls: &Path| -> Vec<String> {
        std::fs::read_to_string(calls).unwrap().lines().map(String::from).collect()
    };
    let run = "-m torch.distributed.run --standalone --nproc-per-node 2 benches/peer_ddp.py --seconds 0.01 --batch 4";
    let said = calls_of(&calls);
    // Five rounds.
    assert!(
        said.len() == 6 && said[0].starts_with("-c import torch") && said[1..].iter().all(|call| call == run)
    );
    // Not beside steps that it does not do, and never beside a peer that is given.
    for more in ["--cases|dp|--adam", "--cases|tp", "--cases|dp|--peer|dp=echo {\"ms\":1}"] {
        let (code, out, err) = bench(&python, more);
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
    }
    assert_eq!(calls_of(&calls).len(), 6);
    let (python, _) = script("without", "echo no torch >&2; exit 1");
    let (code, out, err) = bench(&python, "--cases|dp");
    let expected = format!(
        "error: bench: --python: expected a Python that has PyTorch with gloo, got `{}`\n  its output: no torch\n",
        python.display()
    );
    assert_eq!((code, out.as_str(), err), (1, "", expected));
}

#[test]
fn memory_of_training_is_weights_and_activations() {
    // Two blocks of two weights of 8 x 8 floats, and four rows of data on each rank.
    let (weight, row) = (8 * 8 * 4, 4 * 8 * 4);
    for (ranks, adam) in [(1, true), (2, false), (2, true), (4, false), (4, true)] {
        let more = if adam { "|--adam" } else { "" };
        let figures = objects(&format!(
            "train|--cases|dp,zero,rec|--seconds|0.01|--json|--small|--batch|4|-n|{ranks}{more}"
        ));
        for (figure, parts) in figures.iter().zip([1, ranks]) {
            let bytes = |key: &str| figure[key].as_u64().unwrap();
            // Parameters and gradients, and for Adam twice as much and a counter.
            let own = 4 * weight / parts;
            let least = 2 * own + if adam { 2 * own + 8 } else { 0 };
            // One whole weight or gradient that is gathered or not yet scattered, or what Adam computes of one; and numbers.
            let whole = if adam || parts > 1 { weight } else { 0 };
            let expected = least + whole..least + whole + 64;
            assert!(expected.contains(&bytes("weights_bytes")), "{expected:?} {figure}");
            // What relu takes and gives in each block, what the first block gives, and what the last does.
            assert_eq!(bytes("saved_bytes"), 6 * row, "{figure}");
            assert!(bytes("activations_bytes") > 6 * row && bytes("state_bytes") == least - own, "{figure}");
        }
        let [saved, kept] = ["saved_bytes", "kept_saved_bytes"].map(|key| figures[2][key].as_u64().unwrap());
        // What each of the two layers gives; else also its norm, and four times as wide what gelu takes and gives.
        assert_eq!([saved, kept], [2 * row, 2 * row + 2 * 9 * row]);
    }
}

#[test]
fn peers_of_programs_are_measured_in_turns() {
    // Other output of a peer is ignored, and the figures of several rounds become one median.
    let figures = objects(
        "programs|--cases|ring_k|--seconds|0.01|--small|--json|--rounds|3|--peer|ring_kernel=printf hello\\n{\"us\":2500,\"variant\":\"there\",\"samples\":7}\\n",
    );
    let modes: Vec<&str> = figures.iter().map(|figure| figure["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["compiled", "eager", "peer:there"]);
    let peer = &figures[2];
    assert!(peer["case"] == "ring_kernel" && peer["ms"] == 2.5 && peer["samples"] == 21, "{peer}");
    let (code, out, err) = bench("programs|--cases|ring_k|--seconds|0.01|--small|--peer|ring_kernel=false");
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("bench: peer of ring_kernel: it failed"), "{err}");
}

#[test]
fn compiled_functions_are_measured_beside_themselves() {
    let figures = objects("compile|--cases|tp_tiny,one_op,b5_,agree,ops_10k|--seconds|0.01|--json");
    let cases: Vec<&str> = figures.iter().map(|figure| figure["case"].as_str().unwrap()).collect();
    let expected = ["tp_tiny", "one_op", "one_op_comm", "b5_dead", "b5_needed", "agree", "ops_10k"];
    assert_eq!(cases, expected);
    for figure in &figures {
        assert_eq!(
            (&figure["bench"], &figure["breaks"], &figure["graphs"]),
            (&"compile".into(), &0.into(), &1.into())
        );
        for field in ["compile_ms", "copied_bytes", "peak_bytes", "live_bytes"] {
            assert!(figure[field].is_number(), "{field} in {figure}");
        }
        let of_text = figure["case"] == "ops_10k";
        assert_eq!(
            (figure["call_us"].is_number(), figure["copies_agree"] == true),
            (!of_text, !of_text),
            "{figure}"
        );
    }
    assert!(figures[0]["eager_us"].is_number() && figures[0]["ratio"].is_number(), "{}", figures[0]);
    assert!(figures[1]["kernel_us"].is_number() && figures[2]["overhead_us"].is_number(), "{}", figures[2]);
    let copied: Vec<u64> = figures.iter().map(|figure| figure["copied_bytes"].as_u64().unwrap()).collect();
    assert_eq!(copied[..6], [0, 0, 0, 0, 4096, 0]);
    assert!(figures[5]["agree_ms"].is_number() && figures[6]["ops"].as_u64().unwrap() > 10_000);
    let (code, out, err) = bench("compile|--cases|b5_dead|-n|1|--seconds|0.01");
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("case ") && lines[0].ends_with(" wanted"), "{out}");
    assert!(lines[1].starts_with("b5_dead ") && lines[1].ends_with(" copied_bytes 0 of 0"), "{out}");
    assert_eq!(lines.len(), 2, "{out}");
}

/// The processes that have this text among their arguments.
fn processes_with(mark: &str) -> Vec<String> {
    let folders = std::fs::read_dir("/proc").unwrap().flatten();
    let arguments = folders.filter_map(|folder| std::fs::read(folder.path().join("cmdline")).ok());
    let texts = arguments.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    texts.filter(|text| text.contains("__bench") && text.contains(mark)).collect()
}

#[test]
fn nothing_stays_behind() {
    // The heap's size distinguishes the ranks of this run from those of other tests.
    let heap = (12_340usize * 2 * 4 + (64 << 20)).to_string();
    let (code, ..) = bench("comm|--ops|ring|--sizes|12340|--seconds|0.01|--peer|false");
    assert_eq!((code, processes_with(&heap)), (1, Vec::new()));
    let (code, ..) = bench("comm|--ops|ring|--sizes|12340|--seconds|0.01");
    assert_eq!((code, processes_with(&heap)), (0, Vec::new()));
}
