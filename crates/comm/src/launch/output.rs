//! The ranks' output: read from pipes, written line by line, each line with its rank.
//!
//! One thread reads all pipes and is the only one to write, whole lines at a time, so that no line is ever broken by
//! another. A line that a rank has not ended is kept until it does, or until the rank itself ends. When all ranks have
//! ended, what they wrote is in the pipes: reading until they are empty loses nothing, and does not wait for a process
//! that a rank left behind with the pipe open.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

use super::Options;
use super::error::LaunchError;
use super::signals::Signals;
use crate::control::socket::timespec;

/// A longer line is broken, so that a rank that never ends its line uses bounded memory.
const MAX_LINE: usize = 16 << 20;
/// How much of a rank's standard error is kept for the summary: a panic with its backtrace.
const TAIL_LINES: usize = 30;
const TAIL_WIDTH: usize = 400;

/// Where output goes.
pub struct Sink {
    to: Box<dyn Write + Send>,
    /// Whether to colour it: then ranks have colours, and the standard error a mark.
    colour: bool,
}

impl Sink {
    /// A sink without colour.
    pub fn new(to: impl Write + Send + 'static) -> Sink {
        Sink { to: Box::new(to), colour: false }
    }

    /// A sink with colour where it is a terminal, unless NO_COLOR says otherwise.
    pub fn terminal(to: impl Write + IsTerminal + Send + 'static) -> Sink {
        let colour = to.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Sink { to: Box::new(to), colour }
    }
}

/// One of the two streams of a rank.
struct Stream {
    /// `None` once it has ended.
    pipe: Option<File>,
    rank: usize,
    is_err: bool,
    /// The beginning of a line that is not complete.
    partial: Vec<u8>,
    tee: Option<TeeFile>,
    tail: VecDeque<String>,
}

/// A file that gets a copy of a stream.
struct TeeFile {
    path: PathBuf,
    file: File,
}

/// The output of all ranks, before it is carried.
pub(super) struct Output {
    streams: Vec<Stream>,
    tees: VecDeque<(Option<TeeFile>, Option<TeeFile>)>,
    /// The rank whose standard output is written; `None` for all of them.
    only: Option<usize>,
    out: Sink,
    err: Sink,
    /// Whether something could not be written.
    lost: bool,
}

impl Output {
    /// Opens the files of `--tee`.
    pub(super) fn new(options: &Options, out: Sink, err: Sink) -> Result<Output, LaunchError> {
        let mut tees = VecDeque::new();
        if let Some(folder) = &options.tee {
            let failed = |path: &Path, error| LaunchError::Tee { path: path.to_path_buf(), error };
            fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
            let open = |rank: usize, ending: &str| {
                let path = folder.join(format!("rank-{rank}.{ending}"));
                let file = File::create(&path).map_err(|error| failed(&path, error))?;
                Ok(TeeFile { path, file })
            };
            for rank in 0..options.ranks {
                tees.push_back((Some(open(rank, "out")?), Some(open(rank, "err")?)));
            }
        }
        Ok(Output { streams: Vec::new(), tees, only: options.only, out, err, lost: false })
    }

    /// Adds the pipes of the next rank.
    pub(super) fn add(&mut self, (out, err): (OwnedFd, OwnedFd)) -> io::Result<()> {
        let rank = self.streams.len() / 2;
        let (tee_out, tee_err) = self.tees.pop_front().unwrap_or_default();
        for (pipe, tee, is_err) in [(out, tee_out, false), (err, tee_err, true)] {
            rustix::io::ioctl_fionbio(&pipe, true)?;
            let (partial, tail) = (Vec::new(), VecDeque::new());
            self.streams.push(Stream { pipe: Some(File::from(pipe)), rank, is_err, partial, tee, tail });
        }
        Ok(())
    }

    /// Starts the thread that forwards the output.
    pub(super) fn start(mut self) -> io::Result<Carrier> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (ended, done) = (Arc::new(eventfd(0, flags)?), Arc::new(eventfd(0, flags)?));
        let (tells_ended, tells_done) = (Arc::clone(&ended), Arc::clone(&done));
        let notes = Arc::new(Notes { text: Mutex::default(), wake: eventfd(0, flags)? });
        let noted = Arc::clone(&notes);
        let carry = move || {
            self.carry(&tells_ended, &noted);
            let _ = rustix::io::write(&*tells_done, &1u64.to_ne_bytes());
            let tails = self.streams.into_iter().filter(|stream| stream.is_err);
            (tails.map(|stream| stream.tail.into()).collect(), self.lost)
        };
        let thread = thread::Builder::new().name("consort output".into()).spawn(carry)?;
        Ok(Carrier { ended, done, notes, thread })
    }

    fn carry(&mut self, ended: &OwnedFd, notes: &Notes) {
        let mut bytes = vec![0; 64 * 1024];
        loop {
            let mut fds = vec![PollFd::new(ended, PollFlags::IN), PollFd::new(&notes.wake, PollFlags::IN)];
            let open: Vec<usize> =
                (0..self.streams.len()).filter(|i| self.streams[*i].pipe.is_some()).collect();
            fds.extend(
                open.iter()
                    .filter_map(|i| self.streams[*i].pipe.as_ref())
                    .map(|pipe| PollFd::new(pipe, PollFlags::IN)),
            );
            if let Err(Errno::INTR) = poll(&mut fds, None) {
                continue;
            }
            // Checked before the pipes are read: they then hold all there will be.
            let all_ended = !fds[0].revents().is_empty();
            let ready: Vec<usize> = open
                .iter()
                .zip(&fds[2..])
                .filter(|(_, fd)| !fd.revents().is_empty())
                .map(|(i, _)| *i)
                .collect();
            self.tell(&notes.take());
            for i in if all_ended { open } else { ready } {
                // One piece at a time, so that a rank with much output does not delay the others.
                while self.read(i, &mut bytes) && all_ended {}
            }
            if all_ended {
                for i in 0..self.streams.len() {
                    self.streams[i].pipe = None;
                    self.write(i, &[]);
                }
                return;
            }
        }
    }

    /// Forwards one piece of a stream; false if there was none.
    fn read(&mut self, i: usize, bytes: &mut [u8]) -> bool {
        let stream = &mut self.streams[i];
        let Some(pipe) = &mut stream.pipe else { return false };
        let piece = match pipe.read(bytes) {
            Ok(n) => &bytes[..n],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(_) => &[],
        };
        if piece.is_empty() {
            stream.pipe = None;
        }
        let told = stream.tee(piece);
        self.tell(&told);
        self.write(i, piece);
        !piece.is_empty()
    }

    /// Writes the lines that a piece completes.
    fn write(&mut self, i: usize, piece: &[u8]) {
        let stream = &mut self.streams[i];
        let is_err = stream.is_err;
        if !is_err && self.only.is_some_and(|only| only != stream.rank) {
            return;
        }
        let sink = if is_err { &mut self.err } else { &mut self.out };
        let text = stream.lines(piece, sink.colour);
        if !text.is_empty()
            && let Err(error) = sink.to.write_all(&text).and_then(|()| sink.to.flush())
        {
            // Our output cannot be written: close the pipes, so that the ranks get an error when they write, too.
            let same = self.streams.iter_mut().filter(|stream| stream.is_err == is_err);
            same.for_each(|stream| stream.pipe = None);
            if error.kind() != io::ErrorKind::BrokenPipe {
                self.lost = true;
                self.tell(&format!("error: run: cannot write the ranks' output: {error}\n"));
            }
        }
    }

    /// Writes lines of the launcher's own to the standard error.
    fn tell(&mut self, lines: &str) {
        if !lines.is_empty() {
            // If nobody reads the standard error, the lines are lost.
            let _ = self.err.to.write_all(lines.as_bytes()).and_then(|()| self.err.to.flush());
        }
    }
}

impl Stream {
    /// Copies a piece; returns an error as a line, or an empty text.
    fn tee(&mut self, piece: &[u8]) -> String {
        let Some(TeeFile { path, file }) = &mut self.tee else { return String::new() };
        let Err(error) = file.write_all(piece) else { return String::new() };
        // Most likely the disk is full. The copy ends there; the job continues.
        let told = format!("error: run: --tee: {}: {error}; it is not written any further\n", path.display());
        self.tee = None;
        told
    }

    /// The lines that this piece completes, formatted for output; at the end also the partial line.
    fn lines(&mut self, piece: &[u8], colour: bool) -> Vec<u8> {
        let mut text = Vec::new();
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend(part);
            if part.ends_with(b"\n") || self.partial.len() >= MAX_LINE {
                self.end_line(&mut text, colour);
            }
        }
        if self.pipe.is_none() && !self.partial.is_empty() {
            self.end_line(&mut text, colour);
        }
        text
    }

    fn end_line(&mut self, text: &mut Vec<u8>, colour: bool) {
        let mut line = std::mem::take(&mut self.partial);
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        let rank = self.rank;
        let prefix = match (colour, self.is_err) {
            (false, _) => format!("[{rank}] "),
            (true, false) => format!("\x1b[{}m[{rank}]\x1b[0m ", 31 + rank % 6),
            (true, true) => format!("\x1b[{}m[{rank}]\x1b[0m\x1b[2m!\x1b[0m ", 31 + rank % 6),
        };
        text.extend(prefix.as_bytes());
        text.extend(&line);
        if self.is_err {
            let shown = String::from_utf8_lossy(&line[..line.len().min(TAIL_WIDTH)]).trim_end().to_string();
            self.tail.push_back(shown);
            if self.tail.len() > TAIL_LINES {
                self.tail.pop_front();
            }
        }
    }
}

/// The launcher's own lines for the standard error while ranks run.
struct Notes {
    text: Mutex<String>,
    wake: OwnedFd,
}

impl Notes {
    fn take(&self) -> String {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        std::mem::take(&mut *self.text.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The thread that forwards the output.
pub(super) struct Carrier {
    /// Tells it that all ranks have ended.
    ended: Arc<OwnedFd>,
    /// Told by it when everything is written.
    done: Arc<OwnedFd>,
    notes: Arc<Notes>,
    thread: JoinHandle<(Vec<Vec<String>>, bool)>,
}

impl Carrier {
    /// Writes lines of the launcher's own to the standard error, without waiting for it.
    pub(super) fn note(&self, lines: &str) {
        *self.notes.text.lock().unwrap_or_else(PoisonError::into_inner) += lines;
        let _ = rustix::io::write(&self.notes.wake, &1u64.to_ne_bytes());
    }

    /// Waits until all is written: the last lines of each rank's standard error, and whether output was lost. If the
    /// reader has stopped, a signal or the limit, if there is one, ends the wait.
    pub(super) fn finish(self, signals: &Signals, limit: Option<Duration>) -> (Vec<Vec<String>>, bool) {
        let _ = rustix::io::write(&*self.ended, &1u64.to_ne_bytes());
        let mut fds = vec![PollFd::new(&*self.done, PollFlags::IN)];
        fds.extend(signals.poll_fds_of_ends());
        while let Err(Errno::INTR) = poll(&mut fds, limit.map(timespec).as_ref()) {}
        let done = !fds[0].revents().is_empty();
        if done { self.thread.join().unwrap_or_default() } else { Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(is_err: bool) -> Stream {
        let pipe = Some(File::open("/dev/null").unwrap());
        Stream { pipe, rank: 3, is_err, partial: Vec::new(), tee: None, tail: VecDeque::new() }
    }

    fn text(stream: &mut Stream, piece: &str, colour: bool) -> String {
        String::from_utf8(stream.lines(piece.as_bytes(), colour)).unwrap()
    }

    #[test]
    fn lines_are_whole_and_the_last_one_comes_at_the_end() {
        let mut stream = stream(false);
        assert_eq!(text(&mut stream, "a", false), "");
        assert_eq!(text(&mut stream, "b\n\nc", false), "[3] ab\n[3] \n");
        stream.pipe = None;
        assert_eq!(text(&mut stream, "", false), "[3] c\n");
        assert_eq!(text(&mut stream, "", false), "");
    }

    #[test]
    fn a_terminal_has_colours_and_a_mark() {
        assert_eq!(text(&mut stream(false), "a\n", true), "\x1b[34m[3]\x1b[0m a\n");
        assert_eq!(text(&mut stream(true), "a\n", true), "\x1b[34m[3]\x1b[0m\x1b[2m!\x1b[0m a\n");
    }

    #[test]
    fn the_last_lines_of_the_standard_error_are_kept() {
        let mut stream = stream(true);
        (0..32).for_each(|i| drop(text(&mut stream, &format!("line {i}\n"), false)));
        assert_eq!(stream.tail.front().map(String::as_str), Some("line 2"));
        assert_eq!(stream.tail.len(), TAIL_LINES);
        text(&mut stream, &format!("{}\n", "é".repeat(500)), false);
        assert_eq!(stream.tail.back().map(|line| line.chars().count()), Some(TAIL_WIDTH / 2));
    }
}
