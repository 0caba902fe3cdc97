//! What a compiled function may have needed once it is in its steady state.

use super::Stats;
use super::explain::count;

/// How many graphs, breaks and recompilations a compiled function may have had: as many graphs as given, and no breaks and
/// no recompilations unless they are given.
///
/// [`expect_steady`](crate::Compiled::expect_steady) has an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steady {
    graphs: u64,
    breaks: u64,
    recompiles: u64,
}

impl Steady {
    /// At most this number of graphs, without breaks and recompilations.
    ///
    /// [`expect_steady`](crate::Compiled::expect_steady) has an example.
    pub fn graphs(graphs: u64) -> Steady {
        Steady { graphs, breaks: 0, recompiles: 0 }
    }

    /// The same with at most this number of breaks.
    ///
    /// [`expect_steady`](crate::Compiled::expect_steady) has an example.
    #[must_use]
    pub fn breaks(self, breaks: u64) -> Steady {
        Steady { breaks, ..self }
    }

    /// The same with at most this number of recompilations.
    ///
    /// [`expect_steady`](crate::Compiled::expect_steady) has an example.
    #[must_use]
    pub fn recompiles(self, recompiles: u64) -> Steady {
        Steady { recompiles, ..self }
    }

    /// What was expected and what there was, if a count is larger than allowed.
    pub(super) fn exceeded(self, stats: &Stats) -> Option<(String, String)> {
        let Steady { graphs, breaks, recompiles } = self;
        if stats.uncompiled > 0 {
            let got = format!("{} that ran eagerly, past the limit", count(stats.uncompiled, "call"));
            return Some(("every call to be compiled".to_string(), got));
        }
        if stats.graphs <= graphs && stats.breaks <= breaks && stats.recompiles <= recompiles {
            return None;
        }
        let text = |graphs, breaks, recompiles| {
            let (graphs, breaks) = (count(graphs, "graph"), count(breaks, "break"));
            format!("{graphs}, {breaks} and {}", count(recompiles, "recompile"))
        };
        let expected = format!("at most {}", text(graphs, breaks, recompiles));
        Some((expected, text(stats.graphs, stats.breaks, stats.recompiles)))
    }
}
