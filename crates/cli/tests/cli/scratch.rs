//! A folder for one test, the binary run inside it, and the input files.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Sums over two ranks.
pub(crate) const SUM: &str = "mesh (tp: 2)

func @sum(v0: f32[2]{tp}) -> f32[2] {
    v1 = all_reduce_start[reduce=sum, over=tp] v0    : pending<f32[2]> ; sum.rs:3
    v2 = wait v1                                     : f32[2]
    return v2
}
";

/// The outcome of a run of the binary.
pub(crate) struct Outcome {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// All fields at once, so that a failing comparison shows them.
    pub(crate) fn parts(&self) -> (i32, &str, &str) {
        (self.code, &self.stdout, &self.stderr)
    }

    /// The standard output as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).expect("JSON on the standard output")
    }
}

/// A folder that is removed at the end of its test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Scratch {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("consort-cli-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for the test");
        Scratch(folder)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).expect("a file for the test");
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).expect("a file that was written")
    }

    /// Runs the binary in the folder; the arguments are split at spaces.
    pub(crate) fn run(&self, args: &str) -> Outcome {
        self.run_with_input(args, "")
    }

    /// The same with a text on the standard input.
    pub(crate) fn run_with_input(&self, args: &str, input: &str) -> Outcome {
        let mut child = Command::new(env!("CARGO_BIN_EXE_consort"))
            .args(args.split_whitespace())
            .current_dir(&self.0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary");
        // A command that does not read its input may have ended already.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(input.as_bytes()));
        let Output { status, stdout, stderr } = child.wait_with_output().expect("the end of the binary");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Outcome { code: status.code().expect("an exit code"), stdout: text(stdout), stderr: text(stderr) }
    }

    /// Runs the binary and expects a user error: exit code 1, nothing printed, and this text.
    #[track_caller]
    pub(crate) fn refuses(&self, args: &str, stderr: &str) {
        let outcome = self.run(args);
        assert_eq!(outcome.parts(), (1, "", stderr), "consort {args}");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An npy file: version 1.0, row-major.
pub(crate) fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let header = format!("{header:<117}\n");
    [b"\x93NUMPY\x01\x00\x76\x00".as_slice(), header.as_bytes(), data].concat()
}

/// An npy file of f32 in one dimension.
pub(crate) fn npy_f32(data: &[f32]) -> Vec<u8> {
    npy("<f4", &format!("({},)", data.len()), &floats(data))
}

/// The bytes of f32.
pub(crate) fn floats(data: &[f32]) -> Vec<u8> {
    data.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A safetensors file, from its header and its data.
pub(crate) fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}
