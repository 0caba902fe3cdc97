//! The progress bar of a demo, one line of a terminal that is written again and again.

use std::io::{IsTerminal, Stderr, Write, stderr};

/// Writes the bar; nothing without a terminal.
pub(super) struct Bar<W> {
    pub(super) out: Option<W>,
}

impl Bar<Stderr> {
    pub(super) fn new() -> Bar<Stderr> {
        let out = stderr();
        Bar { out: out.is_terminal().then_some(out) }
    }
}

impl<W: Write> Bar<W> {
    /// How much is done, from 0 to 1, and what is being done.
    pub(super) fn show(&mut self, done: f64, doing: &str) {
        // With the longest text within the 80 columns of a terminal: a longer line would wrap, and its rest would stay.
        const WIDTH: usize = 20;
        let full = (done.clamp(0.0, 1.0) * WIDTH as f64) as usize;
        self.write(&format!("\r\x1b[K  {}{} {doing}", "█".repeat(full), "░".repeat(WIDTH - full)));
    }

    pub(super) fn clear(&mut self) {
        self.write("\r\x1b[K");
    }

    fn write(&mut self, text: &str) {
        if let Some(out) = &mut self.out {
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written for a bar with this text, and for its end.
    fn shown(done: f64, doing: &str) -> String {
        let mut bar = Bar { out: Some(Vec::new()) };
        bar.show(done, doing);
        bar.clear();
        String::from_utf8(bar.out.unwrap_or_default()).unwrap_or_default()
    }

    #[test]
    fn a_bar_is_one_line_that_is_cleared() {
        assert_eq!(shown(0.5, "half"), "\r\x1b[K  ██████████░░░░░░░░░░ half\r\x1b[K");
        assert_eq!(shown(-1.0, ""), "\r\x1b[K  ░░░░░░░░░░░░░░░░░░░░ \r\x1b[K");
        assert_eq!(shown(2.0, ""), "\r\x1b[K  ████████████████████ \r\x1b[K");
        let mut nowhere: Bar<Vec<u8>> = Bar { out: None };
        nowhere.show(0.5, "half");
        assert!(nowhere.out.is_none());
    }
}
