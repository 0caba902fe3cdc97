//! What a job must not leave behind: processes, sockets, heaps, files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use super::job::Ended;
use super::rank::LONG;

/// Resources of the trials so far.
pub(crate) struct Leftovers {
    /// The folder in which ranks would create temporary files.
    folder: PathBuf,
    /// The inodes of all heaps.
    heaps: Mutex<BTreeSet<String>>,
}

impl Leftovers {
    pub(crate) fn new() -> Leftovers {
        let folder = std::env::temp_dir().join(format!("consort-trials-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Leftovers { folder, heaps: Mutex::default() }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Checks that nothing of a job is left.
    pub(crate) fn check(&self, ended: &Ended) -> Result<(), String> {
        let mut jobs = BTreeSet::new();
        for said in ended.all_after("job ") {
            let [job, "process", process, "heaps", heaps] = said.split(' ').collect::<Vec<_>>()[..] else {
                return Err(format!("not what a rank says: {said:?}"));
            };
            jobs.insert(job);
            // Dead or alive: orphans are reparented to this test.
            if parent(process) == Some(std::process::id()) {
                return Err(format!("process {process} of a rank is left"));
            }
            let heaps: BTreeSet<String> = heaps.split(',').map(str::to_string).collect();
            self.heaps.lock().unwrap().extend(heaps);
        }
        for job in jobs {
            let variable = format!("CONSORT_JOB={job}\0");
            let is_of_job = |process: &String| {
                let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
                environment.windows(variable.len()).any(|window| window == variable.as_bytes())
            };
            if let Some(process) = processes().into_iter().find(is_of_job) {
                return Err(format!("process {process} of the job is left"));
            }
            // A rank that another trial starts has a copy of this process's sockets until it executes its program.
            let gone = || !fs::read_to_string("/proc/net/unix").unwrap().contains(job);
            let until = Instant::now() + LONG;
            while !gone() {
                if Instant::now() > until {
                    return Err("the job's socket is left".to_string());
                }
                thread::yield_now();
            }
            for folder in ["/tmp", "/dev/shm"] {
                if let Some(name) = names(Path::new(folder)).into_iter().find(|name| name.contains(job)) {
                    return Err(format!("{folder}/{name} is left"));
                }
            }
        }
        // The coordinator, in this process, passed on the descriptors of the heaps.
        self.check_heaps(&["self".to_string()])
    }

    /// Checks that no living process has a heap and that no rank left a file. Removes the folder.
    pub(crate) fn check_at_the_end(&self) -> Result<(), String> {
        let files = names(&self.folder);
        fs::remove_dir_all(&self.folder).unwrap();
        if !files.is_empty() {
            return Err(format!("temporary files are left: {files:?}"));
        }
        self.check_heaps(&processes())
    }

    fn check_heaps(&self, processes: &[String]) -> Result<(), String> {
        let heaps = self.heaps.lock().unwrap();
        for process in processes {
            let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
            let mapped = maps.lines().filter(|line| line.contains("/memfd:consort"));
            let mut inodes = mapped.filter_map(|line| line.split_whitespace().nth(4)).map(str::to_string);
            let mut opened = opened(process);
            if let Some(heap) = inodes.find(|inode| heaps.contains(inode)) {
                return Err(format!("process {process} has a heap mapped: inode {heap}"));
            }
            if let Some(heap) = opened.find(|inode| heaps.contains(inode)) {
                return Err(format!("process {process} has a heap open: inode {heap}"));
            }
        }
        Ok(())
    }
}

/// The inodes of the heaps that a process has open.
fn opened(process: &str) -> impl Iterator<Item = String> {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let heaps = files.map(|file| file.path()).filter(|path| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("/memfd:consort"))
    });
    heaps.filter_map(|path| Some(fs::metadata(path).ok()?.ino().to_string()))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// All processes, by their ids.
fn processes() -> Vec<String> {
    let is_number = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    names(Path::new("/proc")).into_iter().filter(is_number).collect()
}

fn parent(process: &str) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}
